"""`F.one_hot` with a number of classes follows any classes by one plan, and refuses in a replay what eager refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from form_cases import ops_of
from step_twins import assert_same, snapshot
from torch import Tensor, nn

import takeback as tb
from harness import Case, eager_step, sgd, train_both
from takeback.compiler.capture.one_hot import CLASSES

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels"),
    pytest.mark.filterwarnings("ignore:takeback made"),
]
NUMBER = 9


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, NUMBER))


def draw(i: int) -> tuple[Tensor, Tensor]:
    """Other least and greatest classes in each step; now and then all of them one."""
    g = torch.Generator().manual_seed(i)
    least = i % 4
    y = torch.randint(least, NUMBER - (i + 1) % 3, (5,), generator=g)
    return torch.randn(5, 6, generator=g), y * 0 + least if i == 6 else y


def soft(logits: Tensor, hot: Tensor) -> Tensor:
    return -(hot * logits.log_softmax(-1)).sum(-1).mean()


def by_name(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return soft(m(x), F.one_hot(input=y, num_classes=NUMBER))


def by_numpys_number(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return soft(m(x), F.one_hot(y, np.int64(NUMBER)))  # type: ignore[arg-type]


def by_aten(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return soft(m(x), torch.ops.aten.one_hot(y, NUMBER))


def of_strided_classes(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return soft(m(x), F.one_hot(torch.stack((y, y.flip(0)), 1).t(), NUMBER)[1])


def of_one_class(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return soft(m(x)[0], F.one_hot(y[0], NUMBER))


def of_what_the_step_rounds(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), F.one_hot((x[:, 0].sigmoid() * NUMBER).floor().long(), NUMBER).float())


def written_afterwards(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    classes = y.clone()
    hot = F.one_hot(classes, NUMBER)
    classes.zero_()
    return soft(m(x), hot.mul_(2))


def in_a_checkpoint(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return soft(m(x), F.one_hot(y, NUMBER))

    out = torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


def of_a_distribution(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    drawn = torch.distributions.OneHotCategorical(logits=m(x).detach()).sample()
    return soft(m(x), drawn)


def straight_through(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    drawn = torch.distributions.OneHotCategoricalStraightThrough(logits=m(x)).rsample()
    return (drawn * torch.arange(NUMBER)).sum(-1).square().mean()


LOSSES = (
    by_name,
    by_numpys_number,
    by_aten,
    of_strided_classes,
    of_one_class,
    of_what_the_step_rounds,
    written_afterwards,
    of_a_distribution,
    straight_through,
)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_one_plan_follows_whatever_the_classes_are(loss_fn: Callable[..., Any], memory: str) -> None:
    step = train_both(Case(net, loss_fn, draw, sgd), steps=9, memory=memory, poison=True)
    assert len(ops_of(step, CLASSES)) == 1


def test_one_hot_that_a_checkpoint_computes_twice_needs_one_plan() -> None:
    train_both(Case(net, in_a_checkpoint, draw, sgd), steps=9)


@pytest.mark.parametrize("loss_fn", [by_name, straight_through], ids=lambda f: f.__name__)
def test_one_plan_of_mode_fast_is_near_eager(loss_fn: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    ours = net()
    eagers = copy.deepcopy(ours)
    optimizer, step = sgd(eagers), tb.compile_step(ours, loss_fn, sgd(ours), mode="fast")
    for i in range(8):
        torch.manual_seed(i)
        loss = eager_step(eagers, loss_fn, optimizer, draw(i))
        torch.manual_seed(i)
        torch.testing.assert_close(step(*draw(i)), loss)
        torch.testing.assert_close(dict(ours.named_parameters()), dict(eagers.named_parameters()))
    assert len(step._plans) == 1


class _Counting(nn.Module):
    """Writes a buffer before the classes are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, NUMBER)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.lin(x)
        return out


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("known", [0, 1, 6], ids=lambda n: f"after {n} steps")
@pytest.mark.parametrize("wrong", [-1, NUMBER, 1 << 40])
def test_classes_out_of_range_raise_eagers_error_and_change_nothing(mode: Any, known: int, wrong: int) -> None:
    torch.manual_seed(0)
    model = _Counting()
    optimizer = sgd(model)
    step = tb.compile_step(model, by_name, optimizer, mode=mode)
    for i in range(known):
        step(*draw(i))
    before = snapshot(model, optimizer)
    x, y = draw(0)
    y[2] = wrong
    with pytest.raises(RuntimeError) as eagers:
        F.one_hot(y, NUMBER)
    with pytest.raises(RuntimeError) as ours:
        step(x, y)
    assert str(ours.value).splitlines()[0] == str(eagers.value)
    assert_same(snapshot(model, optimizer), before, "after the error")
    step(*draw(7))
    assert model.seen.item() == known + 1
    assert len(step._plans) == 1


def test_number_of_classes_that_is_data_is_read_and_held() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hot = F.one_hot(y)
        return soft(m(x)[:, : hot.shape[1]], hot)

    def few(i: int) -> tuple[Tensor, Tensor]:
        return draw(i)[0], torch.arange(5) % (4 if i % 3 else 3)

    step = train_both(Case(net, loss_fn, few, sgd), steps=9, plans=2)
    assert not ops_of(step, CLASSES)


@pytest.mark.parametrize("call", [lambda y: F.one_hot(y.int(), 9), lambda y: F.one_hot(y, num_classes=0)])
def test_what_eager_refuses_is_refused_in_its_words(call: Callable[[Tensor], Tensor]) -> None:
    model, (x, y) = net(), draw(0)
    with pytest.raises(RuntimeError) as eagers:
        call(y)
    with pytest.raises(RuntimeError) as ours:
        tb.compile_step(model, lambda m, x, y: soft(m(x), call(y)), sgd(model))(x, y)
    assert str(ours.value).splitlines()[0] == str(eagers.value)


def test_one_hot_under_vmap_is_torchs() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return soft(m(x), torch.func.vmap(lambda one: F.one_hot(one, NUMBER))(y))

    step = train_both(Case(net, loss_fn, draw, sgd), steps=6)
    assert not ops_of(step, CLASSES)


def test_classes_of_nobody_are_as_in_eager() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return soft(m(x), F.one_hot(y, NUMBER)) + F.one_hot(y[:0], NUMBER).sum()

    train_both(Case(net, loss_fn, draw, sgd), steps=5)


def test_prediction_knows_a_one_hot() -> None:
    torch.manual_seed(0)
    model = net()
    assert tb.predict(model, by_name, sgd(model), *draw(0)).peak_bytes > 0
