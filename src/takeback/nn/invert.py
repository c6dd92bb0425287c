"""Whether an activated norm's backward can start from its output y, or needs its input; and if not, why.

From y: z = act⁻¹(y), xhat = (z - beta) / gamma. That asks for an activation with an inverse, and for weights that did
not drown xhat: y is rounded relative to |gamma * xhat + beta|, so where |beta| is many times |gamma|, or gamma is next
to zero, what comes back is noise. (Eager keeps x, whose rounding is relative to |mean| / std.) A layer
with one such channel keeps its input instead, for as long as that is so.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from takeback import engine
from takeback.nn.kernels.activated import Activation, reach

TOO_SMALL = "a weight is too small to invert, by itself or beside its bias"
_EVERY = 8  #: calls between two looks at a GPU's weights


def without_inverse(activation: Activation, param: float, dtype: torch.dtype) -> str | None:
    """Why act⁻¹ does not give z back, whatever the weights are; None where it does."""
    if activation == Activation.RELU or (activation == Activation.LEAKY_RELU and param == 0):
        return "relu sends everything below zero to one value"
    if activation == Activation.SILU:
        return "silu takes its values between -0.28 and 0 twice"
    if activation == Activation.LEAKY_RELU and param < 0:
        return f"leaky_relu with a slope of {param} takes its positive values twice"
    if activation == Activation.ELU:
        if param <= 0:
            return f"elu with alpha = {param} is not one to one"
        if dtype in (torch.float16, torch.bfloat16):
            return "elu flattens out below zero, where half precision keeps no digits of it"
    return None


@dataclass(frozen=True)
class Limits:
    """Within which weights can be inverted: |beta| <= ratio * |gamma| and |gamma| >= least, in every channel.

    depth is elu's: five deviations below beta, z must not be so deep that y is -alpha but for a few bits. An error of
    eps in y / alpha is one of eps * exp(-z) in z.
    """

    ratio: float
    least: float
    depth: float = math.inf


@functools.lru_cache
def limits_of(activation: Activation, param: float, dtype: torch.dtype) -> Limits:
    """For activations stored as `dtype`."""
    within = reach(dtype)
    slope = min(param, 1.0) if activation == Activation.LEAKY_RELU and param > 0 else 1.0
    depth = -math.log(512 * torch.finfo(dtype).eps) if activation == Activation.ELU else math.inf
    return Limits(within.ratio, within.least / slope, depth)


class Weights:
    """Watches one layer's weights: `reason(...)` is why y cannot be inverted with them, or None.

    On the CPU the answer is about the weights as they are. On a GPU reading them would stop the host: it asks at every
    eighth call, and hears the answer at the next, except at the first call and after `forget`. The kernels take xhat as
    0 in a channel that became too small since, so its weight stands still until the layer knows.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Ask anew, and wait for the answer: the weights were replaced rather than trained."""
        self._key: tuple[torch.device, Limits] | None = None
        self._worst: float | None = None
        self._answer: tuple[Tensor, torch.cuda.Event] | None = None
        self._asked = False
        self._calls = 0

    def reason(
        self, weight: Tensor | None, bias: Tensor | None, limits: Limits, absolute_eps: float | None = None
    ) -> str | None:
        """Why y cannot be inverted with these weights, as far as is known."""
        one = bias if weight is None else weight
        if one is None:
            return None
        if one.is_meta or engine.is_fake(one):
            return "the weights have no values to look at"
        if engine.being_recorded():  # into a program that asks again when it is replayed
            return None if bool(worst_ratio(weight, bias, limits, absolute_eps) <= limits.ratio) else TOO_SMALL
        if one.is_cuda and self._worst is None and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, and nobody has looked at the weights before"
        if one.is_cuda:
            self._look(one.device, weight, bias, limits, absolute_eps)
        else:
            self._worst = float(worst_ratio(weight, bias, limits, absolute_eps))
        assert self._worst is not None
        return None if self._worst <= limits.ratio else TOO_SMALL

    def _look(
        self,
        device: torch.device,
        weight: Tensor | None,
        bias: Tensor | None,
        limits: Limits,
        absolute_eps: float | None,
    ) -> None:
        # Not by version counters: torch's fused optimizers do not move them.
        if self._key != (device, limits):
            self.forget()
            self._key = (device, limits)
        self._calls += 1
        if self._worst is None:
            self._worst = float(worst_ratio(weight, bias, limits, absolute_eps))
        elif not self._asked and self._calls % _EVERY:
            pass
        elif torch.cuda.is_current_stream_capturing():
            pass  # into a CUDA graph: nothing may be read, the last answer holds
        elif self._asked:
            assert self._answer is not None
            answer, arrived = self._answer
            arrived.synchronize()  # it was asked for a call ago: no wait
            self._worst, self._asked = float(answer), False
        else:
            with torch.cuda.device(device):
                worst = worst_ratio(weight, bias, limits, absolute_eps)
                if self._answer is None:
                    self._answer = torch.empty((), dtype=worst.dtype, pin_memory=True), torch.cuda.Event()
                answer, arrived = self._answer
                answer.copy_(worst, non_blocking=True)
                arrived.record()
            self._asked = True


@torch.no_grad()  # type: ignore[untyped-decorator]
def worst_ratio(weight: Tensor | None, bias: Tensor | None, limits: Limits, absolute_eps: float | None) -> Tensor:
    """The largest |beta| / |gamma| of all channels, infinite where one is beyond the other limits."""
    if weight is None:
        assert bias is not None
        weight, absolute_eps = torch.ones_like(bias), None
    if weight.is_cuda and weight.is_contiguous() and (bias is None or bias.is_contiguous()):
        from takeback.nn.kernels import activated_cuda  # Triton is imported only where there is a GPU

        return activated_cuda.worst_ratio(weight, bias, limits.least, limits.depth, absolute_eps)
    gamma = weight.abs().to(torch.promote_types(weight.dtype, torch.float32))
    if absolute_eps is not None:
        gamma = gamma + absolute_eps
    if not gamma.numel():
        return gamma.new_zeros(())
    beta = torch.zeros_like(gamma) if bias is None else bias.to(gamma.dtype)
    beyond = gamma < limits.least
    if limits.depth != math.inf:
        beyond |= 5 * gamma - beta - gamma.log() > limits.depth
    return torch.where(beyond, torch.inf, beta.abs() / gamma).amax()
