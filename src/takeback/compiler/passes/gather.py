"""Lets a cluster, or an op that could be in one, run in an earlier cluster that reads or makes much of what it reads,
where all of that is there when the earlier one runs.

      du = cluster(dy, g)              silu(g) * dy           du, dg = cluster(dy, g, u)
      dw = mm(x, du)                                          dw     = mm(x, du)
      dg = cluster(dy, u, g)           its other factor       dh     = mm(dg, w)
      dh = mm(dg, w)

Eager's order has a product between them. What both read is read once, and dies earlier; what only the later one reads
of the earlier one has no bytes any more. The later one's results are made earlier, which is done nowhere where the
planned peak would grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from takeback.compiler.cluster import clustered, expanded
from takeback.compiler.geometry import path
from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.fuse import MOST_OPS
from takeback.compiler.passes.fusible import why_not
from takeback.compiler.passes.waiting import NEAR, Headroom, depends, no_higher
from takeback.compiler.program import Buffer, BufferId, Cluster, Op, Program, Region


def gather(draft: Draft) -> Draft:
    """The draft with both as one cluster, where the first of them ran."""
    return no_higher(draft, _gathered)


def _gathered(draft: Draft, room: Headroom) -> Draft:
    program = draft.program
    buffers = dict(program.buffers)
    named = frozenset(r.buffer for _, r in program.named_regions()) | draft.kept
    ops = list(program.ops)
    position = 0
    while position < len(ops):
        found = next((at for at in range(max(0, position - NEAR), position) if _fits(ops, at, position, program)), None)
        made = sum(program.buffers[r.buffer].size_bytes for r in ops[position].outputs)
        if found is None or not room.for_([ops[position], *ops[found:position]], made):
            position += 1
            continue
        outside = {r.buffer for i, op in enumerate(ops) if i not in (found, position) for r in op.inputs}
        ops[found] = one_of((ops[found], ops[position]), buffers, outside | named)
        del ops[position]
    return replace(draft, program=replace(program, ops=tuple(ops), buffers=buffers))


def _fits(ops: Sequence[Op], first: int, second: int, program: Program) -> bool:
    """Whether the second op may run with the first, and reads much of what that reads or makes."""
    one, other = ops[first], ops[second]
    if not isinstance(one.target, Cluster) or one.phase is not other.phase or other.mutates or one.mutates:
        return False
    if not isinstance(other.target, Cluster) and why_not(other, program) is not None:
        return False
    if len(one.target.ops) + length_of(other) > MOST_OPS or not shares(other, one, program):
        return False
    if not seen_whole(one, [other]):
        return False
    between = ops[first + 1 : second]
    return not depends(other, between) and not any(depends(op, [other]) for op in between)


def length_of(op: Op) -> int:
    """Ops, as they were recorded."""
    return len(op.target.ops) if isinstance(op.target, Cluster) else 1


def shares(op: Op, other: Op, program: Program) -> bool:
    """Whether a third of what an op reads is read or made by the other, too: one of the two or three large operands
    that the backward of a norm or of an activation has."""
    sizes = {r.buffer: program.buffers[r.buffer].size_bytes for r in op.inputs}
    there = {r.buffer for r in (*other.inputs, *other.outputs)}
    return bool(sizes) and 3 * sum(size for b, size in sizes.items() if b in there) > sum(sizes.values())


def seen_whole(op: Op, readers: Sequence[Op]) -> bool:
    """Whether what an op makes is seen by the others so that they can be one kernel with it."""
    made: Mapping[BufferId, Region] = {r.buffer: r for r in op.outputs}
    return all(path(made[r.buffer], r) is not None for reader in readers for r in reader.inputs if r.buffer in made)


def one_of(parts: Sequence[Op], buffers: dict[BufferId, Buffer], leaving: set[BufferId] | frozenset[BufferId]) -> Op:
    """One cluster of several ops and clusters, in order. `leaving`: what others read; buffers of what is inside of
    them are added."""
    ops: list[Op] = []
    for op in parts:
        ops.extend(expanded(op, buffers) if isinstance(op.target, Cluster) else (op,))
    return clustered(tuple(ops), buffers, leaving.__contains__)
