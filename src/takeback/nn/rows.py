"""LayerNorm and RMSNorm whose backward starts from the output, which the next layer keeps anyway, and overwrites it.

torch keeps the input as well: in a transformer one activation a norm. The forward writes a new tensor, because the
input is the residual stream, which is read again. Where a weight is too small to be divided by, the input is kept after
all; `copies` counts that, and every kept buffer that could not be overwritten, by reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from takeback import engine
from takeback.nn import ops, owner
from takeback.nn.invert import Weights, limits_of
from takeback.nn.kernels.activated import Activation
from takeback.nn.kernels.width import wide
from takeback.nn.owner import Copies


class _Watched(nn.Module):
    """What both norms remember besides their parameters; none of it is saved."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_weights": Weights()})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weights": None}

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica._weights = Weights()  # threads and devices of their own
        return replica

    def _load_from_state_dict(self, *state: Any) -> None:
        super()._load_from_state_dict(*state)
        self._weights.forget()


class InPlaceLayerNorm(_Watched, nn.LayerNorm):
    """`torch.nn.LayerNorm`, with one kept buffer less."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.copies = Copies()
        self._weights = Weights()

    def forward(self, x: Tensor) -> Tensor:
        """layer_norm(x)."""
        x = as_autocast_has_it(x, self)
        mixed = self.weight is not None and self.weight.dtype != x.dtype
        if mixed:
            self.copies.note(f"the input is {x.dtype}, the weight another dtype", "torch's layer_norm keeps the input")
        if mixed or torch.compiler.is_compiling() or engine.transformed():
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return row_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, True, self._weights, self.copies)


class InPlaceRMSNorm(_Watched, nn.RMSNorm):
    """`torch.nn.RMSNorm`, with one kept buffer less."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.copies = Copies()
        self._weights = Weights()

    def forward(self, x: Tensor) -> Tensor:
        """rms_norm(x); eps None is the epsilon of the arithmetic, as in torch."""
        x = as_autocast_has_it(x, self)
        if torch.compiler.is_compiling() or engine.transformed():
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        eps = torch.finfo(wide(x)).eps if self.eps is None else self.eps
        return row_norm(x, self.normalized_shape, self.weight, None, eps, False, self._weights, self.copies)


#: From torch 2.12 on autocast has a rule for rms_norm, as it has for layer_norm.
_CAST = (nn.LayerNorm, nn.RMSNorm) if torch.torch_version.TorchVersion(torch.__version__) >= "2.12" else nn.LayerNorm


def as_autocast_has_it(x: Tensor, norm: nn.Module) -> Tensor:
    """x as torch's own norm takes it: on a GPU autocast computes norms of rows in float32."""
    half = x.dtype in (torch.float16, torch.bfloat16) and isinstance(norm, _CAST)
    return x.float() if half and x.is_cuda and torch.is_autocast_enabled("cuda") else x


@dataclass(frozen=True)
class RowNormSettings:
    """One call's settings, as its Function sees them."""

    shape: tuple[int, ...]
    eps: float
    centred: bool
    from_output: bool
    copies: Copies


def row_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    weights: Weights,
    copies: Copies,
    from_input: str | None = None,
) -> Tensor:
    """The norm. `from_input`: why backward must start from the input, whatever the weights are."""
    shape = tuple(shape)
    if x.dtype not in ops.DTYPES:
        raise TypeError(f"a norm's input is float32, float64, bfloat16 or float16, got {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and (tuple(parameter.shape) != shape or parameter.device != x.device):
            found = f"{tuple(parameter.shape)} on {parameter.device}"
            raise ValueError(f"{name} has shape {found}; {shape} on {x.device} is needed")
    if tuple(x.shape[x.dim() - len(shape) :]) != shape:
        raise ValueError(f"expected an input whose shape ends in {shape}, got {tuple(x.shape)}")
    if from_input is not None:
        why: str | None = from_input
    elif engine.saved_through_hooks():  # a checkpoint runs it again, and must decide the same whatever it knows by then
        why = owner.HOOKED
    else:
        why = weights.reason(weight, bias, limits_of(Activation.IDENTITY, 1.0, x.dtype))
        copies.note(why, "backward from the input")
    return RowNorm.apply(x, weight, bias, RowNormSettings(shape, eps, centred, why is None, copies))


class RowNorm(torch.autograd.Function):
    """y = xhat * weight + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: RowNormSettings) -> Tensor:
        if how.centred:
            y, mean, rstd = torch.native_layer_norm(x, how.shape, weight, bias, how.eps)
            mean, rstd = (table.flatten().to(wide(x)) for table in (mean, rstd))
        else:
            mean = None
            y, rstd = ops.rms_norm(x, weight, math.prod(how.shape), how.eps)
        ctx.how = how
        owner.keep(ctx, y if how.from_output else x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        how: RowNormSettings = ctx.how
        (saved, weight, bias, mean, rstd), why = owner.take(ctx)
        arguments = math.prod(how.shape), how.centred, mean, rstd, weight, bias, how.from_output
        if why is None and not saved.is_contiguous():
            why = "the kept input is not contiguous"
        if ctx.needs_input_grad[0]:
            how.copies.note(why)
        if not ctx.needs_input_grad[0]:
            dx, (dweight, dbias) = None, ops.row_norm_sums(dy, saved, *arguments)
        elif why is None:
            dweight, dbias = ops.row_norm_backward_(dy, saved, *arguments)
            dx = owner.overwritten(saved)
        else:
            dx, dweight, dbias = ops.row_norm_backward(dy, saved, *arguments)
        wanted = zip((dx, dweight, dbias), ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None
