"""Ops whose bits depend on whether they write onto an operand: products and quotients of complex numbers, and a product
with a number in half precision. A step has eager's bits where eager makes a new tensor, and where it writes in place.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness import Case, sgd, train_both
from takeback import CompiledStep
from takeback.compiler.ownership.facts import Refused

aten = torch.ops.aten
Compute = Callable[[Tensor, Tensor], Tensor]


def quotient(a: Tensor, b: Tensor) -> Tensor:
    return (a + 1) / (b + 1)


def quotient_in_place(a: Tensor, b: Tensor) -> Tensor:
    return (a + 1).div_(b)


def quotient_onto_a_copy(a: Tensor, b: Tensor) -> Tensor:
    return a.clone().div_(b + 1)


def reciprocal(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).reciprocal()


def scaled_quotient(a: Tensor, b: Tensor) -> Tensor:
    return torch.addcdiv(a + 1, b, a + 2, value=0.3)


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a + 1) * (b + 1)


def product_with_a_transposed_one(a: Tensor, b: Tensor) -> Tensor:
    return (a + 1) * (b + 1).t()


def product_with_a_transposed_one_in_place(a: Tensor, b: Tensor) -> Tensor:
    return (a + 1).mul_(b.t())


def tanh(a: Tensor, b: Tensor) -> Tensor:
    return (0.1 * a + b.t()).tanh() * b.sigmoid()


def sum_in_place(a: Tensor, b: Tensor) -> Tensor:
    return (a + 1).add_(b, alpha=0.3).sub_(a)


COMPLEX = (
    quotient,
    quotient_in_place,
    quotient_onto_a_copy,
    reciprocal,
    scaled_quotient,
    product,
    product_with_a_transposed_one,
    product_with_a_transposed_one_in_place,
    tanh,
    sum_in_place,
)


def train(compute: Compute, dtype: torch.dtype, size: int, memory: str) -> CompiledStep:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        a = (torch.complex(h, h + 1) if dtype.is_complex else h).to(dtype)
        b = (torch.complex(h.square(), h + 2) if dtype.is_complex else h.square() + 1).to(dtype)
        return compute(a, b).abs().float().sum()

    def draw(i: int) -> tuple[Tensor]:
        return (torch.randn(size, 3, generator=torch.Generator().manual_seed(i)),)

    case = Case(lambda: nn.Linear(3, size), loss_fn, draw, sgd, settings={"mode": "exact"})
    return train_both(case, steps=6, memory=memory, poison=True)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("size", [2, 5, 6])  # squares that leave over 4, 1 and 4 after vectors of 8
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("compute", COMPLEX, ids=lambda f: f.__name__)
def test_complex_numbers_have_eagers_bits(compute: Compute, dtype: torch.dtype, size: int, memory: str) -> None:
    train(compute, dtype, size, memory)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = aten.mul.Scalar(a + b, 0.7)
    return out


def scaled_in_place(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = aten.mul_.Scalar(a + b, 0.7)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", [scaled, scaled_in_place], ids=lambda f: f.__name__)
def test_product_with_a_number_has_eagers_bits(compute: Compute, dtype: torch.dtype) -> None:
    train(compute, dtype, 6, "auto")


def refusals(step: CompiledStep) -> set[tuple[str, str]]:
    return {(r.op, str(r.reason)) for r in step.report().refusals}


def test_report_says_why_nothing_was_overwritten() -> None:
    assert ("div.Tensor", str(Refused.COMPLEX)) in refusals(train(quotient, torch.complex64, 6, "auto"))
    assert ("mul.Scalar", str(Refused.ROUNDED)) in refusals(train(scaled, torch.bfloat16, 6, "auto"))
    assert ("mul.Scalar", str(Refused.ROUNDED)) not in refusals(train(scaled, torch.float32, 6, "auto"))
