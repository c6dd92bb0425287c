"""Backward of the norms, with the parameters' gradients computed straight into slices of a flat buffer.

In: dy, x, the statistics that the forward saved, and per parameter an `Into`, or None where its gradient is not
wanted. Out: `Done` with dx where it was asked for, or `NotMine` with the reason: nothing was written then, and the
caller takes torch's path. Guaranteed: dy and x are only read; a gradient is summed in float32 (float64 for float64)
and stored, or added onto the slice, once; equal inputs and thread counts give equal bits; a case that is not
supported raises nothing. A slice's version counter is not moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from takeback.nn.kernels import norms_cpu
from takeback.nn.kernels.norm_call import Into, Norm, NormCall
from takeback.nn.kernels.width import wide

__all__ = [
    "Done",
    "Into",
    "NotMine",
    "batch_norm_backward_",
    "group_norm_backward_",
    "layer_norm_backward_",
    "rms_norm_backward_",
]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Done:
    """The gradients are in their slices; `dx` is None where it was not asked for."""

    dx: Tensor | None


@dataclass(frozen=True)
class NotMine:
    """The case is left to torch, and nothing was written. False, so that `if not result` reads well."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False


def layer_norm_backward_(
    dy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    *,
    weight_grad: Into | None = None,
    bias_grad: Into | None = None,
    needs_dx: bool = False,
) -> Done | NotMine:
    """Of `native_layer_norm`, whose second and third results are mean and rstd. Only dx depends on `weight`."""
    rows, columns = _rows(x, normalized_shape)
    refusal = _refusal(dy, x, weight, weight_grad, bias_grad, columns) or _refused_statistics(x, rows, mean, rstd)
    if refusal:
        return NotMine(refusal)
    x = x.contiguous()
    return _run_(
        NormCall(
            norm=Norm.LAYER,
            dy=dy.contiguous(),
            x=x,
            weight=weight,
            mean=_wide(mean),
            rstd=_wide(rstd),
            dx=torch.empty_like(x) if needs_dx else None,
            weight_grad=weight_grad,
            bias_grad=bias_grad,
            batch=rows,
            channels=columns,
        )
    )


def rms_norm_backward_(
    dy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    *,
    weight_grad: Into | None = None,
    needs_dx: bool = True,
) -> Done | NotMine:
    """Of `torch.nn.functional.rms_norm`; each row's scale is computed from x again.

    `eps=None` is the epsilon of the arithmetic, float32's for half precision, as torch has it on CPU and CUDA.
    """
    rows, columns = _rows(x, normalized_shape)
    refusal = _refusal(dy, x, weight, weight_grad, None, columns)
    if refusal:
        return NotMine(refusal)
    x = x.contiguous()
    return _run_(
        NormCall(
            norm=Norm.RMS,
            dy=dy.contiguous(),
            x=x,
            weight=weight,
            mean=None,
            rstd=None,
            dx=torch.empty_like(x) if needs_dx else None,
            weight_grad=weight_grad,
            bias_grad=None,
            batch=rows,
            channels=columns,
            eps=torch.finfo(wide(x)).eps if eps is None else float(eps),
        )
    )


def batch_norm_backward_(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    *,
    training: bool = True,
    weight_grad: Into | None = None,
    bias_grad: Into | None = None,
    needs_dx: bool = True,
) -> Done | NotMine:
    """Of batch_norm: mean and invstd are what the forward saved or, not in training, running_mean and
    rsqrt(running_var + eps). A dy in another layout than x's is copied into it first, as in torch."""
    if x.dim() < 2:
        return NotMine(f"batch_norm's input has at least 2 dimensions, x has {x.dim()}")
    channels = x.shape[1]
    refusal = _refusal(dy, x, weight, weight_grad, bias_grad, channels)
    refusal = refusal or _refused_statistics(x, channels, mean, invstd)
    if refusal:
        return NotMine(refusal)
    layout = _layout(x)
    if layout is None:
        return NotMine(f"x of strides {x.stride()} is neither contiguous nor channels_last")
    return _run_(
        NormCall(
            norm=Norm.BATCH if layout == torch.contiguous_format else Norm.BATCH_LAST,
            dy=dy.contiguous(memory_format=layout),
            x=x,
            weight=weight,
            mean=_wide(mean),
            rstd=_wide(invstd),
            dx=torch.empty_like(x, memory_format=layout) if needs_dx else None,
            weight_grad=weight_grad,
            bias_grad=bias_grad,
            batch=x.shape[0],
            channels=channels,
            spots=math.prod(x.shape[2:]),
            training=training,
        )
    )


def group_norm_backward_(
    dy: Tensor,
    x: Tensor,
    groups: int,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    *,
    weight_grad: Into | None = None,
    bias_grad: Into | None = None,
    needs_dx: bool = False,
) -> Done | NotMine:
    """Of `native_group_norm`, whose second and third results are mean and rstd. Only dx depends on `weight`."""
    if x.dim() < 2 or groups < 1 or x.shape[1] % groups:
        return NotMine(f"x of shape {tuple(x.shape)} does not have channels in {groups} equal groups")
    channels = x.shape[1]
    refusal = _refusal(dy, x, weight, weight_grad, bias_grad, channels)
    refusal = refusal or _refused_statistics(x, x.shape[0] * groups, mean, rstd)
    if refusal:
        return NotMine(refusal)
    if not x.is_contiguous():
        return NotMine(f"x of strides {x.stride()} is not contiguous")
    return _run_(
        NormCall(
            norm=Norm.GROUP,
            dy=dy.contiguous(),
            x=x,
            weight=weight,
            mean=_wide(mean),
            rstd=_wide(rstd),
            dx=torch.empty_like(x) if needs_dx else None,
            weight_grad=weight_grad,
            bias_grad=bias_grad,
            batch=x.shape[0],
            channels=channels,
            spots=math.prod(x.shape[2:]),
            groups=groups,
        )
    )


def _run_(call: NormCall) -> Done | NotMine:
    if call.x.is_cuda:
        try:
            from takeback.nn.kernels import norms_cuda
        except ImportError as error:
            return NotMine(f"Triton is not available: {error}")
        refusal = norms_cuda.run_(call)
    else:
        refusal = norms_cpu.run_(call)
    return NotMine(refusal) if refusal else Done(call.dx)


def _rows(x: Tensor, normalized_shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns; -1 columns, which nothing has, where x does not end in that shape."""
    split = x.dim() - len(normalized_shape)
    if split < 0 or not normalized_shape or tuple(x.shape[split:]) != tuple(normalized_shape):
        return -1, -1
    return math.prod(x.shape[:split]), math.prod(normalized_shape)


def _layout(x: Tensor) -> torch.memory_format | None:
    layouts = [torch.contiguous_format]
    layouts += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(x.dim(), [])
    return next((layout for layout in layouts if x.is_contiguous(memory_format=layout)), None)


def _wide(statistics: Tensor) -> Tensor:
    """As wide as the arithmetic: torch keeps a half-precision norm's statistics in half precision on the CPU."""
    return statistics.to(wide(statistics)).contiguous()


def _refusal(
    dy: Tensor, x: Tensor, weight: Tensor | None, weight_grad: Into | None, bias_grad: Into | None, size: int
) -> str | None:
    """Why these are not ours; None where they are."""
    parameters = {"weight": weight}
    parameters |= {
        f"the {name} slice": into.slice for name, into in (("weight", weight_grad), ("bias", bias_grad)) if into
    }
    given = {"dy": dy, "x": x} | {name: tensor for name, tensor in parameters.items() if tensor is not None}
    for name, tensor in given.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"{name} is a {type(tensor).__name__}, not a plain tensor"
        if tensor.device.type not in ("cpu", "cuda") or tensor.device != x.device:
            return f"{name} is on {tensor.device}, x on {x.device}; all must be on one CPU or CUDA device"
        if tensor.layout != torch.strided or tensor.is_neg():
            return f"{name} is not an ordinary strided tensor"
        if tensor.dtype not in _DTYPES:
            return f"{name} is {tensor.dtype}"
        if wide(tensor) != wide(x):
            return f"{name} is {tensor.dtype}, x is {x.dtype}: they are summed in different widths"
    if size < 0:
        return f"x of shape {tuple(x.shape)} does not end in the normalized shape"
    if dy.dtype != x.dtype or dy.shape != x.shape:
        return f"dy is {dy.dtype} {tuple(dy.shape)}, x is {x.dtype} {tuple(x.shape)}"
    for name, tensor in given.items():
        if name in ("dy", "x"):
            continue
        if tensor.numel() != size or not tensor.is_contiguous():
            return (
                f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; {size} dense elements are needed"
            )
    return None


def _refused_statistics(x: Tensor, size: int, *statistics: Tensor) -> str | None:
    for tensor in statistics:
        if tensor.device != x.device or tensor.numel() != size or wide(tensor) != wide(x):
            return (
                f"statistics are {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; {size} of "
                f"{wide(x)} or narrower on {x.device} are needed"
            )
    return None
