"""What works along rows: RMSNorm, the backward of LayerNorm and RMSNorm from their output, and SwiGLU.

In: dense rows of one dtype (SwiGLU's may lie further apart), parameters of any floating dtype; nothing is checked
here. Out: tables as wide as the arithmetic (float32, float64 for float64), or an `out` that is written. Guaranteed: an
`out` may be the very tensor that is read, because an element is read for the last time before it is written, by the
same thread, and nothing is declared free of aliases; dy is only read; no atomics, so equal inputs and thread counts
give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from takeback.nn.kernels import row_steps_cpu


@dataclass(frozen=True)
class Rows:
    """A norm over rows of `columns` elements: y = xhat * weight + bias, xhat centred (LayerNorm) or not (RMSNorm)."""

    rows: int
    columns: int
    weight: Tensor | None
    bias: Tensor | None
    centred: bool
    from_output: bool = True  #: backward is given y: xhat = (y - bias) / weight, 0 where the weight is 0; or else x


def rms_norm_(x: Tensor, out: Tensor, norm: Rows, eps: float) -> Tensor:
    """out = x * rstd * weight; [rows]: rstd = 1 / sqrt(mean(x²) + eps)."""
    return _backend(x).rms_norm_(x, out, norm, eps)


def backward_(dy: Tensor, saved: Tensor, out: Tensor | None, norm: Rows, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """out = rstd * (g - xhat * mean(g * xhat)), less rstd * mean(g) where centred, with g = dy * weight.

    [2, columns]: sums over rows of dy and of dy * xhat, the gradients of bias and weight. saved is y where
    `norm.from_output` (mean is not read then), else x, with xhat = (x - mean) * rstd. out None: only the sums.
    """
    return _backend(dy).backward_(dy, saved, out, norm, mean, rstd)


def gradients_(
    dy: Tensor, saved: Tensor, out: Tensor | None, norm: Rows, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The same; the gradients of weight and bias in their dtypes, new tensors that share nothing."""
    if dy.is_cuda:
        return _backend(dy).gradients_(dy, saved, out, norm, mean, rstd)[1:]  # type: ignore[no-any-return]
    sums = row_steps_cpu.backward_(dy, saved, out, norm, mean, rstd)
    of_weight, of_bias = (
        part.to(sums.dtype if parameter is None else parameter.dtype, copy=True)
        for part, parameter in ((sums[1], norm.weight), (sums[0], norm.bias))
    )
    return of_weight, of_bias


def swiglu_(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up. All are [rows, columns] with dense columns; rows may lie further apart."""
    _backend(gate).swiglu_(gate, up, out)


def swiglu_backward_(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """dgate = dy * up * silu'(gate), dup = dy * silu(gate). dgate may be gate, and dup may be up."""
    _backend(gate).swiglu_backward_(dy, gate, up, dgate, dup)


def _backend(x: Tensor):  # type: ignore[no-untyped-def]
    if x.is_cuda:
        from takeback.nn.kernels import row_steps_cuda  # Triton is imported only where there is a GPU

        return row_steps_cuda
    return row_steps_cpu
