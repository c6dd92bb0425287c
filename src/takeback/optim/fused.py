"""torch's own fused operators on lists of tensors: the update on a CPU, and on a GPU wherever ours does not serve.

In: lists that were prepared once, and the settings of a group. Out: parameters, states (and under a loss scale the
gradients) updated in place, with the bits of torch.optim's `fused=True`, since these are the operators it calls.
Only where that does not work (`avoids`) the bits are those of torch.optim's `foreach=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class AdamSettings:
    """Of one group; `decoupled` is AdamW."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool


@dataclass(frozen=True)
class SGDSettings:
    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


@dataclass(frozen=True)
class Lists:
    """Parameters of one dtype on one device, with their gradients and states in the same order."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: Sequence[Tensor] = ()


@dataclass(frozen=True)
class ScalerTensors:
    """What GradScaler hands to a fused optimizer, on the parameters' device."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def avoids(device: torch.device, dtype: torch.dtype, settings: AdamSettings | SGDSettings) -> str:
    """Why torch's fused operator is not used here, or nothing."""
    if isinstance(settings, SGDSettings) and device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return (
            f"torch's fused SGD leaves {dtype} parameters on a CPU unchanged, and reads past the end of their momentum "
            f"(pytorch issue 191763, seen in 2.11 to 2.13): updated one by one, with the bits of foreach=False"
        )
    return ""


def adam_(lists: Lists, settings: AdamSettings, scaling: ScalerTensors) -> None:
    """The step counts have been increased already."""
    op = aten._fused_adamw_ if settings.decoupled else aten._fused_adam_
    lr = settings.lr
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(lists.params[0].device, non_blocking=True)
    (op.tensor_lr if isinstance(lr, Tensor) else op.default)(
        lists.params,
        _gradients(lists),
        lists.states["exp_avg"],
        lists.states["exp_avg_sq"],
        lists.states.get("max_exp_avg_sq", []),
        lists.steps,
        amsgrad=settings.amsgrad,
        lr=lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=settings.maximize,
        grad_scale=scaling.grad_scale,
        found_inf=scaling.found_inf,
    )


def sgd_(lists: Lists, settings: SGDSettings, first: bool, scaling: ScalerTensors) -> None:
    """`first`: no parameter of the lists has a momentum yet; it becomes the gradient."""
    lr = settings.lr
    if avoids(lists.params[0].device, lists.params[0].dtype, settings):
        _sgd_one_by_one_(lists, settings, first, scaling)
        return
    (aten._fused_sgd_.tensor_lr if isinstance(lr, Tensor) else aten._fused_sgd_.default)(
        lists.params,
        _gradients(lists),
        lists.states.get("momentum_buffer", []),
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        lr=lr,
        dampening=settings.dampening,
        nesterov=settings.nesterov,
        maximize=settings.maximize,
        is_first_step=first,
        grad_scale=scaling.grad_scale,
        found_inf=scaling.found_inf,
    )


def _sgd_one_by_one_(lists: Lists, settings: SGDSettings, first: bool, scaling: ScalerTensors) -> None:
    if scaling.found_inf is not None and bool(scaling.found_inf):
        return
    momentum = settings.momentum
    grads = _gradients(lists)
    for i, (param, grad) in enumerate(zip(lists.params, grads, strict=True)):
        if scaling.grad_scale is not None:
            grad.div_(scaling.grad_scale)
        change = -grad if settings.maximize else grad
        if settings.weight_decay != 0:
            change = change.add(param, alpha=settings.weight_decay)
        if momentum != 0:
            buffer = lists.states["momentum_buffer"][i]
            if first:
                buffer.copy_(change)
            else:
                buffer.mul_(momentum).add_(change, alpha=1 - settings.dampening)
            change = change.add(buffer, alpha=momentum) if settings.nesterov else buffer
        param.add_(change, alpha=-float(settings.lr))


def _gradients(lists: Lists) -> Sequence[Tensor]:
    """In the parameters' dtype, which the operators want."""
    if not lists.grads or lists.grads[0].dtype == lists.params[0].dtype:
        return lists.grads
    casts = [torch.empty_like(p) for p in lists.params]
    aten._foreach_copy_.default(casts, lists.grads)
    return casts
