"""A plan for another shape: its offsets for this one's values, or one of its ops among this one's."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutant import Mutant, moved, owners_of, proposed, with_ops
from plans_to_break import Subject


def stale(subject: Subject, draw: Random) -> Mutant | None:
    layout, sibling = subject.layout, subject.sibling
    if sibling is None:
        return None
    if draw.random() < 0.3 and len(layout.program.ops) == len(sibling.program.ops):
        position = draw.randrange(len(layout.program.ops))
        ops = list(layout.program.ops)
        if ops[position].target is not sibling.program.ops[position].target:
            return None
        ops[position] = sibling.program.ops[position]
        return Mutant(
            proposed(subject.layout, with_ops(layout.draft, tuple(ops))), f"op {position} is of another shape"
        )
    part = draw.choice((1.0, 0.7, 0.4, 0.2, 0.1))
    there = sibling.placed.offsets
    places = {b: there[b] for b in owners_of(layout) if b in there and draw.random() < part}
    mixed = moved(layout, places)
    size = draw.choice((sibling.placed.size_bytes, max(layout.placed.size_bytes, sibling.placed.size_bytes)))
    arena = replace(mixed.placed, size_bytes=size)
    return Mutant(replace(mixed, arena=arena), f"{len(places)} offsets of a plan for another shape")
