"""One pass over the buffer: norm, clip_ and isfinite are torch's, more accurately, and poison nothing for later."""

from __future__ import annotations

import math

import pytest
import torch
from grad_twins import assert_same, backward_both, twins
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import takeback

X = torch.linspace(-1, 1, 12).view(3, 4)
KINDS = [math.inf, 1, 1.0, 2.0, 3.0, 0.5, "inf"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def loss(m: nn.Module) -> torch.Tensor:
    return m(X).square().sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e9, 0.0])
def test_clip_is_clip_grad_norm(kind: float, max_norm: float) -> None:
    model, buf, eager = twins(net())
    for _ in range(2):
        backward_both(model, eager, loss)
        total = clip_grad_norm_(eager.parameters(), max_norm, norm_type=kind)
        torch.testing.assert_close(buf.norm(kind), total)
        ours = buf.clip_(max_norm, norm_type=kind)
        torch.testing.assert_close(ours, total)
        assert_same(model, buf, eager)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_of_several_flats_is_of_all(kind: float) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).double())

    model, buf, eager = twins(Cast())
    backward_both(model, eager, loss)
    total = clip_grad_norm_(eager.parameters(), 0.01, norm_type=kind)
    torch.testing.assert_close(buf.clip_(0.01, kind), total, check_dtype=False, rtol=1e-6, atol=0)
    assert_same(model, buf, eager)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [math.inf, 1.0, 2.0, 3.0])
def test_nonfinite_gradients_clip_as_in_torch(bad: float, kind: float) -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    for m in (model, eager):
        m[2].weight.grad[1, 2] = bad
    assert not bool(buf.isfinite())
    before = buf.flat.clone()
    with pytest.raises(RuntimeError, match=f"The total norm of order {kind} for gradients is non-finite"):
        buf.clip_(1.0, kind, error_if_nonfinite=True)
    assert torch.equal(before.nan_to_num(7), buf.flat.nan_to_num(7))
    total = clip_grad_norm_(eager.parameters(), 1.0, norm_type=kind)
    torch.testing.assert_close(buf.clip_(1.0, kind), total, equal_nan=True)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("zero", [True, False])
def test_one_nonfinite_step_does_not_poison_the_next(bad: float, zero: bool) -> None:
    """Clipping by a NaN makes padding, and slices of parameters without a gradient, NaN too."""
    model, buf, eager = twins(net())
    short = nn.Sequential(*model[:3])
    short(X).sum().backward()
    nn.Sequential(*eager[:3])(X).sum().backward()
    for m in (model, eager):
        m[0].weight.grad[0, 0] = bad
    buf.clip_(1.0)
    clip_grad_norm_(eager.parameters(), 1.0)
    assert model[4].weight.grad is None
    for m in (model, eager):
        m.zero_grad(set_to_none=not zero)
    for run in (lambda m: m[:3](X).square().sum(), loss):
        backward_both(model, eager, run)
        assert bool(buf.isfinite())
        torch.testing.assert_close(
            buf.norm(), get_total_norm([p.grad for p in eager.parameters() if p.grad is not None])
        )
        assert_same(model, buf, eager)


def test_error_if_nonfinite_is_silent_for_finite_gradients() -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    buf.clip_(0.5, error_if_nonfinite=True)
    clip_grad_norm_(eager.parameters(), 0.5, error_if_nonfinite=True)
    assert_same(model, buf, eager)


def test_without_gradients_the_norm_is_zero_and_finite() -> None:
    buf = takeback.GradBuffer(net())
    assert float(buf.norm()) == 0.0
    assert float(buf.clip_(1.0)) == 0.0
    assert bool(buf.isfinite())


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, math.inf])
def test_norm_of_ten_million_elements_is_accurate(kind: float) -> None:
    torch.manual_seed(0)
    p, q = nn.Parameter(torch.empty(10_000_000)), nn.Parameter(torch.empty(77))
    buf = takeback.GradBuffer([p, q])
    p.grad, q.grad = torch.rand(10_000_000) + 0.5, torch.randn(77)
    exact = torch.linalg.vector_norm(torch.cat([p.grad, q.grad]).double(), kind)
    assert abs(float(buf.norm(kind)) / float(exact) - 1) < 1e-6


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_norm_of_tiny_and_huge_gradients_is_torchs(scale: float) -> None:
    p = nn.Parameter(torch.empty(1000))
    buf = takeback.GradBuffer([p])
    p.grad = torch.full((1000,), scale)
    torch.testing.assert_close(buf.norm(), get_total_norm([p.grad]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [-1.0, -math.inf, 0.0])
def test_norm_types_that_padding_would_spoil_are_right_or_refused(kind: float) -> None:
    p = nn.Parameter(torch.empty(5))
    buf = takeback.GradBuffer([p])
    p.grad = torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0])
    try:
        got = buf.norm(kind)
    except ValueError as error:
        assert "norm_type" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(got, torch.linalg.vector_norm(p.grad, kind))


def test_bf16_gradients_clip_as_in_torch() -> None:
    model, buf, eager = twins(net().to(torch.bfloat16))
    backward_both(model, eager, lambda m: m(X.to(torch.bfloat16)).square().sum())
    total = clip_grad_norm_(eager.parameters(), 0.1)
    torch.testing.assert_close(buf.clip_(0.1), total, rtol=2e-2, atol=1e-3)
    assert_same(model, buf, eager, rtol=2e-2, atol=1e-3)


def test_torchs_own_clipping_works_on_the_slices() -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    for m in (model, eager):
        clip_grad_norm_(m.parameters(), 0.1, foreach=True)
    assert_same(model, buf, eager)
    assert float(buf.norm()) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_training_with_clipping_follows_eager(make: type[torch.optim.Optimizer], fused: bool) -> None:
    model, buf, eager = twins(net())
    ours, theirs = make(model.parameters(), lr=1e-2, fused=fused), make(eager.parameters(), lr=1e-2, fused=fused)
    for step in range(6):
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(2):
            backward_both(model, eager, loss)
        buf.clip_(0.5)
        clip_grad_norm_(eager.parameters(), 0.5)
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert buf.copies == 0


def test_a_small_factor_does_not_vanish_in_half_precision() -> None:
    """The factor of a mixed buffer is below what float16 can hold."""
    mine = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float16))]
    buf = takeback.GradBuffer(mine)
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    for params in (mine, theirs):
        params[0].grad = torch.full((2,), 6e7)
        params[1].grad = torch.full((2,), 5e3, dtype=torch.float16)
    buf.clip_(1.0)
    clip_grad_norm_(theirs, 1.0)
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        assert p.grad is not None
        assert p.grad.any()
