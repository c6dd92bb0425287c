"""The activated norm's kernels in Triton.

The kernels see a matrix. Channels last, it is [rows, channels]; else [samples, channels * spots], where `spots` columns
in a row belong to one channel. `..._planes` sum over [samples, channels, spots] instead: better where spots are many.

Memory contract: the tensor that is written may be the one that is read: a program loads its elements, then stores them,
and no other program touches them; Triton assumes nothing about aliases. Sums of a part go to `partial`, [k, parts,
columns], and are added in one order: no atomics, so equal inputs and parts give equal bits. Imported only where there
is a CUDA tensor; checked with Triton 3.6.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.language.extra import libdevice  # type: ignore[import-not-found, import-untyped, unused-ignore]

IDENTITY = tl.constexpr(0)
LEAKY_RELU = tl.constexpr(1)
ELU = tl.constexpr(2)
RELU = tl.constexpr(3)
SILU = tl.constexpr(4)


# -- one element -------------------------------------------------------------------------------------------------------


@triton.jit
def activate(z, ACT: tl.constexpr, PARAM: tl.constexpr):
    if ACT == LEAKY_RELU:
        z = tl.where(z > 0, z, z * PARAM)
    elif ACT == ELU:
        z = tl.where(z > 0, z, libdevice.expm1(z) * PARAM)
    elif ACT == RELU:
        z = tl.where(z < 0, 0.0, z)  # a NaN stays
    elif ACT == SILU:
        z = z / (1.0 + tl.exp(-z))
    return z


@triton.jit
def of_output(g, y, inverse, beta, ACT: tl.constexpr, PARAM: tl.constexpr, FLOOR: tl.constexpr):
    """dz and xhat, from y; `inverse` is 1 / gamma, or 0 where that would be noise."""
    z = y
    if ACT == LEAKY_RELU:
        z = tl.where(y > 0, y, y * (1.0 / PARAM))
        g = tl.where(y > 0, g, g * PARAM)
    elif ACT == ELU:
        under = y * (1.0 / PARAM)
        floor = under * 0.0 + FLOOR  # alone it would be a float32 to `<` and `where`: -1
        z = tl.where(y > 0, y, libdevice.log1p(tl.where(under < floor, floor, under)))
        g = tl.where(y <= 0, g * (y + PARAM), g)
    return g, (z - beta) * inverse


@triton.jit
def of_input(g, x, mean, invstd, gamma, beta, ACT: tl.constexpr, PARAM: tl.constexpr):
    """dz and xhat, from x."""
    xhat = (x - mean) * invstd
    z = gamma * xhat + beta
    if ACT == LEAKY_RELU:
        g = tl.where(z > 0, g, g * PARAM)
    elif ACT == ELU:
        g = tl.where(z <= 0, g * PARAM * tl.exp(z), g)
    elif ACT == RELU:
        g = tl.where(z <= 0, 0.0, g)  # as torch: with a NaN the gradient passes
    elif ACT == SILU:
        s = 1.0 / (1.0 + tl.exp(-z))
        g = g * s * (1.0 + z * (1.0 - s))
    return g, xhat


@triton.jit
def parameters(
    weight,
    bias,
    c,
    inside,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
):
    """gamma and beta of the channels c."""
    if HAS_WEIGHT:
        gamma = tl.load(weight + c, mask=inside, other=1.0).to(ACC)
        if ABSOLUTE:
            gamma = tl.abs(gamma) + EPS
    else:
        gamma = tl.full(c.shape, 1.0, ACC)
    if HAS_BIAS:
        beta = tl.load(bias + c, mask=inside, other=0.0).to(ACC)
    else:
        beta = tl.zeros(c.shape, ACC)
    return gamma, beta


@triton.jit
def invert(gamma, beta, RATIO: tl.constexpr, LEAST: tl.constexpr):
    """1 / gamma, or 0 where y does not hold enough of xhat."""
    usable = (tl.abs(gamma) >= LEAST) & (tl.abs(beta) <= RATIO * tl.abs(gamma))
    return tl.where(usable, 1.0 / tl.where(usable, gamma, 1.0), 0.0)


# -- statistics --------------------------------------------------------------------------------------------------------


@triton.jit
def store_moments(partial, part, parts, columns, c, inside, count, pivot, first, second):
    """count, mean and sum of squared distances of a part, of sums of distances from `pivot`."""
    away = first / tl.maximum(count, 1.0)
    to = partial + tl.cast(part, tl.int64) * columns + c
    plane = tl.cast(parts, tl.int64) * columns
    tl.store(to, count + 0.0 * away, mask=inside)
    tl.store(to + plane, pivot + away, mask=inside)
    tl.store(to + 2 * plane, tl.maximum(second - count * away * away, 0.0), mask=inside)


@triton.jit
def moments_columns(
    x,
    partial,
    rows,
    columns,
    rows_each,
    ACC: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A part is `rows_each` rows. Distances are taken from the rounded mean of its first tile, which also stands in for
    what is beyond the edge, at distance 0."""
    part = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < columns
    begin = part * rows_each
    if WIDE:
        begin = begin.to(tl.int64)
    end = tl.minimum(begin + rows_each, rows)
    r = begin + tl.arange(0, BLOCK_M)
    mask = (r < end)[:, None] & inside[None, :]
    tile = tl.load(x + r[:, None] * columns + c[None, :], mask=mask, other=0.0).to(ACC)
    seen = tl.cast(tl.maximum(tl.minimum(end - begin, BLOCK_M), 1), ACC)
    pivot = (tl.sum(tile, axis=0) / seen).to(x.dtype.element_ty)
    beyond = tl.broadcast_to(pivot[None, :], [BLOCK_M, BLOCK_N])
    pivot = pivot.to(ACC)
    first = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    second = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, rows_each, BLOCK_M):
        r = begin + start + tl.arange(0, BLOCK_M)
        mask = (r < end)[:, None] & inside[None, :]
        away = tl.load(x + r[:, None] * columns + c[None, :], mask=mask, other=beyond).to(ACC) - pivot[None, :]
        first += away
        second += away * away
    count = tl.cast(tl.maximum(end - begin, 0), ACC)
    sums = tl.sum(first, axis=0), tl.sum(second, axis=0)
    store_moments(partial, part, tl.num_programs(1), columns, c, inside, count, pivot, sums[0], sums[1])


@triton.jit
def moments_planes(
    x,
    partial,
    samples,
    channels,
    spots,
    chunks,
    tasks,
    ACC: tl.constexpr,
    WIDE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A task is BLOCK_N samples by one of the `chunks` of BLOCK_S spots; a part takes every `parts`-th task."""
    c = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    at, mask, seen = task_of(part, c, samples, channels, spots, chunks, WIDE, STEP, BLOCK_N, BLOCK_S)
    tile = tl.load(x + at, mask=mask, other=0.0).to(ACC)
    pivot = (tl.sum(tl.sum(tile, axis=1), axis=0) / tl.cast(tl.maximum(seen, 1), ACC)).to(x.dtype.element_ty)
    beyond = tl.zeros([BLOCK_N, BLOCK_S], x.dtype.element_ty) + pivot
    pivot = pivot.to(ACC)
    first = tl.zeros([BLOCK_N, BLOCK_S], ACC)
    second = tl.zeros([BLOCK_N, BLOCK_S], ACC)
    number = tl.cast(0, tl.int32)
    for task in range(part, tasks, parts):
        at, mask, seen = task_of(task, c, samples, channels, spots, chunks, WIDE, STEP, BLOCK_N, BLOCK_S)
        away = tl.load(x + at, mask=mask, other=beyond).to(ACC) - pivot
        first += away
        second += away * away
        number += seen
    sums = tl.sum(tl.sum(first, axis=1), axis=0), tl.sum(tl.sum(second, axis=1), axis=0)
    store_moments(partial, part, parts, channels, c, c >= 0, number.to(ACC), pivot, sums[0], sums[1])


@triton.jit
def task_of(
    task,
    c,
    samples,
    channels,
    spots,
    chunks,
    WIDE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Offsets and mask of a tile [BLOCK_N, BLOCK_S], and its number of elements.

    STEP divides spots: Triton sees that a channel of a sample starts at a multiple of it.
    """
    n = (task // chunks) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    s = (task % chunks) * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    mask = (n < samples) & (s < spots)
    height = tl.minimum(samples - (task // chunks) * BLOCK_N, BLOCK_N)
    width = tl.minimum(spots - (task % chunks) * BLOCK_S, BLOCK_S)
    if WIDE:
        n = n.to(tl.int64)
    return (n * channels + c) * (spots // STEP) * STEP + s, mask, height * width


@triton.jit
def combine_moments(
    partial,
    mean_to,
    variance_to,
    invstd_to,
    running_mean,
    running_var,
    parts,
    channels,
    spots,
    momentum_high,
    momentum_low,
    EPS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_VAR: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """mean, biased variance and 1 / sqrt(variance + eps) of the channels; running statistics move by `momentum`."""
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < channels
    plane = parts * channels * spots
    count = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    total = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, parts * spots, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < parts * spots)[:, None] & inside[None, :]
        at = partial + ((p // spots) * channels * spots + p % spots)[:, None] + c[None, :] * spots
        number = tl.load(at, mask=mask, other=0.0)
        count += number
        total += number * tl.load(at + plane, mask=mask, other=0.0)
    n = tl.maximum(tl.sum(count, axis=0), 1.0)
    mean = tl.sum(total, axis=0) / n
    spread = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, parts * spots, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < parts * spots)[:, None] & inside[None, :]
        at = partial + ((p // spots) * channels * spots + p % spots)[:, None] + c[None, :] * spots
        away = tl.load(at + plane, mask=mask, other=0.0) - mean[None, :]
        spread += tl.load(at + 2 * plane, mask=mask, other=0.0) + tl.load(at, mask=mask, other=0.0) * away * away
    variance = tl.sum(spread, axis=0) / n
    tl.store(mean_to + c, mean, mask=inside)
    tl.store(variance_to + c, variance, mask=inside)
    tl.store(invstd_to + c, 1.0 / tl.sqrt(variance + EPS), mask=inside)
    momentum = tl.cast(momentum_high, ACC) + tl.cast(momentum_low, ACC)
    if HAS_MEAN:
        old = tl.load(running_mean + c, mask=inside, other=0.0).to(ACC)
        tl.store(running_mean + c, old + momentum * (mean - old), mask=inside)
    if HAS_VAR:
        old = tl.load(running_var + c, mask=inside, other=0.0).to(ACC)
        unbiased = variance * (n / tl.maximum(n - 1.0, 1.0))
        tl.store(running_var + c, old + momentum * (unbiased - old), mask=inside)


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def normalise_columns(
    x,
    out,
    weight,
    bias,
    mean,
    invstd,
    rows,
    columns,
    spots,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    EPS: tl.constexpr,
    ACT: tl.constexpr,
    PARAM: tl.constexpr,
    ACC: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)  # of a flat grid: CUDA's second axis has room for 65535
    across = tl.cdiv(columns, BLOCK_N)
    r = (program // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = (program % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < columns
    of = c // spots
    mask = (r < rows)[:, None] & inside[None, :]
    if WIDE:
        r = r.to(tl.int64)
    at = r[:, None] * columns + c[None, :]
    gamma, beta = parameters(weight, bias, of, inside, HAS_WEIGHT, HAS_BIAS, ABSOLUTE, EPS, ACC)
    scale = gamma * tl.load(invstd + of, mask=inside, other=0.0)
    centre = tl.load(mean + of, mask=inside, other=0.0)
    v = tl.load(x + at, mask=mask, other=0.0).to(ACC)
    z = (v - centre[None, :]) * scale[None, :] + beta[None, :]
    tl.store(out + at, activate(z, ACT, PARAM), mask=mask)


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def sum_columns(
    dy,
    saved,
    weight,
    bias,
    mean,
    invstd,
    partial,
    rows,
    columns,
    spots,
    rows_each,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    EPS: tl.constexpr,
    ACT: tl.constexpr,
    PARAM: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    RATIO: tl.constexpr,
    LEAST: tl.constexpr,
    FLOOR: tl.constexpr,
    ACC: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A part's sums of dz and dz * xhat, over `rows_each` rows."""
    part = tl.program_id(1)
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < columns
    of = c // spots
    gamma, beta = parameters(weight, bias, of, inside, HAS_WEIGHT, HAS_BIAS, ABSOLUTE, EPS, ACC)
    if FROM_OUTPUT:
        inverse = invert(gamma, beta, RATIO, LEAST)[None, :]
    else:
        centre = tl.load(mean + of, mask=inside, other=0.0)[None, :]
        scale = tl.load(invstd + of, mask=inside, other=0.0)[None, :]
    begin = part * rows_each
    if WIDE:
        begin = begin.to(tl.int64)
    end = tl.minimum(begin + rows_each, rows)
    sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    dots = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, rows_each, BLOCK_M):
        r = begin + start + tl.arange(0, BLOCK_M)
        mask = (r < end)[:, None] & inside[None, :]
        at = r[:, None] * columns + c[None, :]
        g = tl.load(dy + at, mask=mask, other=0.0).to(ACC)
        v = tl.load(saved + at, mask=mask, other=0.0).to(ACC)
        if FROM_OUTPUT:
            dz, xhat = of_output(g, v, inverse, beta[None, :], ACT, PARAM, FLOOR)
        else:
            dz, _ = of_input(g, v, centre, scale, gamma[None, :], beta[None, :], ACT, PARAM)
            xhat = v - centre  # scaled once the sum is complete: one rounding less for each element
        sums += dz
        dots += dz * xhat
    total = tl.sum(dots, axis=0)
    if not FROM_OUTPUT:
        total *= tl.load(invstd + of, mask=inside, other=0.0)
    to = partial + tl.cast(part, tl.int64) * columns + c
    tl.store(to, tl.sum(sums, axis=0), mask=inside)
    tl.store(to + tl.cast(tl.num_programs(1), tl.int64) * columns, total, mask=inside)


@triton.jit
def sum_planes(
    dy,
    saved,
    weight,
    bias,
    mean,
    invstd,
    partial,
    samples,
    channels,
    spots,
    chunks,
    tasks,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    EPS: tl.constexpr,
    ACT: tl.constexpr,
    PARAM: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    RATIO: tl.constexpr,
    LEAST: tl.constexpr,
    FLOOR: tl.constexpr,
    ACC: tl.constexpr,
    WIDE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A part's sums of dz and dz * xhat; tasks as in `moments_planes`."""
    c = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    one = c + tl.zeros([1, 1], tl.int32)
    gamma, beta = parameters(weight, bias, one, one >= 0, HAS_WEIGHT, HAS_BIAS, ABSOLUTE, EPS, ACC)
    if FROM_OUTPUT:
        inverse = invert(gamma, beta, RATIO, LEAST)
    else:
        centre = tl.load(mean + c)
        scale = tl.load(invstd + c)
    sums = tl.zeros([BLOCK_N, BLOCK_S], ACC)
    dots = tl.zeros([BLOCK_N, BLOCK_S], ACC)
    for task in range(part, tasks, parts):
        at, mask, _ = task_of(task, c, samples, channels, spots, chunks, WIDE, STEP, BLOCK_N, BLOCK_S)
        g = tl.load(dy + at, mask=mask, other=0.0).to(ACC)
        v = tl.load(saved + at, mask=mask, other=0.0).to(ACC)
        if FROM_OUTPUT:
            dz, xhat = of_output(g, v, inverse, beta, ACT, PARAM, FLOOR)
        else:
            dz, _ = of_input(g, v, centre, scale, gamma, beta, ACT, PARAM)
            xhat = v - centre  # scaled once the sum is complete: one rounding less for each element
        sums += dz
        dots += dz * xhat
    total = tl.sum(tl.sum(dots, axis=1), axis=0)
    if not FROM_OUTPUT:
        total *= tl.load(invstd + c)
    to = partial + tl.cast(part, tl.int64) * channels + c
    tl.store(to, tl.sum(tl.sum(sums, axis=1), axis=0))
    tl.store(to + tl.cast(parts, tl.int64) * channels, total)


@triton.jit
def combine_sums(
    partial,
    sums,
    weight,
    of_weight,
    of_bias,
    parts,
    channels,
    spots,
    ABSOLUTE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """sums, [2, channels]: the parts added up; and the parameters' gradients that they are, in their dtypes.

    WEIGHT, BIAS: that gradient is not wanted (0), stored (1) or added onto what is there (2). ABSOLUTE: the weight's
    changes sign with the weight.
    """
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < channels
    first = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    second = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, parts * spots, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        mask = (p < parts * spots)[:, None] & inside[None, :]
        at = partial + ((p // spots) * channels * spots + p % spots)[:, None] + c[None, :] * spots
        first += tl.load(at, mask=mask, other=0.0)
        second += tl.load(at + parts * channels * spots, mask=mask, other=0.0)
    bias = tl.sum(first, axis=0)
    dots = tl.sum(second, axis=0)
    tl.store(sums + c, bias, mask=inside)
    tl.store(sums + channels + c, dots, mask=inside)
    if BIAS > 0:
        if BIAS == 2:
            bias += tl.load(of_bias + c, mask=inside, other=0.0).to(ACC)
        tl.store(of_bias + c, bias, mask=inside)
    if WEIGHT > 0:
        if ABSOLUTE:
            dots = tl.where(tl.load(weight + c, mask=inside, other=0.0) < 0, -dots, dots)
        if WEIGHT == 2:
            dots += tl.load(of_weight + c, mask=inside, other=0.0).to(ACC)
        tl.store(of_weight + c, dots, mask=inside)


@triton.jit(do_not_specialize=["count"])
def put_columns(
    dy,
    saved,
    out,
    weight,
    bias,
    mean,
    invstd,
    sums,
    rows,
    columns,
    spots,
    count,
    TRAINING: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    EPS: tl.constexpr,
    ACT: tl.constexpr,
    PARAM: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    RATIO: tl.constexpr,
    LEAST: tl.constexpr,
    FLOOR: tl.constexpr,
    ACC: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = gamma * invstd * (dz - sums[0] / count - xhat * sums[1] / count)."""
    program = tl.program_id(0)  # of a flat grid: CUDA's second axis has room for 65535
    across = tl.cdiv(columns, BLOCK_N)
    r = (program // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = (program % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < columns
    of = c // spots
    mask = (r < rows)[:, None] & inside[None, :]
    if WIDE:
        r = r.to(tl.int64)
    at = r[:, None] * columns + c[None, :]
    gamma, beta = parameters(weight, bias, of, inside, HAS_WEIGHT, HAS_BIAS, ABSOLUTE, EPS, ACC)
    scale = tl.load(invstd + of, mask=inside, other=0.0)
    g = tl.load(dy + at, mask=mask, other=0.0).to(ACC)
    v = tl.load(saved + at, mask=mask, other=0.0).to(ACC)
    if FROM_OUTPUT:
        inverse = invert(gamma, beta, RATIO, LEAST)
        dz, xhat = of_output(g, v, inverse[None, :], beta[None, :], ACT, PARAM, FLOOR)
    else:
        centre = tl.load(mean + of, mask=inside, other=0.0)
        dz, xhat = of_input(g, v, centre[None, :], scale[None, :], gamma[None, :], beta[None, :], ACT, PARAM)
    if TRAINING:
        share = 1.0 / tl.cast(count, ACC)
        offset = tl.load(sums + of, mask=inside, other=0.0) * share
        slope = tl.load(sums + columns // spots + of, mask=inside, other=0.0) * share
        dz = dz - offset[None, :] - xhat * slope[None, :]
    tl.store(out + at, dz * (gamma * scale)[None, :], mask=mask)


@triton.jit
def worst_ratio(
    weight,
    bias,
    out,
    channels,
    LEAST: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest |beta| / |gamma|, infinite where |gamma| is below LEAST or z goes below DEPTH; one program."""
    worst = tl.zeros([BLOCK], tl.float32)
    for start in range(0, channels, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < channels
        gamma, beta = parameters(weight, bias, c, inside, True, HAS_BIAS, ABSOLUTE, EPS, tl.float32)
        gamma = tl.abs(gamma)
        beyond = (gamma < LEAST) | (5.0 * gamma - beta - tl.log(gamma) > DEPTH)
        ratio = tl.where(beyond, float("inf"), tl.abs(beta) / gamma)
        ratio = tl.where(ratio == ratio, ratio, float("inf"))  # a NaN cannot be inverted either
        worst = tl.maximum(worst, tl.where(inside, ratio, 0.0))
    tl.store(out, tl.max(worst, axis=0))
