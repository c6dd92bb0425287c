"""What CUDA's kernels take from the allocator while they run, by what is known of their sources: fake tensors show only
what they give. A program traced without a GPU comes in, the same with estimates of scratch goes out.

An op that is not in the table is taken to take nothing; cuDNN's convolutions choose among algorithms, and what theirs
take is not known before they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from takeback.compiler.capture.cuda_attention import repeats
from takeback.compiler.program import Op, Program, Region, Scratch, Special
from takeback.compiler.schema import schema_of

_ROWS = 128  #: flash and cuDNN round the rows of a head up to this many
_PROCESSORS = 132  #: of an H200
_SORTED_FROM = 3072  #: rows: with fewer, the gradient of an embedding is summed without sorting


def with_scratch(program: Program) -> Program:
    """The program, each op with one request of what it is estimated to take."""
    ops = [replace(op, scratch=(Scratch(taken, 0, 1),)) if (taken := _taken(op)) else op for op in program.ops]
    return replace(program, ops=tuple(ops))


def _taken(op: Op) -> int:
    if isinstance(op.target, Special):
        return 0
    formula = _FORMULAS.get(schema_of(op.target).name)
    return formula(op) if formula is not None else 0


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _heads(op: Op) -> list[Region]:
    """The operands with heads: the gradient first, then query, key and value."""
    return [r for r in op.inputs if len(r.shape) == 4]


def _attention_backward(op: Op) -> int:
    """The gradient of the queries is summed in single precision; so are, of grouped queries, those of keys and values,
    in theirs."""
    _, query, key, value = _heads(op)[:4]
    batch, heads, rows, width = query.shape
    rows = _up(rows, _ROWS)
    sums = _up(_PROCESSORS, batch * heads) // (batch * heads) if repeats() else 1  # else threads add to the same one
    summed = batch * heads * rows * (sums * _up(width, 32) + 1) * 4
    if key.shape[1] == heads:
        return summed
    return summed + batch * heads * key.shape[2] * (key.shape[3] + value.shape[3]) * int(query.dtype.itemsize)


def _efficient_backward(op: Op) -> int:
    query = _heads(op)[1]
    batch, heads, rows, width = query.shape
    wide = 0 if query.dtype is torch.float32 else width
    return batch * heads * _up(rows, 32) * (wide + 1) * 4


def _embedding_backward(op: Op) -> int:
    """Indices and where they were, sorted with a copy of each, and partial sums of at most one row for each index."""
    grad, indices = op.inputs[:2]
    rows = indices.numel
    if rows <= _SORTED_FROM:
        return 0
    return rows * 8 * 6 + rows * grad.shape[-1] * 4


def _norm_backward(op: Op) -> int:
    """Partial sums of what the weight and the bias get."""
    grad, rows = op.inputs[0], op.inputs[2]
    width = grad.numel // max(1, rows.numel)
    return 2 * min(_up(rows.numel, 64) // 64, 256) * width * 4


_FORMULAS: dict[str, Callable[[Op], int]] = {
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedding_backward,
    "native_layer_norm_backward": _norm_backward,
}
