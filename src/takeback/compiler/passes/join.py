"""Lets a cluster of the backward make what is rebuilt beside it, where both read the same: one kernel instead of two.

      z' = cluster(x)               z', dx = cluster(dz, x)        x is read once
      dx = cluster(dz, z', x)       dw     = mm(dy, z')
      dw = mm(dy, z')

A cluster that is rebuilt for itself would read its operands once more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.fuse import MOST_OPS
from takeback.compiler.passes.fusible import why_not
from takeback.compiler.passes.gather import length_of, one_of, seen_whole
from takeback.compiler.passes.overwrite import planned_curve
from takeback.compiler.program import Buffer, BufferId, Cluster, Op, Phase, Program


def join(draft: Draft) -> Draft:
    """The draft with what is rebuilt just before or after a cluster made inside of it."""
    if not draft.rebuilt:
        return draft
    curve, apart = planned_curve(draft), set[int]()
    while True:
        joining = _Joining(draft, curve, apart)
        after = replace(draft, program=joining.program)
        if not joining.joined or not (high := _above(after, max(curve))):
            return after
        # Two ops as one need what both need at the same time.
        apart |= {position for position, op in joining.joined.items() if id(op) in high} or joining.joined.keys()


def _above(draft: Draft, peak: int) -> set[int]:
    """The ops, by identity, at which more bytes are alive."""
    return {id(op) for op, level in zip(draft.program.ops, planned_curve(draft), strict=True) if level > peak}


def may_join(op: Op, cluster: Op, program: Program) -> bool:
    """Whether an op could be a part of a cluster beside it, and is cheaper there: they read the same value."""
    if not isinstance(cluster.target, Cluster) or cluster.phase is not Phase.BACKWARD or op.mutates:
        return False
    if not isinstance(op.target, Cluster) and why_not(op, program) is not None:
        return False
    read = {r.buffer for r in op.inputs}
    if read & set(cluster.mutates):
        return False
    shared = read & {r.buffer for r in cluster.inputs}
    return any(not program.buffers[b].role.borrowed for b in shared)


class _Joining:
    """One walk over the ops. Clusters at the positions `apart` stay as they are."""

    def __init__(self, draft: Draft, curve: Sequence[int], apart: Collection[int]) -> None:
        program = self._program = draft.program
        self._curve, self._peak = curve, max(curve, default=0)
        self._rebuilt = draft.rebuilt
        self._readers: dict[BufferId, set[int]] = {}
        for position, op in enumerate(program.ops):
            for r in op.inputs:
                self._readers.setdefault(r.buffer, set()).add(position)
        self._named = {r.buffer for _, r in program.named_regions()} | draft.kept
        self._buffers: dict[BufferId, Buffer] = dict(program.buffers)
        taken: set[int] = set()
        self.joined: dict[int, Op] = {}
        for position, op in enumerate(program.ops):
            parts = [position] if position in apart else self._parts(position, op, taken)
            if len(parts) > 1:
                taken |= set(parts)
                self.joined[position] = self._one(parts)
        ops = [self.joined.get(i, op) for i, op in enumerate(program.ops) if i in self.joined or i not in taken]
        self.program = replace(program, ops=tuple(ops), buffers=self._buffers)

    def _parts(self, position: int, op: Op, taken: set[int]) -> list[int]:
        """Positions of what becomes one op with the cluster at a position, in order."""
        if not isinstance(op.target, Cluster) or op.phase is not Phase.BACKWARD or self._is_rebuilt(op):
            return [position]
        ops, parts = self._program.ops, [position]
        count = len(op.target.ops)
        for at in range(position - 1, -1, -1):
            one = ops[at]
            if at in taken or not self._is_rebuilt(one) or not may_join(one, op, self._program):
                break
            if count + length_of(one) > MOST_OPS or not seen_whole(one, [ops[i] for i in parts]):
                break
            parts.insert(0, at)
            count += length_of(one)
        level = self._curve[position]
        for at in range(position + 1, len(ops)):
            one = ops[at]
            if not self._is_rebuilt(one) or not may_join(one, op, self._program):
                break
            level += sum(self._buffers[r.buffer].size_bytes for r in one.outputs)
            if count + length_of(one) > MOST_OPS or level > self._peak:
                break
            if not all(seen_whole(ops[i], [one]) for i in parts):
                break
            parts.append(at)
            count += length_of(one)
        return parts

    def _is_rebuilt(self, op: Op) -> bool:
        return bool(op.outputs) and all(r.buffer in self._rebuilt for r in op.outputs)

    def _one(self, parts: Sequence[int]) -> Op:
        inside = set(parts)
        read = {b for b, readers in self._readers.items() if readers - inside}
        return one_of([self._program.ops[i] for i in parts], self._buffers, self._named | read)
