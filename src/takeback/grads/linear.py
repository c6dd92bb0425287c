"""Functions whose backward computes weight gradients straight into their slices: matrix products and embedding rows.

The forward is the very call the module makes, so the output has the same bits. In the backward a product lands in the
slice with `mm(out=)`, or is added inside the GEMM (`addmm_`, beta = 1) where the slice holds a gradient already. Then
None is returned for the parameter: returning the slice would add it to itself. Where a slot declines, the plain
gradient is returned and the framework takes it from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from takeback.engine import is_view
from takeback.grads.slots import Slot, slot_of


def into(
    slot: Slot | None, straight: Callable[[Slot, bool], None], plain: Callable[[], torch.Tensor]
) -> torch.Tensor | None:
    """A parameter's gradient: written into its slice, then None is to be returned; else the plain gradient."""
    if slot is not None:
        with slot.writing() as added:
            if added is not None:
                straight(slot, added)
                slot.wrote(added)
                return None
    return plain()


def product_(slot: Slot, added: bool, left: torch.Tensor, right: torch.Tensor) -> None:
    """left @ right into, or onto, a slice of two dimensions."""
    out = slot.view if slot.view.dim() == 2 else slot.view.flatten(1)
    if out.dtype == left.dtype:
        if added:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)
    elif left.is_cuda and out.dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        # cuBLAS multiplies in 16 bits and writes 32: nothing is rounded in between.
        if added:
            torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
        else:
            torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        land_(slot, added, torch.mm(left, right))


def land_(slot: Slot, added: bool, result: torch.Tensor) -> None:
    """A result of another dtype, rounded into its slice."""
    (slot.view.add_ if added else slot.view.copy_)(result.view(slot.view.shape))
    slot.converted(f"computed in {_short(result.dtype)}, kept in {_short(slot.view.dtype)}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sum_(slot: Slot, added: bool, dy: torch.Tensor, dims: tuple[int, ...]) -> None:
    """The sum of dy over `dims` into, or onto, a bias's slice."""
    out = slot.view
    if not added:
        torch.sum(dy, dims, dtype=out.dtype, out=out)
    elif dy.dim() == 2 and out.dtype == dy.dtype:
        out.addmv_(dy.t(), dy.new_ones(dy.shape[0]))
    else:
        out.add_(dy.sum(dims, dtype=out.dtype))


def autocast_to(tensor: torch.Tensor) -> torch.dtype | None:
    """What autocast would cast the operands of a product on this device to."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_like_autocast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """As autocast does it: float64 and whole numbers are left alone."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


class Linear(torch.autograd.Function):
    """F.linear; with `columns`, the weight is (in, out) as in transformers' Conv1D."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype | None,
        columns: bool,
    ) -> torch.Tensor:
        w = cast_like_autocast(weight, dtype)
        b = cast_like_autocast(bias, dtype) if bias is not None else None
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.parameters, ctx.columns = (weight, bias), columns
        narrow = w if needs_x and w is not weight else None
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, narrow)
        if not columns:
            y = F.linear(x, w, b)
        else:
            assert b is not None
            y = torch.addmm(b, x.view(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[1])
        # A view could not be overwritten by what comes after it, as eager's result can.
        return torch.ops.aten._unsafe_view(y, y.shape) if is_view(y) else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, w = ctx.saved_tensors
        parameters = ctx.parameters
        dx = dweight = dbias = None
        rows = _rows(dy)
        if ctx.needs_input_grad[0]:
            if w is None or torch.is_grad_enabled():  # a second derivative needs the parameter itself
                w = weight.to(dy.dtype)
            dx = dy @ (w.t() if ctx.columns else w)
        if ctx.needs_input_grad[1]:
            flat = _rows(x)
            left, right = (flat.t(), rows) if ctx.columns else (rows.t(), flat)
            dweight = into(
                slot_of(parameters[0]),
                lambda slot, added: product_(slot, added, left, right),
                lambda: torch.mm(left, right).to(parameters[0].dtype),
            )
        if ctx.needs_input_grad[2]:
            dbias = into(
                slot_of(parameters[1]),
                lambda slot, added: sum_(slot, added, rows, (0,)),
                lambda: rows.sum(0).to(parameters[1].dtype),
            )
        return dx, dweight, dbias, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 would be ambiguous where there are no elements


class Embedding(torch.autograd.Function):
    """F.embedding, whose rows are added into the slice without a gradient of the table's size beside it."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        ctx.weight, ctx.padding = weight, -1 if padding_idx is None else padding_idx
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (indices,) = ctx.saved_tensors

        def plain() -> torch.Tensor:
            grad: torch.Tensor = torch.ops.aten.embedding_backward(
                dy, indices, ctx.weight.shape[0], ctx.padding, False, False
            )
            return grad

        def straight(slot: Slot, added: bool) -> None:
            rows_(slot.view, added, indices.reshape(-1), _rows(dy), ctx.padding)

        return None, into(slot_of(ctx.weight), straight, plain), None


def rows_(out: torch.Tensor, added: bool, indices: torch.Tensor, rows: torch.Tensor, padding: int) -> None:
    """Adds each row at its index; the padding row stays as it was."""
    if not added:
        out.zero_()
    kept = out[padding].clone() if padding >= 0 else None
    rows = rows.to(out.dtype)
    if out.is_cuda:
        out.index_put_((indices,), rows, accumulate=True)  # sorts, so the sums have one order; index_add_ has not
    else:
        out.index_add_(0, indices, rows)
    if kept is not None:
        out[padding] = kept
