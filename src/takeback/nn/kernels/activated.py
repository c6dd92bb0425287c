"""An activated batch norm, y = act(gamma * xhat + beta), in four kernels: statistics, normalise_, gather, put_.

In: dense tensors in one layout, which `Layer` describes; nothing is checked here. Out: per-channel tables as wide as
the arithmetic (float32, float64 for float64), or an `out` that is written. Guaranteed: `out` may be the very tensor
that is read (`normalise_`: x; `put_`: saved), because every element is read before it is written, by the same thread,
and nothing is declared free of aliases; dy is only read; no atomics, so equal inputs and thread counts give equal bits.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from takeback.nn.kernels import activated_cpu
from takeback.nn.kernels.width import wide


class Activation(enum.IntEnum):
    """What follows the norm. The numbers are those of the kernels."""

    IDENTITY = 0
    LEAKY_RELU = 1  #: slope `param` below zero
    ELU = 2  #: param * expm1(z) below zero
    RELU = 3
    SILU = 4


@dataclass(frozen=True)
class Layer:
    """One activated norm: where the channels of its tensors lie, its parameters, and what is saved for backward.

    gamma is the weight, or |weight| + `absolute_eps` where that is given; 1, and beta 0, where there are none. Tensors
    are [batch, channels, spots] in memory, or [batch * spots, channels] where `last` (also for N × C, with one spot).
    """

    batch: int
    channels: int
    spots: int
    last: bool
    weight: Tensor | None
    bias: Tensor | None
    activation: Activation
    param: float
    absolute_eps: float | None = None
    from_output: bool = True  #: backward is given y and inverts it (identity, leaky_relu, elu), or else x

    @property
    def count(self) -> int:
        """Elements of a channel."""
        return self.batch * self.spots


@dataclass(frozen=True)
class Reach:
    """Up to where a channel can be inverted: |beta| <= ratio * |gamma|, and |gamma| >= least."""

    ratio: float
    least: float


def reach(dtype: torch.dtype) -> Reach:
    """For activations stored as `dtype`: a rounding of y, blown up by |beta| / |gamma|, stays below 1/2048 of xhat, in
    half precision below 1/16."""
    info = torch.finfo(dtype)
    return Reach(ratio=1 / ((8 if info.bits == 16 else 1024) * info.eps), least=info.tiny)


def dense_layout(x: Tensor) -> torch.memory_format | None:
    """The format in which x is dense, or None."""
    formats = [torch.contiguous_format, *{4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(x.dim(), [])]
    return next((each for each in formats if x.is_contiguous(memory_format=each)), None)


def sizes(x: Tensor) -> tuple[int, int, int, bool]:
    """batch, channels, spots and last of a dense x of N × C or N × C × S1 × ... × Sn."""
    spots = math.prod(x.shape[2:])
    return x.shape[0], x.shape[1], spots, spots == 1 or not x.is_contiguous()


def statistics(x: Tensor, layer: Layer) -> Tensor:
    """[2, channels]: mean and biased variance, read in one pass over x. At least one element a channel."""
    return _backend(x).statistics(x, layer)


def batch_statistics(
    x: Tensor,
    layer: Layer,
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """mean and 1 / sqrt(variance + eps); the running statistics move towards this batch's by `momentum`."""
    if x.is_cuda and all(running is None or running.is_contiguous() for running in (running_mean, running_var)):
        return _backend(x).batch_statistics(x, layer, eps, running_mean, running_var, momentum)  # type: ignore[no-any-return]
    mean, variance = statistics(x, layer)
    track_(running_mean, running_var, mean, variance, layer.count, momentum)
    return mean, (variance + eps).rsqrt_()


def track_(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Move the running statistics towards those of a batch of `count` elements a channel, by `momentum`."""
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (count / max(count - 1, 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)


def normalise_(x: Tensor, out: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> None:
    """out = act(gamma * (x - mean) * invstd + beta)."""
    _backend(x).normalise_(x, out, layer, mean, invstd)


def gather(dy: Tensor, saved: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[2, channels]: sums of dz and of dz * xhat, where dz = dy * act'(z); then the gradients of weight and bias, which
    are those sums in the parameters' dtypes, new tensors that share nothing.

    saved is y where `layer.from_output`: z = act⁻¹(y), xhat = (z - beta) / gamma, 0 where gamma is 0 (on a GPU: where
    it is out of `reach`); mean and invstd are not read then. Else it is x: xhat = (x - mean) * invstd.
    """
    if not dy.numel():
        dtypes = (None if each is None else each.dtype for each in (layer.weight, layer.bias))
        sums, *gradients = (
            dy.new_zeros(shape, dtype=dtype or wide(dy))
            for shape, dtype in zip(((2, layer.channels), layer.channels, layer.channels), (None, *dtypes), strict=True)
        )
        return sums, gradients[0], gradients[1]
    if dy.is_cuda:
        return _backend(dy).gather(dy, saved, layer, mean, invstd)  # type: ignore[no-any-return]
    sums = activated_cpu.gather_sums(dy, saved, layer, mean, invstd)
    of_bias, of_weight = sums
    if layer.weight is not None and layer.absolute_eps is not None:
        of_weight = of_weight * torch.where(layer.weight < 0, -1, 1)
    weight_dtype = sums.dtype if layer.weight is None else layer.weight.dtype
    bias_dtype = sums.dtype if layer.bias is None else layer.bias.dtype
    return sums, of_weight.to(weight_dtype, copy=True), of_bias.to(bias_dtype, copy=True)


def gather_sums(dy: Tensor, saved: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> Tensor:
    """The sums alone."""
    return gather(dy, saved, layer, mean, invstd)[0]


def put_(
    dy: Tensor,
    saved: Tensor,
    out: Tensor,
    layer: Layer,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor | None,
    count: int,
) -> None:
    """out = gamma * invstd * (dz - sums[0] / count - xhat * sums[1] / count): the gradient of x.

    sums are those of `gather`, and count the elements of a channel, of all ranks; None where the statistics were
    constants (eval).
    """
    if dy.is_cuda:
        _backend(dy).put_(dy, saved, out, layer, mean, invstd, sums, count)
    else:
        activated_cpu.put_(dy, saved, out, layer, mean, invstd, None if sums is None else sums / count)


def _backend(x: Tensor):  # type: ignore[no-untyped-def]
    if x.is_cuda:
        from takeback.nn.kernels import activated_cuda  # Triton is imported only where there is a GPU

        return activated_cuda
    return activated_cpu
