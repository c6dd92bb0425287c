"""Kernels along rows in Triton: RMSNorm, the backward of both row norms from x or y, SwiGLU.

Memory contract: what is written may be what is read: a program loads an element before it stores it, and no other
program touches it. No atomics: parts are added in one order. Imported only where there is a CUDA tensor; checked with
Triton 3.6.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def rms_norm(
    x, out, weight, rstd, columns, EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    """A program takes a row."""
    row = tl.program_id(0)
    start_of_row = tl.cast(row, tl.int64) * columns
    total = tl.zeros([BLOCK], ACC)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x + start_of_row + c, mask=c < columns, other=0.0).to(ACC)
        total += v * v
    scale = 1.0 / tl.sqrt(tl.sum(total, axis=0) / columns + EPS)
    tl.store(rstd + row, scale)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x + start_of_row + c, mask=c < columns, other=0.0).to(ACC) * scale
        if HAS_WEIGHT:
            v *= tl.load(weight + c, mask=c < columns, other=0.0).to(ACC)
        tl.store(out + start_of_row + c, v, mask=c < columns)


@triton.jit
def columns_of(
    weight,
    bias,
    c,
    inside,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    RATIO: tl.constexpr,
    LEAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """weight, what is subtracted from y, and what that is multiplied by: 1 / weight, or 0 where that is noise."""
    w = tl.full(c.shape, 1.0, ACC)
    b = tl.zeros(c.shape, ACC)
    inverse = tl.full(c.shape, 1.0, ACC)
    if HAS_WEIGHT:
        w = tl.load(weight + c, mask=inside, other=1.0).to(ACC)
    if FROM_OUTPUT:
        if HAS_BIAS:
            b = tl.load(bias + c, mask=inside, other=0.0).to(ACC)
        if HAS_WEIGHT:
            usable = (tl.abs(w) >= LEAST) & (tl.abs(b) <= RATIO * tl.abs(w))
            inverse = tl.where(usable, 1.0 / tl.where(usable, w, 1.0), 0.0)
    return w, b, inverse


@triton.jit
def walk_rows(
    dy,
    saved,
    out,
    weight,
    bias,
    mean,
    rstd,
    partial,
    rows,
    columns,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    RATIO: tl.constexpr,
    LEAST: tl.constexpr,
    OWN_SCALE: tl.constexpr,
    EPS: tl.constexpr,
    SUMS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes every `parts`-th row, whole, and sums dy and dy * xhat of its rows (SUMS).

    OWN_SCALE: rstd is not given, and computed from x (of rms_norm).
    """
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    inside = c < columns
    w, b, inverse = columns_of(weight, bias, c, inside, HAS_WEIGHT, HAS_BIAS, FROM_OUTPUT, RATIO, LEAST, ACC)
    sums = tl.zeros([BLOCK], ACC)
    dots = tl.zeros([BLOCK], ACC)
    for r in range(part, rows, parts):
        at = tl.cast(r, tl.int64) * columns + c
        g = tl.load(dy + at, mask=inside, other=0.0).to(ACC)
        v = tl.load(saved + at, mask=inside, other=0.0).to(ACC)
        if OWN_SCALE:
            scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / columns + EPS)
        else:
            scale = tl.load(rstd + r)
        if FROM_OUTPUT:
            xhat = (v - b) * inverse
        elif CENTRED:
            xhat = (v - tl.load(mean + r)) * scale
        else:
            xhat = v * scale
        xhat = tl.where(inside, xhat, 0.0)
        if SUMS:
            sums += g
            dots += g * xhat
        g = g * w
        value = g - xhat * (tl.sum(g * xhat, axis=0) / columns)
        if CENTRED:
            value -= tl.sum(tl.where(inside, g, 0.0), axis=0) / columns
        tl.store(out + at, scale * value, mask=inside)
    if SUMS:
        to = partial + tl.cast(part, tl.int64) * columns + c
        tl.store(to, sums, mask=inside)
        tl.store(to + tl.cast(parts, tl.int64) * columns, dots, mask=inside)


@triton.jit
def sum_rows(
    dy,
    saved,
    weight,
    bias,
    mean,
    rstd,
    partial,
    rows,
    columns,
    rows_each,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    RATIO: tl.constexpr,
    LEAST: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums of dy and dy * xhat over `rows_each` rows: where dx is not wanted, or rows do not fit into registers."""
    part = tl.cast(tl.program_id(1), tl.int64)
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = c < columns
    _, b, inverse = columns_of(weight, bias, c, inside, HAS_WEIGHT, HAS_BIAS, FROM_OUTPUT, RATIO, LEAST, ACC)
    sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    dots = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, rows_each, BLOCK_M):
        r = part * rows_each + start + tl.arange(0, BLOCK_M)
        mask = (r < rows)[:, None] & inside[None, :]
        at = r[:, None] * columns + c[None, :]
        g = tl.load(dy + at, mask=mask, other=0.0).to(ACC)
        v = tl.load(saved + at, mask=mask, other=0.0).to(ACC)
        if FROM_OUTPUT:
            v = (v - b[None, :]) * inverse[None, :]
        else:
            if CENTRED:
                v -= tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
            v *= tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
        sums += g
        dots += g * tl.where(mask, v, 0.0)
    to = partial + part * columns + c
    tl.store(to, tl.sum(sums, axis=0), mask=inside)
    tl.store(to + tl.cast(tl.num_programs(1), tl.int64) * columns, tl.sum(dots, axis=0), mask=inside)


@triton.jit
def put_long_rows(
    dy,
    saved,
    out,
    weight,
    bias,
    mean,
    rstd,
    columns,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    RATIO: tl.constexpr,
    LEAST: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out of one row, read twice: for its two means, then element by element."""
    row = tl.program_id(0)
    start_of_row = tl.cast(row, tl.int64) * columns
    scale = tl.load(rstd + row)
    centre = tl.cast(0.0, ACC)
    if CENTRED and not FROM_OUTPUT:
        centre = tl.load(mean + row)
    sums = tl.zeros([BLOCK], ACC)
    dots = tl.zeros([BLOCK], ACC)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < columns
        w, b, inverse = columns_of(weight, bias, c, inside, HAS_WEIGHT, HAS_BIAS, FROM_OUTPUT, RATIO, LEAST, ACC)
        g = tl.load(dy + start_of_row + c, mask=inside, other=0.0).to(ACC) * w
        v = tl.load(saved + start_of_row + c, mask=inside, other=0.0).to(ACC)
        xhat = (v - b) * inverse if FROM_OUTPUT else (v - centre) * scale
        sums += tl.where(inside, g, 0.0)
        dots += tl.where(inside, g * xhat, 0.0)
    offset = tl.sum(sums, axis=0) / columns if CENTRED else tl.cast(0.0, ACC)
    slope = tl.sum(dots, axis=0) / columns
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < columns
        w, b, inverse = columns_of(weight, bias, c, inside, HAS_WEIGHT, HAS_BIAS, FROM_OUTPUT, RATIO, LEAST, ACC)
        g = tl.load(dy + start_of_row + c, mask=inside, other=0.0).to(ACC) * w
        v = tl.load(saved + start_of_row + c, mask=inside, other=0.0).to(ACC)
        xhat = (v - b) * inverse if FROM_OUTPUT else (v - centre) * scale
        tl.store(out + start_of_row + c, scale * (g - offset - xhat * slope), mask=inside)


@triton.jit
def swiglu(
    gate,
    up,
    out,
    rows,
    columns,
    gate_step,
    up_step,
    out_step,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows lie `..._step` elements apart."""
    r = tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (r < rows) & (c < columns)
    g = tl.load(gate + r * gate_step + c, mask=mask, other=0.0).to(ACC)
    u = tl.load(up + r * up_step + c, mask=mask, other=0.0).to(ACC)
    tl.store(out + r * out_step + c, g / (1.0 + tl.exp(-g)) * u, mask=mask)


@triton.jit
def swiglu_backward(
    dy,
    gate,
    up,
    dgate,
    dup,
    rows,
    columns,
    dy_step,
    gate_step,
    up_step,
    dgate_step,
    dup_step,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    r = tl.cast(tl.program_id(0), tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (r < rows) & (c < columns)
    d = tl.load(dy + r * dy_step + c, mask=mask, other=0.0).to(ACC)
    g = tl.load(gate + r * gate_step + c, mask=mask, other=0.0).to(ACC)
    u = tl.load(up + r * up_step + c, mask=mask, other=0.0).to(ACC)
    s = 1.0 / (1.0 + tl.exp(-g))
    tl.store(dgate + r * dgate_step + c, d * u * s * (1.0 + g * (1.0 - s)), mask=mask)
    tl.store(dup + r * dup_step + c, d * g * s, mask=mask)
