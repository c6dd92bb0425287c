"""Gradients of products as eager computes them, in a recorded step: autograd functions in the place of torch's own,
whose C++ takes another way while it is recorded (see eager_forms.py).

The way that eager takes depends on whether there are zeros, which is read into Python, as eager reads it into C++. So
it is with running products in torch 2.11, and with complex ones, whose way where there are zeros is refused. A product
that no call of Python's leads to is left to torch, and looked_on.py refuses its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from takeback.compiler.capture.modes import WithoutDispatchModes, be_on_function_stack_
from takeback.engine import transformed
from takeback.errors import CaptureError

aten = torch.ops.aten


class EagerProducts(TorchFunctionMode):
    """Use around a recorded step, outside of the recorder: gradients of products are computed as eager does, and a
    cross-entropy is known for one."""

    def __init__(self) -> None:
        super().__init__()
        running_products_differ()  # here no backward runs

    def __exit__(self, *error: Any) -> None:
        be_on_function_stack_(self)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and torch.is_grad_enabled() and not transformed():
            call = _of(args, kwargs)
            if call is not None:
                return _WholeProduct.apply(*call)
        elif func in _RUNNING and torch.is_grad_enabled() and not transformed():
            running = _of_running(args, kwargs)
            if running is not None:
                return _RunningProduct.apply(*running)
        elif func in _LOSSES:
            return cross_entropy(func, args, kwargs)
        return func(*args, **kwargs)


def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's, called straight: while this function stands on the stack, as torch's own one does, it is known whose ops
    they are."""
    return func(*args, **kwargs)


_PRODUCTS = (torch.prod, torch.Tensor.prod, aten.prod, aten.prod.default, aten.prod.dim_int)
_RUNNING = (torch.cumprod, torch.Tensor.cumprod, aten.cumprod, aten.cumprod.default)
_LOSSES = (torch._C._nn.cross_entropy_loss, aten.cross_entropy_loss, aten.cross_entropy_loss.default)
_ALSO_CALLED = {"x": "input", "self": "input", "axis": "dim", "keepdims": "keepdim"}


def _named(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """The arguments by the names that torch's documentation has; None if there are others, which are for torch."""
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        name = _ALSO_CALLED.get(key, key)
        if name in given or name not in (*names, "dtype"):
            return None
        given[name] = value
    return given if len(args) <= len(names) and _is_trained(given.get("input")) else None


def _is_trained(input: object) -> bool:
    return type(input) in (torch.Tensor, torch.nn.Parameter) and input.requires_grad and bool(input.dim())  # type: ignore[attr-defined]


def _dimension(given: object) -> int | None:
    return int(given) if isinstance(given, int | np.integer) and not isinstance(given, bool) else None


def _of(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, int | None, bool, torch.dtype | None] | None:
    """The operands of a product that has a gradient of its own; None for one that eager computes alike, or that is for
    torch to refuse."""
    given = _named(args, kwargs, ("input", "dim", "keepdim"))
    if given is None or not given["input"].numel():
        return None
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    if dim is not None:
        dim = _dimension(dim)
        if dim is None:
            return None
    return (given["input"], dim, keepdim, given.get("dtype")) if type(keepdim) is bool else None


class _WholeProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        result = input.prod(dtype=dtype) if dim is None else input.prod(dim, keepdim, dtype=dtype)
        ctx.set_materialize_grads(False)  # what has no gradient gets none, as in eager
        ctx.save_for_backward(input, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        input, result = ctx.saved_tensors
        input = input.to(grad.dtype)
        zeros = input == 0
        if ctx.dim is None:
            if not zeros.any():
                return grad * (result / input).conj(), None, None, None
            if not torch.is_grad_enabled() and zeros.sum() > 1:
                return torch.zeros_like(input, memory_format=torch.contiguous_format), None, None, None
            return _of_the_others(grad, input.contiguous().view(-1), 0).view_as(input), None, None, None
        if not ctx.keepdim:
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        if not zeros.any():
            return grad * (result / input).conj(), None, None, None
        return _of_the_others(grad, input, ctx.dim), None, None, None


def _of_the_others(grad: torch.Tensor, input: torch.Tensor, dim: int) -> torch.Tensor:
    """By the product of all others in a row: of those before, and of those behind."""
    size = input.shape[dim]
    if size == 1:
        return grad
    shape = list(input.shape)
    shape[dim] = 1
    one = torch.ones(shape, dtype=grad.dtype, device=grad.device)
    before = torch.cat([one, input.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    behind = torch.cat([one, input.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * behind).conj()


@functools.cache
def running_products_differ() -> bool:
    """Whether this torch takes another way to the gradient of cumprod while a mode looks on: 2.11 does, in which the
    longer way multiplies row after row; 2.13 scatters, whoever looks. Asked first where no backward runs."""
    seen: set[Any] = set()

    class Onlooking(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    with WithoutDispatchModes(), torch.enable_grad(), DisableTorchFunction():
        x = torch.ones(3, device="cpu", requires_grad=True)
        with Onlooking():
            torch.autograd.grad(x.cumprod(0).sum(), x)
    return aten.scatter_.value not in seen


def _of_running(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, int, torch.dtype | None] | None:
    """As `_of`, of a running product."""
    given = _named(args, kwargs, ("input", "dim"))
    if given is None:
        return None
    input, dim, dtype = given["input"], _dimension(given.get("dim")), given.get("dtype")
    if dim is None or not (running_products_differ() or input.is_complex() or (dtype is not None and dtype.is_complex)):
        return None
    trivial = input.numel() < 2 or not -input.dim() <= dim < input.dim() or input.shape[dim] == 1
    return None if trivial else (input, dim, dtype)


class _RunningProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        result = input.cumprod(dim, dtype=dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        input, result = ctx.saved_tensors
        share = result.conj() * grad.to(input.dtype)
        if (input == 0).any():
            kind = "of complex numbers" if input.is_complex() else f"in torch {torch.__version__}"
            raise CaptureError(
                f"torch computes the gradient of cumprod ({kind}) another way while it is recorded where there are "
                f"zeros, and would not have eager's bits. Nothing has been changed. Keep zeros out of it, or use "
                f"mode='fast' or unplanned='eager'{'' if input.is_complex() else ', or torch 2.13 or later'}."
            )
        return share.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim).div(input.conj()), None, None
