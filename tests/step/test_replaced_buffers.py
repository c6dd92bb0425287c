"""A buffer that the forward replaces (`self.ema = 0.9 * self.ema + 0.1 * x.mean()`) is state like one that is written
in place: eager's bits, taken back with a step that fails, and no drift where eager is run beside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from step_twins import assert_same, sgd, snapshot
from torch import Tensor, nn

import takeback as tb
from harness import Case, eager_step, same_bits, train_both
from takeback.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


class Tracked(nn.Module):
    """Keeps a moving average of what it sees, and divides by it; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("ema", torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.training:
            self.ema = self.ema * 0.9 + y.detach().abs().mean() * 0.1
            self.count = self.count + 1
        return y / self.ema


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch(i: int) -> tuple[Tensor]:
    return (torch.randn(6, 8, generator=torch.Generator().manual_seed(i)),)


def net() -> nn.Sequential:
    return nn.Sequential(Tracked(), nn.ReLU(), Tracked())


@pytest.mark.parametrize("settings", [{}, {"memory": "min", "verify_every": 2}, {"accumulate": 2}], ids=repr)
def test_buffer_that_the_forward_replaces_is_trained_to_eagers_bits(settings: dict[str, Any]) -> None:
    step = train_both(Case(net, loss_of, batch, sgd, settings={"max_plans": 2, **settings}), steps=8)
    assert step._model[0].count.item() == 8 * settings.get("accumulate", 1)


@pytest.mark.usefixtures("eagers_kernels")
def test_replaced_buffers_are_near_eagers_in_mode_fast_and_counted_once() -> None:
    """Every replay is compared with eager, which replaces the buffers, too, and is taken back."""
    torch.manual_seed(0)
    ours = net()
    eagers = copy.deepcopy(ours)
    optimizer = sgd(eagers)
    step = tb.compile_step(ours, loss_of, sgd(ours), mode="fast", verify_every=2)
    for i in range(8):
        eager_step(eagers, loss_of, optimizer, batch(i))
        step(*batch(i))
        torch.testing.assert_close(dict(ours.named_buffers()), dict(eagers.named_buffers()), rtol=1e-5, atol=0)
    assert step._replays == 7


def test_evaluation_and_a_replacement_by_hand_between_steps_need_no_new_plan() -> None:
    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if i == 4:
            with torch.no_grad():
                model(*batch(99))  # still in training mode: eager replaces the buffers, too
        if i == 6:
            model[0].ema = torch.full((1,), 3.0)

    train_both(Case(net, loss_of, batch, sgd, between=between), steps=9)


def test_step_that_fails_leaves_replaced_buffers_as_they_were() -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        if x.shape[0] == 3:
            raise RuntimeError("the user's own")
        return loss

    step = tb.compile_step(model, loss_fn, optimizer)
    for rows in (6, 6, 6, 3, 6):
        before = snapshot(model, optimizer)
        if rows == 3:
            with pytest.raises(RuntimeError, match="the user's own"):
                step(batch(1)[0][:3])
            assert_same(snapshot(model, optimizer), before)
        else:
            step(*batch(0))
    assert model[0].count.item() == 4


def test_buffer_of_two_names_that_is_replaced_under_one_stays_under_the_other() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Tracked()
            self.register_buffer("start", self.one.ema)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.start

    step = train_both(Case(Shared, loss_of, batch, sgd), steps=6)
    assert same_bits(step._model.start, torch.ones(1))
    assert step._model.one.ema.item() != 1.0


def test_buffer_that_carries_a_graph_into_the_next_step_is_refused() -> None:
    class Carries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.register_buffer("state", torch.zeros(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.lin(x) + 0.5 * self.state
            return self.state

    torch.manual_seed(0)
    model = Carries()
    optimizer = sgd(model)
    before, state = snapshot(model, optimizer), model.state
    with pytest.raises(CaptureError, match=r"outlives it.*still held"):
        tb.compile_step(model, loss_of, optimizer)(*batch(0))
    assert_same(snapshot(model, optimizer), before)
    assert model.state is state


def test_prediction_of_a_module_that_replaces_a_buffer_is_made_and_leaves_it() -> None:
    model = net()
    assert tb.predict(model, loss_of, sgd(model), *batch(0)).ops > 5
    assert model[0].count.item() == 0
