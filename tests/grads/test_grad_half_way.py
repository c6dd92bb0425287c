"""A backward that raises half-way leaves what eager leaves: no part of a gradient that never became whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from grad_twins import assert_same, backward_both, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from takeback.errors import GradBufferError


class Raises(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> Any:
        raise ArithmeticError("half-way")


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "linear, no bias": (lambda: nn.Linear(4, 4, bias=False), (3, 4)),
    "conv 1×1": (lambda: nn.Conv2d(4, 4, 1), (2, 4, 3, 3)),
    "conv 3×3": (lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 4, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (3, 4)),
}


def half_way(m: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(ArithmeticError, match="half-way"):
        m(Raises.apply(m(x))).square().sum().backward()


def grads(m: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in m.parameters()]


@pytest.mark.parametrize("name", LAYERS)
def test_a_tied_weight_has_no_gradient_after_a_backward_that_raises_half_way(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, buf, eager = twins(make())
    x = torch.randn(shape)
    for m in (model, eager):
        half_way(m, x)
        assert grads(m) == [None] * len(grads(m))
    assert not buf.gather_().flat.any()
    backward_both(model, eager, lambda m: m(x).square().sum())
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)
    assert buf.copies == 0 or "3×3" in name


def test_an_embedding_tied_to_the_head_has_no_gradient_after_a_backward_that_raises_half_way() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor, between: Callable[..., Any] = lambda h: h) -> torch.Tensor:
            return self.head(between(self.table(x))).square().sum()

    model, buf, eager = twins(Tied())
    x = torch.tensor([1, 2, 2, 6])
    for m in (model, eager):
        with pytest.raises(ArithmeticError):
            m(x, Raises.apply).backward()
        assert m.table.weight.grad is None
    for _ in range(2):
        backward_both(model, eager, lambda m: m(x))
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)
    assert buf.copies == 0


def test_layers_that_were_complete_when_a_backward_raised_keep_their_gradients_as_in_eager() -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)))
    x = torch.randn(3, 4)
    for m in (model, eager):
        with pytest.raises(ArithmeticError):
            m[2](m[1](Raises.apply(m[0](x)))).square().sum().backward()
    assert model[0].weight.grad is None
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zero", ["none", "zeros", "buffer"])
def test_a_part_added_to_a_gradient_is_refused_until_it_is_zeroed(zero: str) -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    backward_both(model, eager, lambda m: m(x).square().sum())
    half_way(model, x)
    for use in (buf.norm, lambda: model(x).sum().backward(), buf.gather_):
        with pytest.raises(GradBufferError, match=r"raised half-way.*weight.*zero_grad"):
            use()
    if zero == "buffer":
        buf.zero_()
    else:
        model.zero_grad(set_to_none=zero == "none")
    eager.zero_grad()
    for _ in range(2):
        backward_both(model, eager, lambda m: m(x).square().sum())
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)


def test_a_part_that_the_framework_adds_onto_is_refused_too() -> None:
    model, buf, _ = twins(nn.Linear(4, 4, bias=False))
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    half_way(model, x)
    with pytest.raises(GradBufferError, match="raised half-way"):
        nn.functional.linear(x, model.weight).sum().backward()
    model.zero_grad(set_to_none=False)
    nn.functional.linear(x, model.weight).sum().backward()
    torch.testing.assert_close(buf.gather_().slots[0].view, x.sum(0).expand(4, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_uses_of_a_tied_weight_are_eagers_after_a_backward_that_raises(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    for m in (model, eager):
        h = checkpoint(m, checkpoint(m, x, use_reentrant=reentrant), use_reentrant=reentrant)
        with pytest.raises(ArithmeticError):
            checkpoint(m, Raises.apply(h), use_reentrant=reentrant).square().sum().backward()
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)
    for _ in range(2):
        backward_both(model, eager, lambda m: checkpoint(m, m(x), use_reentrant=reentrant).square().sum())
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)
