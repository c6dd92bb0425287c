"""First write and last use of every internal buffer, in positions of ops: half-open `[start, end)`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from takeback.compiler.ownership.facts import EMPTY
from takeback.compiler.program import BufferId, Program


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The ops during which a buffer's bytes mean something."""

    start: int
    end: int


def lifetimes(program: Program, kept: Collection[BufferId] = ()) -> Mapping[BufferId, Lifetime]:
    """`kept` names the buffers that must last to the end of the step, besides what the step returns."""
    start: dict[BufferId, int] = {}
    end: dict[BufferId, int] = {}
    for position, op in enumerate(program.ops):
        if op.target in EMPTY:
            continue
        for region in (*op.inputs, *op.outputs):
            start.setdefault(region.buffer, position)
            end[region.buffer] = position + 1
        for buffer in op.mutates:
            start.setdefault(buffer, position)
            end[buffer] = position + 1
    for buffer in (*(r.buffer for r in program.returned), *kept):
        if buffer in start:
            end[buffer] = len(program.ops)
    internal = (b for b in start if not program.buffers[b].role.borrowed)
    return {b: Lifetime(start[b], end[b]) for b in internal}
