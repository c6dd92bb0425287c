"""Tensors that the user puts anew into a place the step reads before each step: eager's bits, few plans, and the user's
own tensors are in their places between steps, with the values they had or those that eager would have written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from harness import adamw, eager_step
from takeback.errors import CaptureError

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search"),
    pytest.mark.filterwarnings("ignore:takeback made:RuntimeWarning"),
]
SHAPE = (16, 8)
STEPS = 9
noise: Tensor = torch.zeros(SHAPE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("shift", torch.zeros(SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x + self.shift)).tanh())


class World:
    """A model, its optimizer, and objects of the user's with tensors in them."""

    def __init__(self, net: Net) -> None:
        self.net, self.optimizer = net, adamw(net)
        self.real, self.also = torch.zeros(SHAPE), torch.zeros(SHAPE)
        self.listed = [torch.zeros(SHAPE)]


Set = Callable[[World, Tensor], None]
Loss = Callable[[World], Callable[..., Any]]


def attribute(world: World, x: Tensor) -> None:
    world.real = x


def entry(world: World, x: Tensor) -> None:
    world.listed[0] = x


def buffer(world: World, x: Tensor) -> None:
    world.net.shift = x


def both(world: World, x: Tensor) -> None:
    world.real, world.also = x, x


def of_real(world: World) -> Callable[..., Any]:
    return lambda net: net(world.real).square().mean()


def of_listed(world: World) -> Callable[..., Any]:
    return lambda net: net(world.listed[0]).square().mean()


def of_both(world: World) -> Callable[..., Any]:
    return lambda net: (net(world.real) * world.also[:, :2]).square().mean()


def writing(world: World) -> Callable[..., Any]:
    def loss(net: Net) -> Tensor:
        world.real.mul_(0.5)
        return net(world.real).square().mean()

    return loss


def returning(world: World) -> Callable[..., Any]:
    return lambda net: (net(world.real).square().mean(), {"real": world.real, "part": world.real[1:3]})


def writing_the_other(world: World) -> Callable[..., Any]:
    def loss(net: Net) -> Tensor:
        world.also.mul_(0.5)
        return net(world.real).square().mean()

    return loss


class Pair:
    """A compiled world and one in eager. Each has tensors of its own."""

    def __init__(self, put: Set, loss: Loss, **options: Any) -> None:
        torch.manual_seed(0)
        net = Net()
        self.ours, self.eager, self._put = World(net), World(copy.deepcopy(net)), put
        self.step = tb.compile_step(net, loss(self.ours), self.ours.optimizer, **options)
        self._loss, self._options = loss(self.eager), options

    def advance(self, number: int, shape: tuple[int, ...] = SHAPE) -> Any:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        mine, theirs = x.clone(), x.clone()
        self._put(self.eager, theirs)
        accumulate = self._options.get("accumulate", 1)
        eager_step(self.eager.net, self._loss, self.eager.optimizer, (), accumulate=accumulate)
        self._put(self.ours, mine)
        returned = self.step()
        assert torch.equal(mine, theirs), "what the step writes is in the user's tensor, and nothing else"
        assert any(mine is place for place in self.places())
        self.check(f"after step {number}")
        return returned

    def places(self) -> tuple[Tensor, ...]:
        return (self.ours.real, self.ours.also, self.ours.listed[0], self.ours.net.shift)

    def check(self, when: str) -> None:
        for (name, a), b in zip(
            (*self.ours.net.named_parameters(), *self.ours.net.named_buffers()),
            (*self.eager.net.parameters(), *self.eager.net.buffers()),
            strict=True,
        ):
            assert torch.equal(a, b), f"{name} {when}"


@pytest.mark.parametrize(
    ("put", "loss"), [(attribute, of_real), (entry, of_listed), (buffer, of_real), (both, of_both)]
)
@pytest.mark.parametrize(
    "options", [{}, {"memory": "min", "verify_every": 2}, {"memory": "keep", "poison": True}], ids=str
)
def test_what_is_put_anew_before_each_step_has_eagers_bits_and_few_plans(
    put: Set, loss: Loss, options: dict[str, Any]
) -> None:
    pair = Pair(put, loss, **options)
    for number in range(STEPS):
        pair.advance(number)
    assert pair.step._plans.made == 3


@pytest.mark.usefixtures("eagers_kernels")
def test_the_same_in_mode_fast() -> None:
    pair = Pair(attribute, of_real, mode="fast")
    for number in range(STEPS):
        pair.advance(number)
    assert pair.step._plans.made == 3


def test_a_global_and_a_variable_of_an_outer_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Net()
    twin, outer = copy.deepcopy(net), torch.zeros(SHAPE)

    def loss(m: Net) -> Tensor:
        return m(noise + outer).square().mean()

    step, theirs = tb.compile_step(net, loss, adamw(net)), adamw(twin)
    for _ in range(STEPS):
        monkeypatch.setitem(globals(), "noise", torch.randn(SHAPE))
        outer = torch.randn(SHAPE)
        then = outer, noise
        step()
        assert (outer, noise) == then or (outer is then[0] and noise is then[1])
        eager_step(twin, loss, theirs, ())
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
    assert step._plans.made == 3


def test_a_tensor_that_the_step_writes_is_the_users_own() -> None:
    pair = Pair(attribute, writing)
    for number in range(STEPS):
        pair.advance(number)


def test_a_tensor_that_the_step_writes_later_on_is_written() -> None:
    def loss(world: World) -> Callable[..., Any]:
        def late(net: Net) -> Tensor:
            if world.listed:
                return net(world.real).square().mean()
            world.real.mul_(0.5)
            return net(world.real).square().mean()

        return late

    def put(world: World, x: Tensor) -> None:
        world.real = x
        put.calls += 1  # type: ignore[attr-defined]
        if put.calls > 12:  # type: ignore[attr-defined]
            world.listed.clear()

    put.calls = 0  # type: ignore[attr-defined]
    pair = Pair(put, loss)
    pair.places = lambda: (pair.ours.real,)  # type: ignore[method-assign]
    for number in range(2 * STEPS):
        pair.advance(number)


def test_a_tensor_that_is_given_back_is_not_overwritten_later() -> None:
    pair = Pair(attribute, returning)
    given = []
    for number in range(STEPS):
        _, aux = pair.advance(number)
        given.append((aux, {name: t.clone() for name, t in aux.items()}))
    for aux, then in given:
        for name, tensor in aux.items():
            assert torch.equal(tensor, then[name])


@pytest.mark.parametrize("since", [0, 5])
def test_a_tensor_whose_bytes_are_written_under_another_name(since: int) -> None:
    """From some step on the two places look at the same bytes."""

    def put(world: World, x: Tensor) -> None:
        put.calls += 1  # type: ignore[attr-defined]
        world.also = x[:] if put.calls > 2 * since else torch.ones(SHAPE)  # type: ignore[attr-defined]
        world.real = x

    put.calls = 0  # type: ignore[attr-defined]
    pair = Pair(put, writing_the_other)
    for number in range(STEPS + since):
        pair.advance(number)


def test_a_tensor_that_shares_bytes_with_what_a_plan_writes() -> None:
    """The plan was made when it did not: it counts in a tensor of the user's, which has another name since."""

    def put(world: World, x: Tensor) -> None:
        put.calls += 1  # type: ignore[attr-defined]
        world.real = world.also[:] if put.calls > 14 else x  # type: ignore[attr-defined]

    def loss(world: World) -> Callable[..., Any]:
        def counting(net: Net) -> Tensor:
            world.also.add_(1)
            return net(world.real).square().mean()

        return counting

    put.calls = 0  # type: ignore[attr-defined]
    pair = Pair(put, loss)
    mine = pair.ours.also
    pair.places = lambda: (pair.ours.real,)  # type: ignore[method-assign]
    for number in range(2 * STEPS):
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
        put(pair.eager, x.clone())
        eager_step(pair.eager.net, loss(pair.eager), pair.eager.optimizer, ())
        put(pair.ours, x.clone())
        pair.step()
        assert torch.equal(mine, pair.eager.also)
        pair.check(f"after step {number}")


def test_a_tensor_that_shares_bytes_with_a_parameter_is_read_as_it_is() -> None:
    def put(world: World, x: Tensor) -> None:
        world.real, world.also = x, world.net.first.weight.detach()[:, :2].repeat(2, 1) * 1
        world.listed[0] = world.net.first.weight.detach()

    def loss(world: World) -> Callable[..., Any]:
        return lambda net: (net(world.real) @ world.listed[0][:2]).square().mean()

    pair = Pair(put, loss)
    for number in range(STEPS):
        pair.advance(number)


def test_a_tensor_that_is_in_the_batch_as_well_stays_where_it_is() -> None:
    torch.manual_seed(0)
    net = Net()
    world, twin = World(net), World(copy.deepcopy(net))

    def loss_of(world: World) -> Callable[..., Any]:
        return lambda m, x: (m(x) + world.real[:, :2]).square().mean() * (2 if world.real is x else 3)

    step = tb.compile_step(net, loss_of(world), world.optimizer)
    for number in range(2 * STEPS):
        x = torch.randn(SHAPE)
        for each in (world, twin):
            each.real = x if number > 4 and number % 4 else x.clone()
        step(x)
        eager_step(twin.net, loss_of(twin), twin.optimizer, (x,))
        for a, b in zip(net.parameters(), twin.net.parameters(), strict=True):
            assert torch.equal(a, b), number


def test_other_shapes_have_their_own() -> None:
    pair = Pair(attribute, lambda world: lambda net: net.last(net.norm(net.first(world.real))).square().mean())
    for number in range(24):
        pair.advance(number, ((16, 8), (16, 8), (12, 8))[number % 3])
    assert pair.step._plans.made <= 6


def test_what_stands_there_between_steps_is_the_users_also_after_an_error() -> None:
    pair = Pair(attribute, of_real)
    for number in range(5):
        pair.advance(number)
    fails = RuntimeError("no")
    pair.ours.net.register_forward_hook(lambda *_: (_ for _ in ()).throw(fails))
    pair.ours.real = x = torch.randn(SHAPE)
    with pytest.raises((RuntimeError, CaptureError)):
        pair.step()
    assert pair.ours.real is x


def test_one_that_is_replaced_now_and_then_is_not_stood_in_for() -> None:
    """A data set may lie there: a copy of it would take its memory again."""
    pair = Pair(attribute, of_real)
    for number in range(4):
        pair.advance(number)
        for _ in range(12):
            pair.step()
            eager_step(pair.eager.net, of_real(pair.eager), pair.eager.optimizer, ())
    assert not list(pair.step._rebound.tensors)
