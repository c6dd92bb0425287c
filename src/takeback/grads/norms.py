"""Norms whose backward sums weight and bias gradients straight into their slices, by the kernels of takeback.nn.

The forward runs torch's kernels and keeps what torch keeps. Where a slot declines, or a kernel does, the gradients come
from torch: the norm is computed once more under autograd and differentiated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from takeback.grads.slots import slot_of
from takeback.nn.kernels import norms
from takeback.nn.kernels.norms import Done, Into, NotMine

Gradients = tuple[torch.Tensor | None, ...]


class LayerNorm(torch.autograd.Function):
    """F.layer_norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, ...],
        eps: float,
    ) -> torch.Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.parameters = weight, bias
        ctx.how = shape, eps
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        shape, eps = ctx.how

        def ours(weight_grad: Into | None, bias_grad: Into | None) -> Done | NotMine:
            return norms.layer_norm_backward_(
                *(dy, x, shape, mean, rstd, weight),
                weight_grad=weight_grad,
                bias_grad=bias_grad,
                needs_dx=ctx.needs_input_grad[0],
            )

        grads = _packed(ctx, ours) or _plain(
            ctx, dy, lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps), x, weight, bias
        )
        return *grads, None, None


class RMSNorm(torch.autograd.Function):
    """F.rms_norm; x alone is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], eps: float | None
    ) -> torch.Tensor:
        ctx.parameters = weight, None
        ctx.how = shape, eps
        ctx.save_for_backward(x, weight)
        return F.rms_norm(x, shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        shape, eps = ctx.how

        def ours(weight_grad: Into | None, _: Into | None) -> Done | NotMine:
            return norms.rms_norm_backward_(
                dy, x, shape, weight, eps, weight_grad=weight_grad, needs_dx=ctx.needs_input_grad[0]
            )

        grads = _packed(ctx, ours) or _plain(
            ctx, dy, lambda x, weight, _: F.rms_norm(x, shape, weight, eps), x, weight, None
        )
        return *grads[:2], None, None


class BatchNorm(torch.autograd.Function):
    """F.batch_norm, with the statistics of the batch (`training`) or the running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running: tuple[torch.Tensor | None, torch.Tensor | None],
        training: bool,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        mean, var = running
        y, saved_mean, saved_rstd, *_ = torch.ops.aten._batch_norm_impl_index(
            x, weight, bias, mean, var, training, momentum, eps, torch.backends.cudnn.enabled
        )
        if not training:
            assert mean is not None
            assert var is not None
            saved_mean, saved_rstd = mean.clone(), (var + eps).rsqrt()
        ctx.parameters = weight, bias
        ctx.how = training, eps
        ctx.save_for_backward(x, weight, bias, saved_mean, saved_rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        training, eps = ctx.how

        def ours(weight_grad: Into | None, bias_grad: Into | None) -> Done | NotMine:
            return norms.batch_norm_backward_(
                *(dy, x, weight, mean, rstd),
                training=training,
                weight_grad=weight_grad,
                bias_grad=bias_grad,
                needs_dx=ctx.needs_input_grad[0],
            )

        def again(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if training:
                return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
            return F.batch_norm(x, mean, rstd.double().pow(-2).to(rstd.dtype), weight, bias, False, 0.0, 0.0)

        grads = _packed(ctx, ours) or _plain(ctx, dy, again, x, weight, bias)
        return *grads, None, None, None, None


class GroupNorm(torch.autograd.Function):
    """F.group_norm on a contiguous batch."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float
    ) -> torch.Tensor:
        n, c = x.shape[:2]
        y, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, x[0, 0].numel(), groups, eps)
        ctx.parameters = weight, bias
        ctx.how = groups, eps
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        groups, eps = ctx.how

        def ours(weight_grad: Into | None, bias_grad: Into | None) -> Done | NotMine:
            return norms.group_norm_backward_(
                *(dy, x, groups, mean, rstd, weight),
                weight_grad=weight_grad,
                bias_grad=bias_grad,
                needs_dx=ctx.needs_input_grad[0],
            )

        grads = _packed(ctx, ours) or _plain(
            ctx, dy, lambda x, weight, bias: F.group_norm(x, groups, weight, bias, eps), x, weight, bias
        )
        return *grads, None, None


def _packed(ctx: Any, ours: Callable[[Into | None, Into | None], Done | NotMine]) -> Gradients | None:
    """The gradients of x, weight and bias (None for what lies in its slice), if slots and kernel allow it."""
    slots = [
        slot_of(p) if needed else None for p, needed in zip(ctx.parameters, ctx.needs_input_grad[1:3], strict=True)
    ]
    wanted = [slot for slot in slots if slot is not None]
    if len(wanted) < sum(ctx.needs_input_grad[1:3]):
        return None
    with contextlib.ExitStack() as stack:
        # In one order, so that two threads cannot wait for each other.
        ordered = sorted(wanted, key=lambda slot: (slot.flat, slot.offset))
        added = {slot: stack.enter_context(slot.writing()) for slot in ordered}
        refused = [slot for slot in wanted if added[slot] is None]
        if refused:
            reason = f"computed together with {refused[0].name}: {refused[0].pending}"
        else:
            result = ours(*(Into(slot.view, bool(added[slot])) if slot is not None else None for slot in slots))
            if isinstance(result, Done):
                for slot in wanted:
                    torch.autograd.graph.increment_version(slot.view)
                    slot.wrote(bool(added[slot]))
                return result.dx, None, None
            reason = result.reason
        for slot in wanted:
            slot.pending = slot.pending or reason
        return None


def _plain(
    ctx: Any,
    dy: torch.Tensor,
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    *inputs: torch.Tensor | None,
) -> Gradients:
    """The same by torch: `function` once more under autograd. With a history of its own where the backward has one:
    then it is given aliases, at which the differentiation ends. x itself may come from the same weight, and what
    reaches the weight through x is counted where x was made."""
    keep = torch.is_grad_enabled()
    given: Sequence[Any] = [t if t is None else t.view_as(t) if keep else t.detach().requires_grad_() for t in inputs]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:3]) if needed and inputs[i] is not None]
    with torch.enable_grad():
        y = function(*given)
    found = torch.autograd.grad(y, [given[i] for i in wanted], dy, create_graph=keep)
    grads: list[torch.Tensor | None] = [None, None, None]
    for i, grad in zip(wanted, found, strict=True):
        grads[i] = grad
    return tuple(grads)
