"""The norms' backward in Triton: sums of a part's rows or runs go to `partial`, and `combine` adds the parts in order.

`partial` is [2, parts, channels]: sums of dy, then of dy * (x - mean), with rstd in it where rstd is not the channel's.
Guaranteed: no atomics, every program writes its own elements, so equal inputs and parts give equal bits. Imported only
where there is a CUDA tensor; checked with Triton 3.6.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def walk_rows(
    dy,
    x,
    weight,
    mean,
    rstd,
    dx,
    partial,
    rows,
    columns,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SUMS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """layer_norm (CENTRED) or rms_norm with dx: a program takes every `parts`-th row, whole."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    inside = c < columns
    if HAS_WEIGHT:
        w = tl.load(weight + c, mask=inside, other=0.0).to(ACC)
    else:
        w = tl.full([BLOCK], 1.0, ACC)
    sums = tl.zeros([BLOCK], ACC)
    dots = tl.zeros([BLOCK], ACC)
    for r in range(part, rows, parts):
        at = tl.cast(r, tl.int64) * columns + c
        g = tl.load(dy + at, mask=inside, other=0.0).to(ACC)
        away = tl.load(x + at, mask=inside, other=0.0).to(ACC)
        if CENTRED:
            scale = tl.load(rstd + r)
            away = tl.where(inside, away - tl.load(mean + r), 0.0)
        else:
            scale = 1.0 / tl.sqrt(tl.sum(away * away, axis=0) / columns + EPS)
        if SUMS:
            sums += g
            dots += g * (away * scale)
        g = w * g
        value = scale * g - away * (scale * scale * scale * tl.sum(g * away, axis=0) / columns)
        if CENTRED:
            value -= scale * tl.sum(g, axis=0) / columns
        tl.store(dx + at, value, mask=inside)
    if SUMS:
        to = partial + tl.cast(part, tl.int64) * columns + c
        tl.store(to, sums, mask=inside)
        tl.store(to + tl.cast(parts, tl.int64) * columns, dots, mask=inside)


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
def sum_columns(
    dy,
    x,
    mean,
    rstd,
    partial,
    rows,
    columns,
    rows_each,
    OF_ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A part is `rows_each` rows. Statistics are of rows (mean only if CENTRED, and rstd), or columns' means."""
    part = tl.cast(tl.program_id(1), tl.int64)
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < columns
    sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    dots = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    if not OF_ROWS:
        m = tl.load(mean + c, mask=inside, other=0.0)[None, :]
    for start in range(0, rows_each, BLOCK_M):
        r = part * rows_each + start + tl.arange(0, BLOCK_M)
        mask = (r < rows)[:, None] & inside[None, :]
        at = r[:, None] * columns + c[None, :]
        g = tl.load(dy + at, mask=mask, other=0.0).to(ACC)
        v = tl.load(x + at, mask=mask, other=0.0).to(ACC)
        if OF_ROWS:
            if CENTRED:
                v -= tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
            v *= tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
        else:
            v -= m
        sums += g
        dots += g * v
    to = partial + part * columns + c
    tl.store(to, tl.sum(sums, axis=0), mask=inside)
    tl.store(to + tl.cast(tl.num_programs(1), tl.int64) * columns, tl.sum(dots, axis=0), mask=inside)


@triton.jit
def sum_channels(
    dy,
    x,
    mean,
    partial,
    samples,
    channels,
    spots,
    chunks,
    tasks,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """batch_norm of N × C × S: a task is BLOCK_N samples by one of the `chunks` of BLOCK_S spots."""
    c = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    m = tl.load(mean + c)
    sums = tl.zeros([BLOCK_N, BLOCK_S], ACC)
    dots = tl.zeros([BLOCK_N, BLOCK_S], ACC)
    for task in range(part, tasks, parts):
        n = (task // chunks) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        s = (task % chunks) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
        mask = (n < samples) & (s < spots)
        at = (n.to(tl.int64) * channels + c) * spots + s
        g = tl.load(dy + at, mask=mask, other=0.0).to(ACC)
        sums += g
        dots += g * (tl.load(x + at, mask=mask, other=0.0).to(ACC) - m)
    to = partial + tl.cast(part, tl.int64) * channels + c
    tl.store(to, tl.sum(tl.sum(sums, axis=1), axis=0))
    tl.store(to + tl.cast(parts, tl.int64) * channels, tl.sum(tl.sum(dots, axis=1), axis=0))


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


@triton.jit
def combine(
    partial,
    rstd,
    sums,
    weight_slice,
    bias_slice,
    parts,
    channels,
    SCALED: tl.constexpr,
    KEEP: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the parts, and stores (1) or adds (2) a gradient into its slice; 0 leaves it. SCALED: times rstd.

    KEEP: the sums themselves go to `sums`, [2, channels].
    """
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < channels
    first = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    second = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, parts, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < parts)[:, None] & inside[None, :]
        at = p.to(tl.int64)[:, None] * channels + c[None, :]
        first += tl.load(partial + at, mask=mask, other=0.0)
        second += tl.load(partial + tl.cast(parts, tl.int64) * channels + at, mask=mask, other=0.0)
    bias = tl.sum(first, axis=0)
    weight = tl.sum(second, axis=0)
    if KEEP:
        tl.store(sums + c, bias, mask=inside)
        tl.store(sums + channels + c, weight, mask=inside)
    if WEIGHT > 0:
        if SCALED:
            weight *= tl.load(rstd + c, mask=inside, other=0.0)
        if WEIGHT == 2:
            weight += tl.load(weight_slice + c, mask=inside, other=0.0).to(ACC)
        tl.store(weight_slice + c, weight, mask=inside)
    if BIAS > 0:
        if BIAS == 2:
            bias += tl.load(bias_slice + c, mask=inside, other=0.0).to(ACC)
        tl.store(bias_slice + c, bias, mask=inside)


@triton.jit
def put_columns(
    dy,
    x,
    weight,
    mean,
    rstd,
    sums,
    dx,
    rows,
    columns,
    HAS_WEIGHT: tl.constexpr,
    TRAINING: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """batch_norm's dx where channels are columns."""
    r = tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < columns
    mask = (r < rows)[:, None] & inside[None, :]
    at = r[:, None] * columns + c[None, :]
    invstd = tl.load(rstd + c, mask=inside, other=0.0)
    scale = invstd
    if HAS_WEIGHT:
        scale *= tl.load(weight + c, mask=inside, other=0.0).to(ACC)
    value = scale[None, :] * tl.load(dy + at, mask=mask, other=0.0).to(ACC)
    if TRAINING:
        offset = scale * tl.load(sums + c, mask=inside, other=0.0) / rows
        slope = scale * invstd * invstd * tl.load(sums + columns + c, mask=inside, other=0.0) / rows
        away = tl.load(x + at, mask=mask, other=0.0).to(ACC) - tl.load(mean + c, mask=inside, other=0.0)[None, :]
        value -= slope[None, :] * away + offset[None, :]
    tl.store(dx + at, value, mask=mask)


@triton.jit
def put_channels(
    dy,
    x,
    weight,
    mean,
    rstd,
    sums,
    dx,
    samples,
    channels,
    spots,
    chunks,
    tasks,
    HAS_WEIGHT: tl.constexpr,
    TRAINING: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """batch_norm's dx of N × C × S; tasks as in `sum_channels`."""
    c = tl.program_id(0)
    invstd = tl.load(rstd + c)
    scale = invstd
    if HAS_WEIGHT:
        scale *= tl.load(weight + c).to(ACC)
    if TRAINING:
        m = tl.load(mean + c)
        count = tl.cast(samples, ACC) * spots
        offset = scale * tl.load(sums + c) / count
        slope = scale * invstd * invstd * tl.load(sums + channels + c) / count
    for task in range(tl.program_id(1), tasks, tl.num_programs(1)):
        n = (task // chunks) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        s = (task % chunks) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
        mask = (n < samples) & (s < spots)
        at = (n.to(tl.int64) * channels + c) * spots + s
        value = scale * tl.load(dy + at, mask=mask, other=0.0).to(ACC)
        if TRAINING:
            value -= slope * (tl.load(x + at, mask=mask, other=0.0).to(ACC) - m) + offset
        tl.store(dx + at, value, mask=mask)
