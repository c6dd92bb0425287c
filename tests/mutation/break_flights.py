"""Faults around a group: bytes of a bucket on its way are given to others, read, or changed; a bucket leaves before it
is complete, is forgotten, or is used before it has arrived."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from break_programs import shifted
from mutant import Mutant, fits, moved, owners_of, proposed, span_of, with_ops
from plans_to_break import Subject

from takeback.compiler.program import Op, Phase, Special


def reuse_in_flight(subject: Subject, draw: Random) -> Mutant | None:
    """A block on its way is given to something else: of an arena, where one says what gets which bytes."""
    found = flights_of(subject)
    if found is None or subject.is_streamed:
        return None
    sends, wait = found
    return _reuse(subject, draw, draw.choice(sends), wait)


def flights_of(subject: Subject) -> tuple[list[int], int] | None:
    """The ops that send a bucket, and the one that waits for all of them."""
    ops = subject.layout.program.ops
    sends = [i for i, op in enumerate(ops) if op.target is Special.REDUCE]
    return (sends, next(i for i, op in enumerate(ops) if op.target is Special.WAIT)) if sends else None


def in_flight(subject: Subject, draw: Random) -> Mutant | None:
    found = flights_of(subject)
    if found is None or subject.is_streamed:
        return None
    sends, wait = found
    kind = draw.choice((_leave_early, _arrive_late, _forget, _read))
    return kind(subject, draw, draw.choice(sends), wait)


def _reuse(subject: Subject, draw: Random, send: int, wait: int) -> Mutant | None:
    """Something that is made while the bucket is on its way gets bytes of it."""
    layout = subject.layout
    slices = [layout.owners[r.buffer] for r in layout.program.ops[send].inputs]
    taken = draw.choice(slices)
    at = layout.placed.offsets[taken] + draw.choice((0, 0, 64))
    new = [b for b in owners_of(layout) if b not in slices and send < span_of(layout, b)[0] < wait]
    new = [b for b in new if fits(layout, b, at)]
    if not new:
        return None
    taker = draw.choice(new)
    return Mutant(moved(layout, {taker: at}), f"%{taker} gets bytes of a bucket on its way")


def _leave_early(subject: Subject, draw: Random, send: int, wait: int) -> Mutant | None:
    """The bucket is handed over before its last slice is complete."""
    draft = subject.layout.draft
    target = max(0, send - draw.choice((1, 2, 3, 5, 9, 15)))
    return Mutant(proposed(subject.layout, shifted(draft, send, target)), f"the bucket of op {send} leaves at {target}")


def _arrive_late(subject: Subject, draw: Random, send: int, wait: int) -> Mutant | None:
    """The update begins before the group is waited for, or that comes before the bucket has left."""
    draft = subject.layout.draft
    by = draw.choice((-6, -3, -1, 1, 2, 4))
    target = min(len(draft.program.ops) - 1, wait + by)
    moved_op = replace(draft.program.ops[wait], phase=draft.program.ops[target].phase)
    ops = (*draft.program.ops[:wait], moved_op, *draft.program.ops[wait + 1 :])
    return Mutant(
        proposed(subject.layout, shifted(with_ops(draft, ops), wait, target)), f"the group is waited for at {target}"
    )


def _forget(subject: Subject, draw: Random, send: int, wait: int) -> Mutant | None:
    """A slice is left out, of what is handed over or of what is waited for."""
    draft = subject.layout.draft
    position = draw.choice((send, wait))
    op = draft.program.ops[position]
    members = list(op.inputs)
    if len(members) < 2:
        return None
    out = draw.choice(members[1:-1] or members)
    left = tuple(r for r in members if r != out)
    args = (*op.args[:-1], left)
    less = replace(op, args=args, mutates=tuple(dict.fromkeys(r.buffer for r in left)))
    ops = (*draft.program.ops[:position], less, *draft.program.ops[position + 1 :])
    return Mutant(proposed(subject.layout, with_ops(draft, ops)), f"%{out.buffer} is left out of {op.name}")


def _read(subject: Subject, draw: Random, send: int, wait: int) -> Mutant | None:
    """An op that reads or writes a slice comes while the slice is on its way."""
    draft = subject.layout.draft
    mine = {r.buffer for r in draft.program.ops[send].inputs}

    def touches(op: Op) -> bool:
        return any(r.buffer in mine for r in (*op.inputs, *op.outputs))

    later = [i for i, op in enumerate(draft.program.ops) if i > wait and touches(op)]
    if not later:
        return None
    source = draw.choice(later)
    ops = list(draft.program.ops)
    if draw.random() < 0.7:
        ops[source] = replace(ops[source], phase=Phase.BACKWARD)
    return Mutant(
        proposed(subject.layout, shifted(with_ops(draft, tuple(ops)), source, wait)),
        f"op {source} runs before the group is done",
    )
