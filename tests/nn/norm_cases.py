"""One norm's backward beside a float64 reference: what the CPU's and the GPU's tests of the kernels share.

A gradient may be off by its slice's rounding, and by a few roundings of the arithmetic of what was added up in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.nn.kernels.norms import (
    Done,
    Into,
    NotMine,
    batch_norm_backward_,
    group_norm_backward_,
    layer_norm_backward_,
    rms_norm_backward_,
)

GUARD = 7.0
OLD = 0.5
OFFSET = 3  # elements: no alignment beyond the dtype's own


@dataclass(frozen=True)
class Case:
    """`shape` is N × C × S...; rows of `shape[-1]` for layer_norm and rms_norm. None for a dtype: no such parameter."""

    norm: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    parameters: torch.dtype | None = None  #: None: as wide as the arithmetic
    layout: torch.memory_format = torch.contiguous_format
    groups: int = 1
    weight: bool = True  #: has a weight at all
    weight_grad: bool = True
    bias_grad: bool = True
    accumulate: bool = False
    dx: bool = True
    device: str = "cpu"

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def channels(self) -> int:
        return self.shape[-1] if self.norm in ("layer", "rms") else self.shape[1]


@dataclass
class Drawn:
    """Inputs of a case; statistics as the forward saves them, in the arithmetic's width."""

    x: Tensor
    dy: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor


EPS = 1e-5


def draw(case: Case, seed: int = 0) -> Drawn:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, dy = (normal(*case.shape) + 0.5).to(case.dtype), normal(*case.shape).to(case.dtype)
    if case.layout != torch.contiguous_format:
        x, dy = (t.contiguous(memory_format=case.layout) for t in (x, dy))
    weight = (normal(case.channels) + 1).to(case.parameters or case.wide) if case.weight else None
    mean, variance = _moments(case, x.double())
    rstd = torch.rsqrt(variance + EPS)
    moved = (t.to(case.device) for t in (x, dy))
    return Drawn(
        *moved,
        None if weight is None else weight.to(case.device),
        mean.to(case.wide).to(case.device),
        rstd.to(case.wide).to(case.device),
    )


def _moments(case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    if case.norm == "eval":
        generator = torch.Generator().manual_seed(99)
        mean, variance = (torch.rand(case.channels, generator=generator, dtype=torch.float64) for _ in range(2))
        return mean, variance + 0.5
    if x.numel() == 0:
        size = {"batch": case.channels, "group": case.shape[0] * case.groups}.get(case.norm, math.prod(case.shape[:-1]))
        return torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    if case.norm == "batch":
        dims = [d for d in range(x.dim()) if d != 1]
        return x.mean(dims), x.var(dims, correction=0)
    rows = x.reshape(case.shape[0] * case.groups, -1) if case.norm == "group" else x.reshape(-1, case.shape[-1])
    return rows.mean(1), rows.var(1, correction=0)


def reference(case: Case, drawn: Drawn) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the gradients of weight and bias, by autograd in float64 on the CPU."""
    x = drawn.x.double().cpu().requires_grad_()
    weight = torch.ones(case.channels, dtype=torch.float64) if drawn.weight is None else drawn.weight.double().cpu()
    weight.requires_grad_()
    bias = torch.zeros(case.channels, dtype=torch.float64, requires_grad=True)
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    if case.norm == "layer":
        y = F.layer_norm(x, case.shape[-1:], weight, bias, EPS)
    elif case.norm == "rms":
        y = F.rms_norm(x, case.shape[-1:], weight, EPS) + bias
    else:  # F.batch_norm and F.group_norm refuse one value a channel
        y = _normalized(case, drawn, x) * _of_channels(weight, x) + _of_channels(bias, x)
    return torch.autograd.grad(y, [x, weight, bias], drawn.dy.double().cpu())  # type: ignore[return-value]


def _normalized(case: Case, drawn: Drawn, x: Tensor) -> Tensor:
    if case.norm == "eval":
        mean, rstd = drawn.mean.double().cpu(), drawn.rstd.double().cpu()
    else:
        mean, variance = _moments(case, x)
        rstd = torch.rsqrt(variance + EPS)
    if case.norm == "group":
        return ((x.reshape(len(mean), -1) - mean[:, None]) * rstd[:, None]).reshape(x.shape)
    return (x - _of_channels(mean, x)) * _of_channels(rstd, x)


def _of_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def run_(case: Case, drawn: Drawn, weight_grad: Into | None, bias_grad: Into | None) -> Done | NotMine:
    x, dy, weight, mean, rstd = drawn.x, drawn.dy, drawn.weight, drawn.mean, drawn.rstd
    into = {"weight_grad": weight_grad, "needs_dx": case.dx}
    if case.norm == "rms":
        return rms_norm_backward_(dy, x, case.shape[-1:], weight, EPS, **into)  # type: ignore[arg-type]
    into["bias_grad"] = bias_grad
    if case.norm == "layer":
        return layer_norm_backward_(dy, x, case.shape[-1:], mean, rstd, weight, **into)  # type: ignore[arg-type]
    if case.norm == "group":
        return group_norm_backward_(dy, x, case.groups, mean, rstd, weight, **into)  # type: ignore[arg-type]
    training = case.norm == "batch"
    return batch_norm_backward_(dy, x, weight, mean, rstd, training=training, **into)  # type: ignore[arg-type]


def flat_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """A flat buffer full of guards, and the slices of weight and bias in it, which hold OLD."""
    n = case.channels
    flat = torch.full((2 * n + 3 * OFFSET,), GUARD, dtype=case.parameters or case.wide, device=case.device)
    weight, bias = flat[OFFSET : OFFSET + n], flat[2 * OFFSET + n : 2 * OFFSET + 2 * n]
    weight.fill_(OLD)
    bias.fill_(OLD)
    return flat, weight, bias


def check(case: Case, seed: int = 0) -> None:
    """Run it, and compare everything it wrote, and everything it must not write."""
    drawn = draw(case, seed)
    before = [t.clone() for t in (drawn.x, drawn.dy, drawn.mean, drawn.rstd)]
    flat, weight_slice, bias_slice = flat_of(case)
    weight_grad = Into(weight_slice, case.accumulate) if case.weight_grad else None
    bias_grad = Into(bias_slice, case.accumulate) if case.bias_grad and case.norm != "rms" else None
    done = run_(case, drawn, weight_grad, bias_grad)
    assert isinstance(done, Done), done.reason

    dx, weight, bias = reference(case, drawn)
    weight_terms, bias_terms = absolute_terms(case, drawn)
    for name, slice_, grad, terms, wanted in (
        ("weight", weight_slice, weight, weight_terms, weight_grad),
        ("bias", bias_slice, bias, bias_terms, bias_grad),
    ):
        if wanted is None:
            assert bool((slice_ == OLD).all()), f"{name}: not asked for, but written"
        else:
            assert_near(name, slice_, grad + OLD * case.accumulate, terms + OLD, case.wide)
    guards = torch.ones_like(flat, dtype=torch.bool)
    for start in (OFFSET, 2 * OFFSET + case.channels):
        guards[start : start + case.channels] = False
    assert bool((flat[guards] == GUARD).all()), "a neighbour was touched"

    if not case.dx:
        assert done.dx is None
    else:
        assert done.dx is not None
        assert (done.dx.dtype, done.dx.shape) == (case.dtype, drawn.x.shape)
        assert done.dx.stride() == drawn.x.stride() or dx.numel() == 0
        assert_near("dx", done.dx, dx, dx_terms(case, drawn).expand_as(dx), case.wide)
    for then, now in zip(before, (drawn.x, drawn.dy, drawn.mean, drawn.rstd), strict=True):
        assert torch.equal(then, now), "an input was written"


def absolute_terms(case: Case, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Per channel, the sums of the absolute values of the terms: what rounding is measured against."""
    positive = replace(drawn, dy=drawn.dy.abs())
    _, _, bias = reference(case, positive)
    away = drawn.x.double().cpu().abs().max() if drawn.x.numel() else torch.zeros(())
    return bias * (away + 1) * (drawn.rstd.double().max().cpu() if drawn.rstd.numel() else 1), bias


def dx_terms(case: Case, drawn: Drawn) -> Tensor:
    """The largest of the terms that may cancel in dx, as they do fully for a row or channel of one element."""
    if drawn.x.numel() == 0:
        return torch.zeros((), dtype=torch.float64)
    weight = torch.ones(()) if drawn.weight is None else drawn.weight
    rstd = drawn.rstd
    if case.norm == "rms":
        rstd = torch.rsqrt(drawn.x.double().square().mean(-1) + EPS)
    largest = [t.double().cpu().abs().max() for t in (weight, rstd, drawn.dy)]
    return torch.stack(largest).prod()


def assert_near(name: str, got: Tensor, wanted: Tensor, terms: Tensor, wide: torch.dtype) -> None:
    stored = got.double().cpu()
    bound = torch.finfo(got.dtype).eps * wanted.abs() + 8 * torch.finfo(wide).eps * terms
    off = (stored - wanted).abs()
    assert bool((off <= bound).all()), f"{name}: off by {(off / bound).max():.3g} times what rounding explains"


def rms_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double().cpu() - wanted).square().mean().sqrt())
