"""Convolutions: a 1×1 convolution's weight gradient is a matrix product into its slice, a bias's a sum into its own.

The weight gradient of a larger kernel has no `out=` in torch: the framework copies it into the slice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from takeback.grads.linear import cast_like_autocast, into, land_, product_, sum_
from takeback.grads.slots import Slot, slot_of

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

_MOST_PRODUCTS = 64
"""A contiguous batch takes one product for each image; beyond this many, launches on a GPU cost more than a copy."""


class Conv(torch.autograd.Function):
    """F.conv1d, conv2d or conv3d with padding by zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        w = cast_like_autocast(weight, dtype)
        b = cast_like_autocast(bias, dtype) if bias is not None else None
        ctx.parameters = weight, bias
        ctx.how = stride, padding, dilation, groups
        ctx.save_for_backward(x, weight, None if w is weight else w)
        return _CONV[x.dim() - 2](x, w, b, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, w = ctx.saved_tensors
        if w is None or torch.is_grad_enabled():
            w = weight.to(dy.dtype)
        stride, padding, dilation, groups = ctx.how
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        slot, bias_slot = (slot_of(p) for p in ctx.parameters)
        over = (0, *range(2, dy.dim()))
        dweight = dbias = None
        straight = False
        if needs_weight and slot is not None and is_product(w, padding, groups):
            reason = _slower(dy, x)
            if reason:
                slot.pending = reason
            else:
                with slot.writing() as added:
                    if added is not None:
                        _one_by_one_(slot, added, dy, x, stride)
                        slot.wrote(added)
                        straight = True
        mask = [needs_x, needs_weight and not straight, False]
        dx = None
        if mask[0] or mask[1]:
            dx, dweight, _ = torch.ops.aten.convolution_backward(
                dy, x, w, None, stride, padding, dilation, False, [0] * len(stride), groups, mask
            )
        if dweight is not None:
            dweight = dweight.to(weight.dtype)
        if needs_bias:
            dbias = into(
                bias_slot,
                lambda slot, added: sum_(slot, added, dy, over),
                lambda: dy.sum(over).to(weight.dtype),
            )
        return dx, dweight, dbias, None, None, None, None, None


def is_product(weight: torch.Tensor, padding: tuple[int, ...], groups: int) -> bool:
    """Whether the weight gradient is one matrix product."""
    return groups == 1 and not any(padding) and all(k == 1 for k in weight.shape[2:])


def _rows_last(x: torch.Tensor) -> bool:
    """Whether channels lie next to each other (channels_last), so that a batch is rows × channels as it is."""
    return bool(x.movedim(1, -1).is_contiguous())


def _is_one_product(dy: torch.Tensor, x: torch.Tensor) -> bool:
    """On a GPU one product is worth a copy of dy or x into rows, where the other lies in rows already."""
    return _rows_last(dy) or (dy.is_cuda and _rows_last(x))


def _slower(dy: torch.Tensor, x: torch.Tensor) -> str:
    """Why products would be slower than torch's convolution and a copy, if so."""
    if not dy.is_cuda:
        return ""
    if dy.dtype is torch.float32 and torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32:
        return "convolutions may use TF32, and matrix products may not"
    if dy.shape[0] > _MOST_PRODUCTS and not _is_one_product(dy, x):
        return f"{dy.shape[0]} images that are not channels_last: one product for each would be slower"
    return ""


def _one_by_one_(slot: Slot, added: bool, dy: torch.Tensor, x: torch.Tensor, stride: tuple[int, ...]) -> None:
    for dim, step in enumerate(stride):
        if step != 1:
            x = x[(slice(None),) * (dim + 2) + (slice(None, None, step),)]
    x = x[tuple(slice(0, n) for n in (*x.shape[:2], *dy.shape[2:]))]
    if slot.view.dtype != dy.dtype and not dy.is_cuda:
        grad = torch.einsum("noi,nci->oc", dy.flatten(2), x.flatten(2))
        land_(slot, added, grad)
    elif _is_one_product(dy, x):
        left = dy.movedim(1, -1).reshape(-1, dy.shape[1]).t()
        product_(slot, added, left, x.movedim(1, -1).reshape(-1, x.shape[1]))
    else:
        for image, input_ in zip(dy.flatten(2), x.flatten(2), strict=True):
            product_(slot, added, image, input_.t())
            added = True
    if not dy.shape[0] and not added:
        slot.view.zero_()
