"""What torch computes another way while a dispatch mode looks on: its C++ asks whether one is there, and spares it what
depends on data. A recorded step is to be eager's, so here is the form that eager has.

Of a product's gradient (`EagerProducts`), the way that eager takes depends on whether there are zeros, which is read
into Python, as eager reads it into C++; so it is with running products in torch 2.11, whose way where there are zeros
is refused. Of two sums over what a mask picks (`PickedSums`), each is one op, whose kernel makes eager's calls; with
the values' number inside of it, no plan has to hold that. tests/capture/test_looked_on.py tries every operator of
torch's samples with a mode that only looks on, and would find another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from takeback.compiler.capture.modes import be_on_function_stack_
from takeback.engine import transformed
from takeback.errors import CaptureError

aten = torch.ops.aten

_library = torch.library.Library("takeback", "FRAGMENT")
_library.define("sum_of_masked(Tensor self, Tensor mask) -> Tensor")
_library.define("sum_of_gathered(Tensor self, Tensor index, Tensor left_out) -> Tensor")
SUM_OF_MASKED = torch.ops.takeback.sum_of_masked.default
SUM_OF_GATHERED = torch.ops.takeback.sum_of_gathered.default
PICKED_SUMS = (SUM_OF_MASKED, SUM_OF_GATHERED)


def _sum_of_masked(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = aten.sum.default(aten.masked_select.default(self, mask))
    return out


def _sum_of_gathered(self: torch.Tensor, index: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    picked = aten.masked_select.default(index, aten.bitwise_not.default(left_out))
    out: torch.Tensor = aten.sum.default(aten.gather.default(self, 0, picked))
    return out


def _shape_of_sum(self: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return self.new_empty(())


for _name, _kernel in (("sum_of_masked", _sum_of_masked), ("sum_of_gathered", _sum_of_gathered)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"takeback::{_name}", _shape_of_sum, lib=_library)


# -- products ----------------------------------------------------------------------------------------------------------


class EagerProducts(TorchFunctionMode):
    """Use around a recorded step, outside of the recorder: gradients of `torch.prod` are computed as eager does."""

    def __exit__(self, *error: Any) -> None:
        be_on_function_stack_(self)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and torch.is_grad_enabled() and not transformed():
            call = _of(*args, **kwargs)
            if call is not None:
                return _WholeProduct.apply(*call)
        elif func in _RUNNING and running_products_differ() and torch.is_grad_enabled() and not transformed():
            running = _of_running(*args, **kwargs)
            if running is not None:
                return _RunningProduct.apply(*running)
        return func(*args, **kwargs)


_PRODUCTS = (torch.prod, torch.Tensor.prod)
_RUNNING = (torch.cumprod, torch.Tensor.cumprod)


def _of(
    input: torch.Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **other: Any,
) -> tuple[torch.Tensor, int | None, bool, torch.dtype | None] | None:
    """The operands of a product that has a gradient of its own; None for one that eager computes alike, or that is for
    torch to refuse."""
    plain = type(input) is torch.Tensor or type(input) is torch.nn.Parameter
    if other or not plain or not input.requires_grad or not input.dim() or not input.numel():
        return None
    return (input, dim, keepdim, dtype) if dim is None or type(dim) is int else None


class _WholeProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        result = input.prod(dtype=dtype) if dim is None else input.prod(dim, keepdim, dtype=dtype)
        ctx.save_for_backward(input, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
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

    with _disable_current_modes(), torch.enable_grad(), DisableTorchFunction():
        x = torch.ones(3, device="cpu", requires_grad=True)
        with Onlooking():
            torch.autograd.grad(x.cumprod(0).sum(), x)
    return aten.scatter_.value not in seen


def refuse_running_product(func: Any) -> None:
    """Before each op of a recording that is to have eager's bits, where they differ: `cumprod` in no call of Python's,
    as `linalg.vander` has it, and `cumprod_`."""
    if func is not aten.eq.Scalar:
        return
    node = torch._C._current_autograd_node()  # checked on 2.11 and 2.13
    if node is not None and node.name() == "CumprodBackward0":
        raise CaptureError(_REFUSED_RUNNING.format(torch.__version__, "inside of another function, or in place"))


_REFUSED_RUNNING = (
    "torch {} computes the gradient of cumprod another way while it is recorded, {}, and would not have eager's bits. "
    "Nothing has been changed. Use torch 2.13 or later, mode='fast', or unplanned='eager'."
)


def _of_running(
    input: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None, **other: Any
) -> tuple[torch.Tensor, int, torch.dtype | None] | None:
    """As `_of`, of a running product."""
    plain = type(input) is torch.Tensor or type(input) is torch.nn.Parameter
    if other or not plain or type(dim) is not int or not input.requires_grad or not input.dim():
        return None
    trivial = input.numel() < 2 or not -input.dim() <= dim < input.dim() or input.shape[dim] == 1
    return None if trivial else (input, dim, dtype)


class _RunningProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        result = input.cumprod(dim, dtype=dtype)
        ctx.save_for_backward(input, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        input, result = ctx.saved_tensors
        share = result.conj() * grad.to(input.dtype)
        if (input == 0).any():
            raise CaptureError(_REFUSED_RUNNING.format(torch.__version__, "where there are zeros"))
        return share.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim).div(input.conj()), None, None


# -- sums of what a mask picks -----------------------------------------------------------------------------------------

_FLATTENS = (aten.view.default, aten._unsafe_view.default, aten.clone.default)
_NODE = "MaskedFillBackward1"  #: masked_fill with a tensor for a value; checked on 2.11 and 2.13


@dataclass(frozen=True)
class _Zeroed:
    """A value in which zeros stand for what a mask leaves out, on its way to a sum."""

    storage: int
    operands: tuple[torch.Tensor, ...]
    made_at: tuple[int, ...]  #: by these ops
    target: Any = None  #: the op that gives the sum of what is picked; None if the values are still to be gathered


@dataclass
class PickedSums:
    """Told of the ops that are recorded, it says which of them eager has otherwise."""

    by_autograd: Callable[[], bool]  #: whether autograd itself runs the op, and no code of anybody's
    by_cross_entropy: Callable[[], bool]  #: whether torch's cross-entropy runs it
    spent: list[int] = field(default_factory=list)  #: where ops stand of which eager knows nothing
    _zeroed: _Zeroed | None = None
    _number: tuple[int, int] = (0, 0)  #: the storage of the last number that became a tensor, and where it was made

    def instead(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The op that is to run, and its operands."""
        zeroed = self._zeroed
        if zeroed is None or zeroed.target is None or func is not aten.sum.default or not _is(args[0], zeroed):
            return func, args
        self._zeroed = None
        self.spent += zeroed.made_at
        return zeroed.target, zeroed.operands

    def ran_(self, func: Any, args: tuple[Any, ...], out: Any, position: int) -> None:
        """An op has run, and been recorded at this position."""
        zeroed, self._zeroed = self._zeroed, None  # it waits for the very next ops alone
        if func is aten.where.self:
            if self._is_gradient_of_a_fill(args):
                zero = self._number[1:] if self._number[0] == _storage(args[2]) else ()
                self._zeroed = _Zeroed(_storage(out), (args[1], args[0]), (*zero, position), SUM_OF_MASKED)
        elif func is aten.scalar_tensor.default:
            self._number = (_storage(out), position)
        elif func is aten.masked_fill.Scalar:
            if args[2] == 0 and not args[0].is_floating_point() and self.by_cross_entropy():
                self._zeroed = _Zeroed(_storage(out), (args[0], args[1]), (position,))
        elif zeroed is None:
            pass
        elif func in _FLATTENS:
            self._zeroed = zeroed
            if func is aten.clone.default:  # of the value, of its mask or of the targets
                storage = _storage(out) if _is(args[0], zeroed) else zeroed.storage
                self._zeroed = _Zeroed(storage, zeroed.operands, (*zeroed.made_at, position), zeroed.target)
        elif func is aten.gather.default and zeroed.target is None and _is(args[2], zeroed):
            made_at = (*zeroed.made_at, position)
            self._zeroed = _Zeroed(_storage(out), (args[0], *zeroed.operands), made_at, SUM_OF_GATHERED)
        elif func is aten.masked_fill_.Scalar and zeroed.target is not None and _is(args[0], zeroed):
            self._zeroed = _Zeroed(zeroed.storage, zeroed.operands, (*zeroed.made_at, position), zeroed.target)

    def _is_gradient_of_a_fill(self, args: tuple[Any, ...]) -> bool:
        node = torch._C._current_autograd_node()  # checked on 2.11 and 2.13
        return node is not None and node.name() == _NODE and args[2].numel() == 1 and self.by_autograd()


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _is(tensor: torch.Tensor, zeroed: _Zeroed) -> bool:
    return _storage(tensor) == zeroed.storage
