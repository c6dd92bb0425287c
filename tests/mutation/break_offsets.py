"""Faults in offsets: a value, or an op's scratch, lies elsewhere than it was placed, or two values lie at one place."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutant import ALIGNMENT, Mutant, fits, moved, owners_of, span_of
from plans_to_break import Subject

from takeback.compiler.layout import Layout, Request


def shift(subject: Subject, draw: Random) -> Mutant | None:
    """Up or down by some lines, or by less than one."""
    layout = subject.layout
    by = draw.choice((-1, 1)) * draw.choice((4, 16, *(ALIGNMENT * n for n in (1, 1, 2, 3, 5, 8, 16))))
    if draw.random() < 0.15:
        scratch = _shift_scratch(layout, draw, by)
        if scratch is not None:
            return scratch
    owner = draw.choice(owners_of(layout))
    offset = layout.placed.offsets[owner] + by
    if not fits(layout, owner, offset) and draw.random() < 0.9:
        return None
    return Mutant(moved(layout, {owner: offset}), f"%{owner} lies {by} bytes from its place")


def _shift_scratch(layout: Layout, draw: Random, by: int) -> Mutant | None:
    found = [
        (position, k)
        for position, asked in enumerate(layout.placed.requests)
        for k, request in enumerate(asked)
        if request.result is None and request.offset_bytes >= 0
    ]
    if not found:
        return None
    position, k = draw.choice(found)
    requests = [list(asked) for asked in layout.placed.requests]
    request: Request = requests[position][k]
    offset = draw.choice((request.offset_bytes + by, draw.choice(list(layout.placed.offsets.values()))))
    if offset < 0 or offset + request.size_bytes > layout.placed.size_bytes:
        return None
    requests[position][k] = replace(request, offset_bytes=offset)
    arena = replace(layout.placed, requests=tuple(map(tuple, requests)))
    return Mutant(replace(layout, arena=arena), f"scratch of op {position} lies at {offset}")


def alias(subject: Subject, draw: Random) -> Mutant | None:
    """Two values that are needed at one time have one place."""
    layout = subject.layout
    owners = owners_of(layout)
    one = draw.choice(owners)
    start, end = span_of(layout, one)
    beside = [b for b in owners if b != one and max(start, span_of(layout, b)[0]) < min(end, span_of(layout, b)[1])]
    beside = [b for b in beside if fits(layout, b, layout.placed.offsets[one])]
    if not beside:
        return None
    other = draw.choice(beside)
    return Mutant(moved(layout, {other: layout.placed.offsets[one]}), f"%{other} lies on %{one}")
