"""Forms in which ops of a cluster are traced for Inductor, where its own would move more memory than the cluster needs
(benchmarks/kernel_bytes.py counts what kernels move).

The gradient of a cross-entropy with respect to its logits is a softmax, less one in the target's place. Inductor writes
the ones into zeros as large as the logits in single precision, and adds each row up again; here both are computed where
they are used. Where these gradients are padded, the padding is put beside them: a kernel over other columns than those
that were added up would have to read them again.

What a cluster gives and reads itself, Inductor writes before it reads it. Where a norm's backward only asks where a
rebuilt activation is zero, that is a pass over memory more: such results are traced a second time, for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from takeback.compiler.program import BufferId, Cluster, Op, Region, Special, renaming, show_geometry
from takeback.compiler.run.cluster_ops import Call, plainly, run_ops
from takeback.compiler.run.norm_forms import batch_norm_backward
from takeback.compiler.run.sum_forms import adds_up_rows, common_shapes, in_common_shape, sum_of_rows
from takeback.compiler.schema import schema_of

aten = torch.ops.aten

#: Norms whose backward adds up over places far apart, so that it goes over its operands twice.
_TWICE = frozenset(("native_batch_norm_backward", "cudnn_batch_norm_backward", "native_group_norm_backward"))
_NORMS = frozenset(("native_batch_norm",))  #: in its form for evaluation, which is a factor and a summand
#: How many reads, and how many operations, Inductor may compute again for another reader; its own bounds are meant for
#: whole models: with them, the sum of four gradients is written before a norm's backward reads it.
INLINED = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 32, "realize_opcount_threshold": 200}
_MEAN = 1  #: torch's number for reduction="mean"


def forms(cluster: Cluster) -> Call:
    """What gives the results of an op under the tracer, for one run over the cluster's ops."""
    sums: dict[BufferId, torch.Tensor] = {}  # of each row, where they are known
    whole = {r.buffer: r for op in cluster.ops for r in op.outputs}
    by_rows, shapes, leaving = adds_up_rows(cluster), common_shapes(cluster), {r.buffer for r in cluster.results}

    def call(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert not isinstance(op.target, Cluster)
        name = schema_of(op.target).name
        if name == "nll_loss_backward" and args[1].dim() == 2:
            made, row = _ones_less(*args)
            sums[op.outputs[0].buffer] = row
            return made
        if name == "_log_softmax_backward_data" and args[1].dim() == 2 and args[2] in (1, -1):
            given = op.args[0]
            if isinstance(given, Region) and given.buffer in sums and whole[given.buffer].same_place(given):
                return (args[0] - torch.exp(args[1]) * sums[given.buffer]).to(args[3])
        if name == "constant_pad_nd" and by_rows and args[0].dim() == 2 and _is_at_the_end(args[1]):
            return torch.cat((args[0], args[0].new_full((args[0].shape[0], args[1][1]), args[2])), 1)
        found: Any = in_common_shape(op, shapes, args, kwargs)
        if name == "sum" and not by_rows and op.inputs[0].buffer in whole:
            found = sum_of_rows(op, whole[op.inputs[0].buffer], shapes, args, kwargs)
        elif name == "native_batch_norm_backward" and not by_rows and op.inputs[0].buffer in leaving:
            found = batch_norm_backward(op, args)
        if found is not None:
            return found
        return plainly(op, args, kwargs)

    return call


def _is_at_the_end(pads: Sequence[int]) -> bool:
    """Whether columns are added, and after the others."""
    return len(pads) >= 2 and pads[0] == 0 and pads[1] > 0 and not any(pads[2:])


def _ones_less(
    grad: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """nll_loss_backward as a choice in each place, and the sum of each row, which is its one number."""
    target = target.unsqueeze(1)
    there = target != ignored
    row = -(grad / total if reduction == _MEAN else grad)
    row = row.unsqueeze(1) if row.dim() else row
    if weight is not None:
        row = row * weight[torch.where(there, target, 0)]
    row = torch.where(there, row, 0).to(log_probabilities.dtype)
    places = torch.arange(log_probabilities.shape[1], device=target.device)
    return torch.where(places == target, row, 0), row


def traced(cluster: Cluster, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a cluster under the tracer, in whatever strides they come."""
    cluster = without_repeats(cluster)
    found = run_ops(cluster, operands, forms(cluster))
    for number in read_inside(cluster):
        part = _leading_to(cluster, number)
        [found[number]] = run_ops(part, operands, forms(part))
    return found


def without_repeats(cluster: Cluster) -> Cluster:
    """The cluster with each op once that does the same with the same: parts of it may have been made again for several
    of its readers."""
    leaving, first = {r.buffer for r in cluster.results}, dict[str, Op]()
    instead: dict[BufferId, BufferId] = {}
    ops: list[Op] = []
    for op in cluster.ops:
        op = op.map(reads=renaming(instead))
        assert not isinstance(op.target, Special)
        key = f"{op.target} {show_geometry(op.args)} {show_geometry(tuple(sorted(op.kwargs.items())))}"
        known = first.get(key)
        pure = not op.mutates and torch.Tag.nondeterministic_seeded not in op.target.tags
        alike = known is not None and all(a.same_place(b) for a, b in zip(op.outputs, known.outputs, strict=True))
        if known is not None and alike and pure and leaving.isdisjoint(r.buffer for r in op.outputs):
            instead |= {r.buffer: k.buffer for r, k in zip(op.outputs, known.outputs, strict=True)}
            continue
        if op.mutates:
            first.clear()  # what was read before is another value now
        first.setdefault(key, op)
        ops.append(op)
    return replace(cluster, ops=tuple(ops))


def read_inside(cluster: Cluster) -> list[int]:
    """The results that are better made twice: activations that the norm's backward reads in the cluster."""
    if cluster.writes or not any(_name(op) in _TWICE for op in cluster.ops):
        return []
    leaving = {r.buffer for r in cluster.results}
    found: list[int] = []
    for number, region in enumerate(cluster.results):
        readers = [op for op in cluster.ops if any(r.buffer == region.buffer for r in op.inputs)]
        inside = all(r.buffer not in leaving for op in readers for r in op.outputs)
        if readers and inside and all(map(_is_pointwise, _leading_to(cluster, number).ops)):
            found.append(number)
    return found


def _leading_to(cluster: Cluster, number: int) -> Cluster:
    """The part of a cluster that makes one of its results."""
    needed, ops = {cluster.results[number].buffer}, list[Op]()
    for op in reversed(cluster.ops):
        if any(r.buffer in needed for r in op.outputs):
            ops.insert(0, op)
            needed |= {r.buffer for r in op.inputs}
    return replace(cluster, ops=tuple(ops), results=(cluster.results[number],), writes=())


def _is_pointwise(op: Op) -> bool:
    assert not isinstance(op.target, Cluster | Special)
    if _name(op) in _NORMS:
        return not op.args[5]
    return torch.Tag.pointwise in op.target.tags or _name(op) in ("ones_like", "_to_copy")


def _name(op: Op) -> str:
    assert not isinstance(op.target, Cluster)
    return schema_of(op.target).name
