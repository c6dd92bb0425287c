"""Hands a dying buffer on instead of copying it (S0, S1): a copy whose source is never read again is no copy.

Autograd clones where it cannot know that it holds the last reference; the program does know.
"""

from __future__ import annotations

from dataclasses import replace

from takeback.compiler.ownership.facts import COPY, Refused, geometry_refusal
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.passes.draft import Draft, Moved, Refusal
from takeback.compiler.passes.rename import rename_in
from takeback.compiler.program import BufferId, Op, Region


def move(draft: Draft) -> Draft:
    """Drops every copy of a dying buffer; the copy's uses become uses of the source."""
    program = draft.program
    alive = lifetimes(program, draft.kept)
    table: dict[BufferId, BufferId] = {}
    moves: list[Moved] = []
    refusals: list[Refusal] = []
    returned = {r.buffer for r in program.returned} | draft.kept
    ops: list[Op] = []
    for position, op in enumerate(program.ops):
        if op.target not in COPY:
            ops.append(op)
            continue
        source, result = op.args[0], op.results[0]
        assert isinstance(source, Region)
        assert isinstance(result, Region)
        size = program.buffers[result.buffer].size_bytes
        reason: Refused | None
        if program.buffers[source.buffer].role.borrowed:
            reason = Refused.BORROWED
        elif source.buffer in returned:
            reason = Refused.RETURNED
        elif alive[source.buffer].end > position + 1:
            reason = Refused.READ_LATER
        else:
            reason = geometry_refusal(op, result, source, program.buffers)
        if reason is None:
            table[result.buffer] = source.buffer
            moves.append(Moved(op.name, result.buffer, source.buffer, size, op.site))
        else:
            ops.append(op)
            refusals.append(Refusal("move", op.name, result.buffer, size, reason, op.site))
    return replace(
        rename_in(draft, replace(program, ops=tuple(ops)), table),
        moves=draft.moves + tuple(moves),
        refusals=draft.refusals + tuple(refusals),
    )
