"""Plans for tensors that the user has replaced since, and for objects of earlier batches, do not keep these alive."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from harness import eager_step, sgd
from takeback.compiler.run.plans import _MOST_OUTDATED
from takeback.compiler.run.rebound import Rebound

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.filterwarnings("ignore:takeback made:RuntimeWarning"),
]
TIMES = 24


class Held:
    """An object of the user's."""

    def __init__(self, x: Tensor | None = None) -> None:
        self.x = torch.zeros(64, 8) if x is None else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("shift", torch.zeros(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x + self.shift).tanh())


Step = Callable[..., Any]


def attribute(net: Net, held: Held, step: Callable[[Callable[..., Tensor]], Step]) -> Callable[[Tensor], None]:
    run = step(lambda m: m(held.x).square().mean())

    def call(x: Tensor) -> None:
        held.x = x
        run()

    return call


def buffer(net: Net, held: Held, step: Callable[[Callable[..., Tensor]], Step]) -> Callable[[Tensor], None]:
    run, given = step(lambda m, x: m(x).square().mean()), torch.ones(64, 8)

    def call(x: Tensor) -> None:
        net.shift = x
        run(given)

    return call


def data(net: Net, held: Held, step: Callable[[Callable[..., Tensor]], Step]) -> Callable[[Tensor], None]:
    run = step(lambda m: m(held.x).square().mean())

    def call(x: Tensor) -> None:
        held.x.data = x
        run()

    return call


def batch(net: Net, held: Held, step: Callable[[Callable[..., Tensor]], Step]) -> Callable[[Tensor], None]:
    run = step(lambda m, b: m(b.x).square().mean())
    return lambda x: run(Held(x))


def compiled(net: Net, loss_fn: Callable[..., Tensor]) -> Step:
    return tb.compile_step(net, loss_fn, sgd(net))


def eager(net: Net, loss_fn: Callable[..., Tensor]) -> Step:
    optimizer = sgd(net)
    return lambda *given: eager_step(net, loss_fn, optimizer, given)


@pytest.mark.parametrize(("how", "most"), [(attribute, 2), (buffer, 2), (data, 2), (batch, _MOST_OUTDATED + 2)])
def test_replaced_tensors_go_and_bits_are_eagers(how: Callable[..., Callable[[Tensor], None]], most: int) -> None:
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    ours = how(net, Held(), lambda loss_fn: compiled(net, loss_fn))
    theirs = how(twin, Held(), lambda loss_fn: eager(twin, loss_fn))
    storages = []
    for _ in range(TIMES):
        x = torch.randn(64, 8)
        theirs(x.clone())
        storages.append(weakref.ref(x.untyped_storage()))
        ours(x)
        del x
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
    gc.collect()
    assert sum(storage() is not None for storage in storages) <= most


def test_tensors_that_take_turns_keep_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can stand in for them. They are small beside what the step takes."""
    monkeypatch.setattr(Rebound, "outdated_", lambda self, plan, leaves: None)
    net, held = Net(), Held()
    ring = [torch.randn(64, 8) for _ in range(4)]
    wide = torch.randn(4096, 8)
    step = tb.compile_step(net, lambda m: m(held.x).square().mean() + m.last(m.first(wide)).square().mean(), sgd(net))
    for i in range(24):
        held.x = ring[i % 4]
        step()
    assert step._plans.made == 4
