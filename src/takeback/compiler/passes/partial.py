"""What is run to make the large results of a cluster once more: only the ops that lead to them, on what is kept anyway.

Small results, such as the statistics of a norm, are read and not made again; a batch norm is then run in its form for
evaluation, which writes nothing, and a layer norm as what it does to each element.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from takeback.compiler.cluster import clustered
from takeback.compiler.program import Argument, Buffer, BufferId, Cluster, Op, OpOverload, Region, Special
from takeback.compiler.schema import schema_of

aten = torch.ops.aten

_SMALL = 16  #: a result that is so many times smaller than the largest one is kept
_BATCH_NORMS = frozenset(("native_batch_norm", "cudnn_batch_norm"))

_known: weakref.WeakKeyDictionary[Cluster, Op | None] = weakref.WeakKeyDictionary()


def partial(op: Op) -> Op | None:
    """The op that makes the large results of a cluster again; None where there is none without another effect."""
    cluster = op.target
    assert isinstance(cluster, Cluster)
    if cluster not in _known:
        _known[cluster] = _local(cluster)
    local = _known[cluster]
    if local is None:
        return None
    return _outside(local, op)


def _outside(local: Op, op: Op) -> Op:
    """An op over a cluster's own buffers, over those of the program that the cluster stands in."""
    cluster = op.target
    assert isinstance(cluster, Cluster)
    operands = {inner.buffer: region for inner, region in zip(cluster.inputs, op.inputs, strict=True)}
    results = {inner.buffer: region.buffer for inner, region in zip(cluster.results, op.outputs, strict=True)}

    def out(region: Region) -> Region:
        operand = operands.get(region.buffer)
        return operand if operand is not None else replace(region, buffer=results[region.buffer])

    return replace(local, phase=op.phase, site=op.site).map(reads=out, writes=out)


def making(op: Op, wanted: BufferId, there: Collection[BufferId]) -> Op | None:
    """The op that makes one result of a cluster again, where those of its other results are read that are `there`;
    None where there is none without another effect."""
    cluster = op.target
    assert isinstance(cluster, Cluster)
    outer = {inner.buffer: region.buffer for inner, region in zip(cluster.results, op.outputs, strict=True)}
    [mine] = [inner for inner, b in outer.items() if b == wanted]
    buffers = dict(cluster.buffers)
    ops = _leading_to({mine}, {inner for inner, b in outer.items() if b in there} - {mine}, cluster, buffers)
    local = _one(ops, buffers, {mine})
    return None if local is None else _outside(local, op)


def _local(cluster: Cluster) -> Op | None:
    """The same over the cluster's own buffers: each of its operands and results is whole there."""
    sizes = {r.buffer: cluster.buffers[r.buffer].size_bytes for r in cluster.results}
    if not sizes:
        return None
    large = {b for b, size in sizes.items() if size * _SMALL >= max(sizes.values())}
    buffers = dict(cluster.buffers)
    return _one(_leading_to(large, sizes.keys() - large, cluster, buffers), buffers, large)


def _one(ops: list[Op] | None, buffers: dict[BufferId, Buffer], wanted: Collection[BufferId]) -> Op | None:
    """Some ops as one: an op of eager's by itself as it is, others as a cluster, whose kernel is generated."""
    if not ops:
        return None
    only = ops[0]
    if len(ops) == 1 and not isinstance(only.target, Special) and only.target.namespace == "aten":
        return only if all(r.buffer in wanted for r in only.outputs) else None
    return clustered(tuple(ops), buffers, wanted.__contains__)


def _leading_to(
    wanted: Iterable[BufferId], kept: Iterable[BufferId], cluster: Cluster, buffers: dict[BufferId, Buffer]
) -> list[Op] | None:
    needed, there = set(wanted), set(kept)
    found: list[Op] = []
    for op in reversed(cluster.ops):
        if not any(r.buffer in needed for r in op.outputs):
            continue
        ops = [op]
        if not isinstance(op.target, Cluster) and schema_of(op.target).name in _BATCH_NORMS and op.args[5]:
            statistics = [r for r in op.outputs[1:3] if r.buffer in there]
            if len(statistics) < 2 or any(r.buffer in needed for r in op.outputs[1:]):
                return None
            ops = rebuilt_norm(op, buffers)
        elif op.mutates:
            return None
        elif is_layer_norm(op) and not any(r.buffer in needed for r in op.outputs[1:]):
            ops = rebuilt_layer_norm(op, there, buffers) or ops
        found = ops + found
        inside = {r.buffer for one in ops for r in one.outputs}
        needed |= {r.buffer for one in ops for r in one.inputs if r.buffer not in there and r.buffer not in inside}
    return found


def is_layer_norm(op: Op) -> bool:
    return op.target is aten.native_layer_norm.default


def rebuilt_layer_norm(op: Op, there: Collection[BufferId], buffers: dict[BufferId, Buffer]) -> list[Op] | None:
    """A layer norm's first result from the mean and inverse deviation that it gave, where these are `there`: a kernel
    that does so adds nothing up, and can be one with a kernel that does. Rounding is not the norm's own. None where it
    would have to be told how: in half precision statistics are wider than what they are of."""
    x, _, weight, bias = op.args[:4]
    out, mean, invstd = op.outputs
    assert isinstance(x, Region)
    if not {mean.buffer, invstd.buffer} <= set(there) or not x.dtype == out.dtype == mean.dtype:
        return None
    steps: list[tuple[OpOverload, Argument]] = [(aten.sub.Tensor, mean), (aten.mul.Tensor, invstd)]
    steps += [(aten.mul.Tensor, weight)] if weight is not None else []
    steps += [(aten.add.Tensor, bias)] if bias is not None else []
    ops: list[Op] = []
    value: Region = x
    for number, (target, other) in enumerate(steps, 1):
        made = out
        if number < len(steps):
            ident = BufferId(max(buffers) + 1)
            buffers[ident] = replace(buffers[out.buffer], id=ident, name="")
            made = replace(out, buffer=ident)
        ops.append(replace(op, target=target, args=(value, other), kwargs={}, results=(made,), scratch=()))
        value = made
    return ops


def rebuilt_norm(op: Op, buffers: dict[BufferId, Buffer]) -> list[Op]:
    """A training batch norm's first result from the mean and inverse deviation that it gave: in its form for
    evaluation, with invstd * weight for a weight, 1 for a variance and 0 for eps."""
    x, weight, bias = op.args[:3]
    out, mean, invstd = op.results[:3]
    assert isinstance(invstd, Region)
    plain = replace(op, mutates=(), kwargs={}, scratch=(), grad_mode=False)

    def new(shape: tuple[int, ...]) -> Region:
        ident = BufferId(max(buffers) + 1)
        size = invstd.dtype.itemsize * (shape[0] if shape else 1)
        buffers[ident] = replace(buffers[invstd.buffer], id=ident, size_bytes=size, name="")
        return Region(ident, invstd.dtype, shape, (1,), 0)

    ones = new(invstd.shape)
    ops = [replace(plain, target=aten.ones_like.default, args=(invstd,), results=(ones,))]
    scale: Argument = invstd
    if isinstance(weight, Region):
        scale = new(invstd.shape)
        ops.append(replace(plain, target=aten.mul.Tensor, args=(invstd, weight), results=(scale,)))
    args = (x, scale, bias, mean, ones, False, 0.0, 0.0)
    results = (out, new((0,)), new((0,)))
    ops.append(replace(plain, target=aten.native_batch_norm.default, args=args, results=results))
    return ops
