"""First write and last use of every internal buffer, in positions of ops: half-open `[start, end)`."""

from __future__ import annotations

import functools
import weakref
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
    found = dict(_used(program))
    for buffer in (*(r.buffer for r in program.returned), *kept):
        if buffer in found:
            found[buffer] = Lifetime(found[buffer].start, len(program.ops))
    return found


_known: dict[int, tuple[weakref.ref[Program], dict[BufferId, Lifetime]]] = {}  #: by id: several passes ask in turn


def _used(program: Program) -> dict[BufferId, Lifetime]:
    """From the first op that names a buffer to the last."""
    ident = id(program)
    if ident in _known and _known[ident][0]() is program:
        return _known[ident][1]
    start: dict[BufferId, int] = {}
    end: dict[BufferId, int] = {}
    for position, op in enumerate(program.ops):
        if op.target in EMPTY:
            continue
        following = position + 1
        for regions in (op.inputs, op.outputs):
            for region in regions:
                start.setdefault(region.buffer, position)
                end[region.buffer] = following
        for buffer in op.mutates:
            start.setdefault(buffer, position)
            end[buffer] = following
    internal = (b for b in start if not program.buffers[b].role.borrowed)
    found = {b: Lifetime(start[b], end[b]) for b in internal}
    _known[ident] = weakref.ref(program, functools.partial(_known.pop, ident)), found
    return found
