"""Faults in packed gradients: something else gets the bytes of a slice while it is needed, or slices change places."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutant import Mutant, fits, moved, owners_of, size_of, span_of
from plans_to_break import Subject

from takeback.compiler.passes.draft import Packed
from takeback.compiler.program import BufferId


def reuse_slice(subject: Subject, draw: Random) -> Mutant | None:
    layout = subject.layout
    slices = [b for b in owners_of(layout) if isinstance(layout.draft.placements.get(b), Packed)]
    if not slices:
        return None
    taken = draw.choice(slices)
    alike = [b for b in slices if b != taken and size_of(layout, b) == size_of(layout, taken)]
    if alike and draw.random() < 0.2:
        return _exchanged(subject, taken, draw.choice(alike))
    start, end = span_of(layout, taken)
    beside = [
        b for b in owners_of(layout) if b != taken and start < span_of(layout, b)[1] and span_of(layout, b)[0] < end
    ]
    at = layout.placed.offsets[taken] + draw.choice((0, 0, 64, -64))
    beside = [b for b in beside if fits(layout, b, at)]
    if not beside:
        return None
    taker = draw.choice(beside)
    return Mutant(moved(layout, {taker: at}), f"%{taker} lies on the slice %{taken}")


def _exchanged(subject: Subject, one: BufferId, other: BufferId) -> Mutant:
    """Each lies where the other belongs, and is said to belong there."""
    layout = subject.layout
    at, placements = layout.placed.offsets, dict(layout.draft.placements)
    placements[one], placements[other] = placements[other], placements[one]
    there = moved(layout, {one: at[other], other: at[one]})
    return Mutant(
        replace(there, draft=replace(layout.draft, placements=placements)), f"slices %{one} and %{other} change places"
    )
