"""Faults in sizes: a buffer is declared smaller than it is, in the program, or to whoever places alone."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutant import Mutant, owners_of, proposed, size_of
from plans_to_break import Subject


def shrink(subject: Subject, draw: Random) -> Mutant | None:
    layout = subject.layout
    draft = layout.draft
    if draw.random() < 0.1:
        by = draw.choice((4, 64, 256))
        arena = replace(layout.placed, size_bytes=max(0, layout.placed.size_bytes - by))
        return Mutant(replace(layout, arena=arena), f"the arena is {by} bytes smaller")
    buffer = draw.choice([b for b in owners_of(layout) if size_of(layout, b) > 8])
    size = size_of(layout, buffer)
    smaller = draw.choice((size // 2, size - 4, size // 4, max(4, size - 64)))
    buffers = {**draft.program.buffers, buffer: replace(draft.program.buffers[buffer], size_bytes=smaller)}
    small = proposed(subject.layout, replace(draft, program=replace(draft.program, buffers=buffers)))
    what = f"%{buffer} has {smaller} bytes instead of {size}"
    if draw.random() < 0.3:
        return Mutant(small, what)
    # The placer alone was told so: the program is as it was. What lies last may need an arena that is as large.
    grown = replace(small.placed, size_bytes=small.placed.size_bytes + size)
    return Mutant(
        replace(small, draft=replace(draft, placements=small.draft.placements), arena=grown), f"placed as if {what}"
    )
