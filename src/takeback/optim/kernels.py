"""The Triton kernels: one launch updates every chunk that a table lists, with the bits of torch's fused CUDA kernels.

In: a table of chunks, the flat gradients and states, and for Adam the powers of the betas (of torch.pow, whose bits are
those of the fused kernel; Triton's own differ). Out: parameters and states, updated in place. Needs triton: launch.py
imports this file only where there is one.

Which products are fused into which sums, and in what order, was read off the machine code of torch 2.11 (CUDA 13,
sm_90), where all arithmetic is in float32 for parameters in float32, bfloat16 and float16. Contraction is off
(`enable_fp_fusion=False`), every fused multiply-add is written out, and divisions and roots round to nearest without
flushing denormals, as nvcc compiles them. proof.py compares the bits before a kernel is used.
"""

# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,no-untyped-def,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

# A row of the table: the address of the parameter's chunk, its offsets in the flat gradient and in the flat states (in
# elements), how many elements it has, and the index of its parameter among the step counts.
COLUMNS: tl.constexpr = tl.constexpr(5)


@triton.jit
def _divide(x, y):
    return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


@triton.jit
def _root(x):
    return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _gradient(at, mask, factor, dtype: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr):
    """As a tensor of the parameter's dtype would hold it. Times -1, because -x is 0 - x in Triton: +0 of +0."""
    g = tl.load(at, mask)
    if SCALED:
        g = (g.to(tl.float32) * factor).to(at.dtype.element_ty)
    g = g.to(dtype).to(tl.float32)
    if MAXIMIZE:
        g = g * -1.0
    return g


@triton.jit
def _adam_block(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    mask,
    factor,
    decay,
    beta1,
    beta2,
    eps,
    step_size,
    root_correction,
    DECOUPLED: tl.constexpr,
    DECAYS: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    dtype = param.dtype.element_ty
    p = tl.load(param, mask).to(tl.float32)
    g = _gradient(grad, mask, factor, dtype, SCALED, MAXIMIZE)
    m = tl.load(exp_avg, mask).to(tl.float32)
    v = tl.load(exp_avg_sq, mask).to(tl.float32)
    if DECAYS:
        if DECOUPLED:
            p = tl.fma(p, decay * -1.0, p)  # decay is lr * weight_decay
        else:
            g = tl.fma(p, decay, g)
    m = tl.fma(beta1, m, tl.fma(beta1 * -1.0, g, g))
    square = g * g
    v = tl.fma(beta2, v, tl.fma(beta2 * -1.0, square, square))
    largest = v
    if AMSGRAD:
        largest = tl.load(max_exp_avg_sq, mask).to(tl.float32)
        largest = tl.where(largest < v, v, largest)  # std::max, of NaN too
        tl.store(max_exp_avg_sq, largest.to(dtype), mask)
    denominator = _divide(_root(largest), root_correction) + eps
    p = p - _divide(step_size * m, denominator)
    tl.store(param, p.to(dtype), mask)
    tl.store(exp_avg, m.to(dtype), mask)
    tl.store(exp_avg_sq, v.to(dtype), mask)


@triton.jit
def adam(
    table,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    powers,
    factor,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    DECOUPLED: tl.constexpr,
    DECAYS: tl.constexpr,
    AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0) * COLUMNS
    param = tl.load(row).to(tl.pointer_type(exp_avgs.dtype.element_ty))
    if ALIGNED:
        param = tl.multiple_of(param, 16)
    grads += tl.multiple_of(tl.load(row + 1), 8)  # 64 bytes of float64
    at = tl.multiple_of(tl.load(row + 2), 16)
    exp_avgs += at
    exp_avg_sqs += at
    if AMSGRAD:
        max_exp_avg_sqs += at
    count = tl.load(row + 3).to(tl.int32)
    power = powers + tl.load(row + 4) * 2
    scale = 1.0
    if SCALED:
        scale = tl.load(factor)
    step_size = _divide(lr, 1.0 - tl.load(power))
    root_correction = _root(1.0 - tl.load(power + 1))
    decay = weight_decay
    if DECOUPLED:
        decay = lr * weight_decay
    if count == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            i = start + tl.arange(0, BLOCK)
            _adam_block(
                param + i,
                grads + i,
                exp_avgs + i,
                exp_avg_sqs + i,
                max_exp_avg_sqs + i if AMSGRAD else exp_avg_sqs + i,
                None,
                scale,
                decay,
                beta1,
                beta2,
                eps,
                step_size,
                root_correction,
                DECOUPLED,
                DECAYS,
                AMSGRAD,
                MAXIMIZE,
                SCALED,
            )
    else:
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            _adam_block(
                param + i,
                grads + i,
                exp_avgs + i,
                exp_avg_sqs + i,
                max_exp_avg_sqs + i if AMSGRAD else exp_avg_sqs + i,
                i < count,
                scale,
                decay,
                beta1,
                beta2,
                eps,
                step_size,
                root_correction,
                DECOUPLED,
                DECAYS,
                AMSGRAD,
                MAXIMIZE,
                SCALED,
            )


@triton.jit
def _sgd_block(
    param,
    grad,
    momentum_buffer,
    mask,
    factor,
    lr,
    momentum,
    new_share,
    weight_decay,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    dtype = param.dtype.element_ty
    p = tl.load(param, mask).to(tl.float32)
    g = _gradient(grad, mask, factor, dtype, SCALED, MAXIMIZE)
    if DECAYS:
        g = tl.fma(p, weight_decay, g)
    if MOMENTUM:
        if FIRST:
            m = g
        else:
            m = tl.fma(g, new_share, tl.load(momentum_buffer, mask).to(tl.float32) * momentum)
        tl.store(momentum_buffer, m.to(dtype), mask)
        if NESTEROV:
            g = tl.fma(m, momentum, g)
        else:
            g = m
    tl.store(param, tl.fma(g, lr * -1.0, p).to(dtype), mask)


@triton.jit
def sgd(
    table,
    grads,
    states,
    factor,
    lr,
    momentum,
    dampening,
    weight_decay,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0) * COLUMNS
    param = tl.load(row).to(tl.pointer_type(states.dtype.element_ty))
    if ALIGNED:
        param = tl.multiple_of(param, 16)
    grads += tl.multiple_of(tl.load(row + 1), 8)  # 64 bytes of float64
    if MOMENTUM:
        states += tl.multiple_of(tl.load(row + 2), 16)
    count = tl.load(row + 3).to(tl.int32)
    scale = 1.0
    if SCALED:
        scale = tl.load(factor)
    new_share = 1.0 - dampening
    if count == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            i = start + tl.arange(0, BLOCK)
            _sgd_block(
                param + i,
                grads + i,
                states + i,
                None,
                scale,
                lr,
                momentum,
                new_share,
                weight_decay,
                MOMENTUM,
                FIRST,
                NESTEROV,
                DECAYS,
                MAXIMIZE,
                SCALED,
            )
    else:
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            _sgd_block(
                param + i,
                grads + i,
                states + i,
                i < count,
                scale,
                lr,
                momentum,
                new_share,
                weight_decay,
                MOMENTUM,
                FIRST,
                NESTEROV,
                DECAYS,
                MAXIMIZE,
                SCALED,
            )
