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


class Shifts(nn.Module):
    """Keeps what it saw in the last two steps."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        for i, name in enumerate(order):
            self.register_buffer(name, torch.full((8,), float(i)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) + self.a + 2 * self.b
        self.b = self.a
        self.a = y.detach().mean(0)
        return y


class Swaps(Shifts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a
        self.a, self.b = self.b, self.a
        return y


class WritesAndSwaps(Shifts):
    """The one that is written is another one in each step."""

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(1)
        y = self.lin(x) * self.a
        self.a, self.b = self.b, self.a
        return y


class Turns(Shifts):
    """Three in a ring, of which one is a view of its old self."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__((*order, "c"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a + self.c
        self.a, self.b, self.c = self.b, self.c.detach(), self.a
        return y


class Parts(Shifts):
    """Two parts of one tensor, which have no bytes in common."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * (self.a + self.b)
        self.a, self.b = torch.stack([y.detach().mean(0), y.detach().amax(0)]).unbind()
        return y


_MOVES = [Shifts, Swaps, WritesAndSwaps, Turns, Parts]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids="".join)
@pytest.mark.parametrize("kind", _MOVES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("settings", [{"verify_every": 2}, {"accumulate": 2}], ids=repr)
def test_buffers_that_change_places_have_eagers_bits(
    kind: type[Shifts], order: tuple[str, ...], settings: dict[str, Any]
) -> None:
    train_both(Case(lambda: kind(order), loss_of, batch, sgd, settings=settings), steps=7)


@pytest.mark.usefixtures("eagers_kernels")
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids="".join)
@pytest.mark.parametrize("kind", _MOVES, ids=lambda kind: kind.__name__)
def test_buffers_that_change_places_are_near_eagers_in_mode_fast(kind: type[Shifts], order: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    ours = kind(order)
    eagers = copy.deepcopy(ours)
    optimizer = sgd(eagers)
    step = tb.compile_step(ours, loss_of, sgd(ours), mode="fast", verify_every=2)
    for i in range(6):
        eager_step(eagers, loss_of, optimizer, batch(i))
        step(*batch(i))
        torch.testing.assert_close(ours.state_dict(), eagers.state_dict(), rtol=1e-4, atol=1e-6)
    assert step._replays == 5


def test_buffers_that_change_places_between_steps_have_eagers_bits() -> None:
    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if i in (4, 6):
            model.a, model.b = model.b, model.a

    train_both(Case(lambda: Shifts(("a", "b")), loss_of, batch, sgd, between=between), steps=8)


class TakesAnother(Shifts):
    """The same from the second step on."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a
        self.a = self.b
        return y


class TakesAnotherThatIsWritten(Shifts):
    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(1)
        y = self.lin(x) * self.b
        self.b = self.a
        return y


class TakesAParameter(Shifts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a
        self.a = self.lin.weight.detach()[0]
        return y


class TakesTheBatch(Shifts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a
        self.a = x[0]
        return y


class TakesOneForTwo(Shifts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a + self.b
        self.a = self.b = y.detach().mean(0)
        return y


class TakesOtherStrides(Shifts):
    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__(order)
        self.a = torch.ones(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a
        self.a = y.detach().t().contiguous().t()
        return y


class KeepsTheOldOne(Shifts):
    """Under a name that is no buffer's."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__(order)
        self.last = [torch.zeros(8)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) + self.a + self.last[0]
        self.last[0] = self.a
        self.a = y.detach().mean(0)
        return y


class WritesWhatIsShared(Shifts):
    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__(order)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(1)
        y = self.lin(x) * self.a + self.b
        self.a = y.detach().mean(0)
        return y


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            TakesAnother,
            r"buffer 'a' of TakesAnother.*self\.a = self\.b, is replaced by a tensor whose bytes.*\.clone\(\)",
        ),
        (TakesAnotherThatIsWritten, r"buffer 'b' .*self\.b = self\.a, .*bytes are another's.*copy_.*\.clone\(\)"),
        (TakesAParameter, "bytes are another's"),
        (TakesTheBatch, "bytes are another's"),
        (TakesOneForTwo, "bytes are another's"),
        (TakesOtherStrides, r"other strides \(\(1, 6\) in place of \(8, 1\)\)"),
        (KeepsTheOldOne, r"its tensor is kept elsewhere in the step's reach.*\.clone\(\)"),
        (WritesWhatIsShared, r"written in place and replaced in one step.*\.clone\(\)"),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_replacement_that_no_holder_can_stand_for_is_refused_and_taken_back(kind: type[Shifts], message: str) -> None:
    torch.manual_seed(0)
    model = kind(("a", "b"))
    optimizer = sgd(model)
    before, tensors = snapshot(model, optimizer), (model.a, model.b)
    step = tb.compile_step(model, loss_of, optimizer)
    for _ in range(2):
        with pytest.raises(CaptureError, match=message):
            step(*batch(0))
        assert_same(snapshot(model, optimizer), before)
        assert model.a is tensors[0]
        assert model.b is tensors[1]


class TakesACopyOfAnother(Shifts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a
        self.a = self.b.clone()
        return y


class BeginsOtherwise(Shifts):
    """Another form from the first step on, which the second run of a recording finds."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__(order)
        self.a = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.a
        if self.a.dim() == 0:
            self.a = torch.ones(8)
        return y


class BeginsWithAnotherNumber(Shifts):
    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__(order)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) * self.scale
        self.scale = 1.0
        return y


class SetsItselfUp(Shifts):
    """By its first batch, and in place."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__(order)
        self.is_set_up = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if not self.is_set_up:
            self.a.copy_(y.detach().mean(0))
            self.b = y.detach().std(0)
            self.is_set_up = True
        return (y - self.a) / self.b


@pytest.mark.parametrize(
    "kind",
    [TakesACopyOfAnother, BeginsOtherwise, BeginsWithAnotherNumber, SetsItselfUp],
    ids=lambda kind: kind.__name__,
)
def test_first_step_computes_what_eagers_first_step_does(kind: type[Shifts]) -> None:
    """Where a recording runs the step twice, the second run begins with what the first has kept."""
    train_both(Case(lambda: kind(("a", "b")), loss_of, batch, sgd), steps=6)
