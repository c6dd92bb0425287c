"""What of the norms' backward no other file has, in Triton: group_norm's runs, and rms_norm's scales without dx.

`partial` is [2, parts, channels]: sums of dy, then of dy * xhat. Guaranteed: no atomics, every program writes its own
elements, so equal inputs and parts give equal bits. Imported only where there is a CUDA tensor; run with Triton 3.6.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def scale_rows(x, rstd, rows, columns, EPS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """rms_norm's rstd of every row, for when dx is not wanted."""
    r = tl.program_id(0)
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x + tl.cast(r, tl.int64) * columns + c, mask=c < columns, other=0.0).to(ACC)
        total += v * v
    tl.store(rstd + r, 1.0 / tl.sqrt(tl.sum(total, axis=0) / columns + EPS))


@triton.jit
def sum_runs(dy, x, mean, rstd, partial, runs, each, spots, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """group_norm: a program sums one run, of one channel of one sample; `each` channels share statistics."""
    run = tl.cast(tl.program_id(0), tl.int64)
    m = tl.load(mean + run // each)
    sums = tl.zeros([BLOCK], ACC)
    dots = tl.zeros([BLOCK], ACC)
    for start in range(0, spots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        g = tl.load(dy + run * spots + s, mask=s < spots, other=0.0).to(ACC)
        sums += g
        dots += g * (tl.load(x + run * spots + s, mask=s < spots, other=0.0).to(ACC) - m)
    tl.store(partial + run, tl.sum(sums, axis=0))
    tl.store(partial + runs + run, tl.sum(dots, axis=0) * tl.load(rstd + run // each))


@triton.jit
def put_runs(
    dy,
    x,
    weight,
    mean,
    rstd,
    partial,
    dx,
    runs,
    groups,
    each,
    spots,
    HAS_WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """group_norm's dx: a program writes one run, from the sums of all runs of its sample and group."""
    run = tl.cast(tl.program_id(0), tl.int64)
    group = run // each
    i = tl.arange(0, BLOCK_C)
    inside = i < each
    bias = tl.load(partial + group * each + i, mask=inside, other=0.0)
    dot = tl.load(partial + runs + group * each + i, mask=inside, other=0.0)
    invstd = tl.load(rstd + group)
    scale = invstd
    if HAS_WEIGHT:
        first = (group % groups) * each
        w = tl.load(weight + first + i, mask=inside, other=0.0).to(ACC)
        bias *= w
        dot *= w
        scale *= tl.load(weight + first + run % each).to(ACC)
    count = tl.cast(spots, ACC) * each
    offset = invstd * tl.sum(bias, axis=0) / count
    slope = invstd * invstd * tl.sum(dot, axis=0) / count
    m = tl.load(mean + group)
    for start in range(0, spots, BLOCK):
        s = start + tl.arange(0, BLOCK)
        g = tl.load(dy + run * spots + s, mask=s < spots, other=0.0).to(ACC)
        away = tl.load(x + run * spots + s, mask=s < spots, other=0.0).to(ACC) - m
        tl.store(dx + run * spots + s, scale * g - (slope * away + offset), mask=s < spots)
