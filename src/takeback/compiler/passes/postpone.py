"""Lets ops of the backward wait for a cluster that reads what one of their operands can be rebuilt from.

A weight's gradient reads an activation z, which could be rebuilt from x and y. The cluster that comes next reads x
anyway. If the weight's gradient comes after it, z can come out of that cluster, at the price of reading y and writing z
(join.py). The backward of a convolution gives both gradients, and is split for it.

      dz, dw = conv_backward(dy, z, w)          dz = conv_backward(dy, x, w)    the input's gradient: it is told x for
      dx     = cluster(dz, z, x)                dx = cluster(dz, z, x)          z's shape, and looks at no number of it
                                                dw = conv_backward(dy, z, w)    the weight's

What waits keeps its operands alive for longer: that is done nowhere where the planned peak would grow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.rebuildable import may_rebuild, rebuild_gives, rebuild_reads
from takeback.compiler.passes.waiting import NEAR, SMALL, Headroom, may_wait, no_higher, order
from takeback.compiler.program import BufferId, Cluster, Op, Phase


def postpone(draft: Draft) -> Draft:
    """The draft with every such op after the cluster that it may wait for."""
    return no_higher(draft, _postponed)


def _postponed(draft: Draft, room: Headroom) -> Draft:
    program, device = draft.program, draft.program.device_type
    sources: dict[BufferId, frozenset[BufferId]] = {}  # of a value: what is large of what it is rebuilt from
    for op in program.ops:
        if isinstance(op.target, Cluster) and may_rebuild(op, device):
            given = list(rebuild_gives(op, device))
            least = max((program.buffers[r.buffer].size_bytes for r in given), default=0) // SMALL
            read = [r.buffer for r in rebuild_reads(op, device) if program.buffers[r.buffer].size_bytes > least]
            sources |= {r.buffer: frozenset(read) for r in given}
    ops, waited = list(program.ops), set[int]()
    position = 0
    while position < len(ops):
        op = ops[position]
        wanted = frozenset[BufferId]().union(*(sources.get(r.buffer, frozenset()) for r in op.inputs))
        found = _cluster_after(ops, position, wanted) if wanted and id(op) not in waited else None
        if found is not None:
            run = ops[position : found + 1]
            new = order(run, [r for r in run[-1].inputs if r.buffer in wanted])
            if new is not None and room.for_(run):
                waited |= set(map(id, new.behind))
                ops[position : found + 1] = [*new.ahead, *new.behind]
                continue
        position += 1
    return replace(draft, program=replace(program, ops=tuple(ops)))


def _cluster_after(ops: Sequence[Op], position: int, wanted: Collection[BufferId]) -> int | None:
    """Where the next cluster is that reads one of these."""
    if isinstance(ops[position].target, Cluster) or not may_wait(ops[position]):
        return None
    for later in range(position + 1, min(position + 1 + NEAR, len(ops))):
        op = ops[later]
        if isinstance(op.target, Cluster) and op.phase is Phase.BACKWARD and any(r.buffer in wanted for r in op.inputs):
            return later
    return None
