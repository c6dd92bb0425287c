"""Which ops may become part of a cluster: those that move memory and compute little, and whose effect is their results.

A product, a convolution, an attention keep eager's kernels, and so does whatever is not known here; an op that draws
random numbers keeps its numbers.
"""

from __future__ import annotations

import torch

from takeback.compiler.ownership.facts import COPY, EMPTY, FILL
from takeback.compiler.program import (
    Argument,
    Cluster,
    HyperScalar,
    Number,
    Op,
    Phase,
    Program,
    Region,
    Special,
)
from takeback.compiler.schema import schema_of

#: Ops beyond the pointwise ones, copies and fills.
_KNOWN = frozenset(
    (
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"),
        *("_fused_rms_norm", "_fused_rms_norm_backward"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "logsumexp"),
        *("sum", "mean", "amax", "amin", "var", "var_mean", "any", "all", "linalg_vector_norm"),
        *("cat", "stack", "slice_backward", "select_backward", "constant_pad_nd", "repeat", "flip", "roll"),
        *("nll_loss_forward", "nll_loss_backward", "mse_loss", "mse_loss_backward", "smooth_l1_loss"),
        *("smooth_l1_loss_backward", "huber_loss", "huber_loss_backward", "binary_cross_entropy_with_logits"),
        *("embedding", "gather", "index_select", "arange", "tril", "triu", "native_dropout_backward"),
        *("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "threshold_backward"),
        *("hardtanh_backward", "leaky_relu_backward", "elu_backward", "softplus_backward", "mish_backward"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "avg_pool2d"),
    )
)
#: Pointwise by torch's word, and not what a generated kernel is good at.
_NOT_GOOD = frozenset(("polygamma", "igamma", "igammac", "zeta"))
_NORMS_THAT_WRITE = frozenset(("native_batch_norm", "cudnn_batch_norm"))
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DTYPES = frozenset((*_FLOATS, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def why_not(op: Op, program: Program) -> str | None:
    """Why an op stays out of every cluster, in words; None if it may be part of one."""
    target = op.target
    if isinstance(target, Special | Cluster):
        return "it is no kernel of eager's"
    if op.phase is Phase.UPDATE:
        return "it is part of the update"
    if op.may_send_back:
        return "a value is read into Python, or decides about a shape"
    if target.namespace != "aten":
        return "it is an operator of somebody else's"
    name = schema_of(target).name
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "it draws random numbers, which stay eager's"
    if target in EMPTY:
        return "it makes nothing"
    pointwise = torch.Tag.pointwise in target.tags and name not in _NOT_GOOD
    if not (pointwise or target in COPY or target in FILL or name in _KNOWN):
        return "it computes more than it moves, or is not known"
    if op.mutates and not (name in _NORMS_THAT_WRITE and _writes_statistics(op, program)):
        return "it writes into bytes that are there already"
    if any(_reads_anew(arg) for arg in (*op.args, *op.kwargs.values())):
        return "a number is read anew in each step"
    # A backward gives nothing for what needs no gradient: a norm without weights, or with frozen ones.
    if not op.outputs or not all(isinstance(r, Region | None) for r in op.results):
        return "it gives something else than tensors"
    for region in (*op.inputs, *op.outputs):
        if region.dtype not in _DTYPES:
            return f"it has an operand of {region.dtype}"
        if program.buffers[region.buffer].device:
            return "an operand lies on another device"
        if region.numel == 0 and name not in _NORMS_THAT_WRITE and not name.startswith("cudnn"):
            return "an operand is empty"
    made = [r for r in op.outputs if r.buffer not in op.mutates]
    if any(r.offset or not r.packed for r in made):
        return "its result is a part of a buffer"
    return None


def _writes_statistics(op: Op, program: Program) -> bool:
    """A training norm, which writes its running statistics and nothing else. They are somebody's: what a cluster makes
    and writes again it would have to hand out half-way."""
    statistics = {r.buffer for r in op.args[3:5] if isinstance(r, Region)}
    borrowed = all(program.buffers[b].role.borrowed for b in op.mutates)
    return bool(op.args[5]) and borrowed and set(op.mutates) <= statistics


def _reads_anew(arg: Argument) -> bool:
    if isinstance(arg, tuple):
        return any(map(_reads_anew, arg))
    return isinstance(arg, HyperScalar | Number | torch.Generator)
