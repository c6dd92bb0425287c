"""A loss_fn may ask for the gradient of a batch tensor itself (`x.requires_grad_()`), as residuals and penalties do:
the model has eager's bits, and the batch is as it was before the step. What would tell the difference is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_twins import assert_same, snapshot
from torch import Tensor, nn

import takeback as tb
from harness import Case, eager_step, same, sgd, train_both
from takeback.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


def points(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.rand(6, 1, generator=g), torch.rand(6, 1, generator=g)


def slopes(m: nn.Module, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u = m(torch.cat((x, t), 1))
    by_x, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    return u, by_x, by_t


def burgers(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    x.requires_grad_()
    t.requires_grad = True
    u, by_x, by_t = slopes(m, x, t)
    [twice] = torch.autograd.grad(by_x.sum(), x, create_graph=True)
    return (by_t + u * by_x - 0.01 * twice).square().mean()


def into_the_loss_as_well(m: nn.Module, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    x.requires_grad_()
    t.requires_grad_(True)
    u, by_x, by_t = slopes(m, x, t)
    return ((by_t + by_x).square() + (u - x * t).square()).mean(), x


def if_it_has_none(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    for each in (x, t):
        if not each.requires_grad:
            each.requires_grad_()
    _, by_x, by_t = slopes(m, x, t)
    return (by_x - by_t).square().mean()


LOSSES = (burgers, into_the_loss_as_well, if_it_has_none)
SETTINGS: list[dict[str, Any]] = [{}, {"memory": "min"}, {"verify_every": 1}, {"accumulate": 2}]


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_gradient_of_the_batch_that_the_loss_asks_for_has_eagers_bits(
    loss_fn: Callable[..., Any], settings: dict[str, Any]
) -> None:
    train_both(Case(net, loss_fn, points, sgd, settings=settings), steps=8, poison=True)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_batch_that_comes_again_has_eagers_bits(loss_fn: Callable[..., Any]) -> None:
    """Collocation points that stay. In eager they need a gradient from the second step on."""
    torch.manual_seed(0)
    ours = net()
    eagers = copy.deepcopy(ours)
    step, optimizer = tb.compile_step(ours, loss_fn, sgd(ours)), sgd(eagers)
    batch, twin = points(0), points(0)
    for _ in range(6):
        given = step(*batch)
        loss = eager_step(eagers, loss_fn, optimizer, twin)
        assert same(given[0] if isinstance(given, tuple) else given, loss)
        assert_same(ours.state_dict(), eagers.state_dict())
    assert step.counts.planned == 6
    assert len(step._plans) == 1


def test_batch_is_after_each_step_as_it_was() -> None:
    model = net()
    step = tb.compile_step(model, burgers, sgd(model), verify_every=2)
    for i in range(5):
        batch = points(i)
        step(*batch)
        assert not any(t.requires_grad for t in batch)
        assert all(t.grad is None for t in batch)


def test_nothing_is_computed_for_a_gradient_that_nobody_reads() -> None:
    """As many ops as with a copy, less the copies."""

    def of_copies(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        return burgers(m, x.detach().clone(), t.detach().clone())

    ours, copied = (train_both(Case(net, f, points, sgd), steps=4) for f in (burgers, of_copies))
    ops, others = ([op.name for op in s._last.executor.program.ops] for s in (ours, copied))  # type: ignore[union-attr]
    assert len(ops) <= len([name for name in others if name != "clone"])


def test_calls_that_add_up_gradients_may_ask_for_those_of_the_batch() -> None:
    torch.manual_seed(0)
    ours = net()
    eagers = copy.deepcopy(ours)
    step, optimizer = tb.compile_step(ours, burgers, sgd(ours)), sgd(eagers)
    for i in range(12):
        loss = burgers(eagers, *points(i))
        loss.backward()
        assert same(step(*points(i), update=i % 3 == 2), loss.detach())
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours.state_dict(), eagers.state_dict())


def test_prediction_knows_a_batch_that_gets_a_gradient() -> None:
    model, batch = net(), points(0)
    assert tb.predict(model, burgers, sgd(model), *batch).peak_bytes > 0
    assert not any(t.requires_grad for t in batch)


def adds_what_eager_has_left(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    left = x.grad
    loss = burgers(m, x, t)
    return loss if left is None else loss + left.sum() * m(torch.cat((x, t), 1)).mean()


def runs_a_backward_into_it(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    x.requires_grad_()
    u = m(torch.cat((x, t), 1))
    u.sum().backward(inputs=[x], create_graph=True)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return u.square().mean() + x.grad.square().mean()


def reads_it_before(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """The second time that eager gets x, this factor is differentiated, too."""
    factor = torch.stack((x, t)).square().sum(0)
    x.requires_grad_()
    u = m(torch.cat((x, t), 1)) * factor
    [slope] = torch.autograd.grad(u.sum(), x, create_graph=True)
    return slope.square().mean()


REFUSED = (adds_what_eager_has_left, runs_a_backward_into_it, reads_it_before)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
@pytest.mark.parametrize("loss_fn", REFUSED, ids=lambda f: f.__name__)
def test_step_that_would_tell_the_difference_is_refused_with_the_way_out(loss_fn: Callable[..., Any]) -> None:
    model, batch = net(), points(0)
    optimizer = sgd(model)
    step, before = tb.compile_step(model, loss_fn, optimizer), snapshot(model, optimizer)
    words = r"tensor 0 of the batch gets a gradient in the step.*x = x\.detach\(\)\.clone\(\)\.requires_grad_\(\)"
    with pytest.raises(CaptureError, match=words):
        step(*batch)
    assert_same(snapshot(model, optimizer), before)
    assert not any(t.requires_grad for t in batch)
    assert all(t.grad is None for t in batch)


@pytest.mark.filterwarnings("ignore:this step is not planned")
@pytest.mark.parametrize("loss_fn", [adds_what_eager_has_left, reads_it_before], ids=lambda f: f.__name__)
def test_what_is_refused_runs_plainly_with_eagers_bits_on_a_batch_that_comes_again(loss_fn: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    ours = net()
    eagers = copy.deepcopy(ours)
    step, optimizer = tb.compile_step(ours, loss_fn, sgd(ours), unplanned="eager"), sgd(eagers)
    batch, twin = points(0), points(0)
    for _ in range(4):
        assert same(step(*batch), eager_step(eagers, loss_fn, optimizer, twin))
        assert_same(ours.state_dict(), eagers.state_dict())
    assert step.counts.planned == 0


def test_gradient_that_is_there_already_is_not_added_to() -> None:
    model, (x, t) = net(), points(0)
    x.grad = torch.ones(6, 1)
    with pytest.raises(CaptureError, match=r"its \.grad is in use besides"):
        tb.compile_step(model, burgers, sgd(model))(x, t)
    assert torch.equal(x.grad, torch.ones(6, 1))


def by_the_sign(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """A loss that needs a derivative by the batch, and does not lead to it."""
    plain = m(torch.cat((x, t), 1)).square().mean()
    x.requires_grad_()
    if x.grad is not None:
        x.grad = None
    [slope] = torch.autograd.grad(m(torch.cat((x, t), 1)).square().mean(), x)
    moved = (x + 0.1 * slope.sign()).detach()
    return plain + m(torch.cat((moved, t), 1)).square().mean()


def test_batch_that_gets_no_gradient_may_be_read_before_it_is_asked_for() -> None:
    train_both(Case(net, by_the_sign, points, sgd), steps=6)


def test_detached_look_before_is_no_difference() -> None:
    def loss_fn(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        factor = x.detach().square()
        return burgers(m, x, t) * factor.mean()

    own = points(3)
    train_both(Case(net, loss_fn, lambda i: tuple(s.clone() for s in own), sgd), steps=5)


def test_error_of_the_users_leaves_the_batch_as_it_was() -> None:
    def loss_fn(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        burgers(m, x, t)
        raise RuntimeError("the user's own")

    model, batch = net(), points(0)
    with pytest.raises(RuntimeError, match="the user's own"):
        tb.compile_step(model, loss_fn, sgd(model))(*batch)
    assert not any(t.requires_grad for t in batch)
