"""Faults in lifetimes: whoever places is told that a value dies sooner than it does, or when another one does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutant import Mutant, fits, moved, owners_of, proposed, size_of, span_of
from plans_to_break import Subject

from takeback.compiler.ownership.lifetimes import Lifetime
from takeback.compiler.program import BufferId


def shorten(subject: Subject, draw: Random) -> Mutant | None:
    """A value dies too soon, and its bytes are given to one that comes after that."""
    layout = subject.layout
    last = {r.buffer for r in layout.program.returned} | layout.draft.kept
    longer = [b for b, life in layout.alive.items() if life.end - life.start > 1 and size_of(layout, b)]
    favoured = [b for b in longer if b in last]
    victim = draw.choice(favoured if favoured and draw.random() < 0.3 else longer)
    life = layout.alive[victim]
    end = draw.randrange(life.start + 1, life.end)
    alive = {**layout.alive, victim: Lifetime(life.start, end)}
    what = f"%{victim} dies at {end} instead of {life.end}"
    if draw.random() < 0.5:
        return Mutant(proposed(subject.layout, layout.draft, alive), what)
    return _given_on(subject, draw, victim, alive, end, what)


def _given_on(
    subject: Subject, draw: Random, victim: BufferId, alive: dict[BufferId, Lifetime], end: int, what: str
) -> Mutant | None:
    layout = subject.layout
    owner = layout.owners[victim]
    until = span_of(layout, owner)[1]
    others = [b for b in owners_of(layout) if b != owner and end <= span_of(layout, b)[0] < until]
    others = [b for b in others if fits(layout, b, layout.placed.offsets[owner])]
    if not others:
        return None
    taker = draw.choice(others)
    there = moved(layout, {taker: layout.placed.offsets[owner]})
    return Mutant(replace(there, alive=alive), f"{what}, and %{taker} gets its bytes")


def swap(subject: Subject, draw: Random) -> Mutant | None:
    """Two values have each other's lifetimes."""
    layout = subject.layout
    sized = [b for b in layout.alive if size_of(layout, b)]
    one, other = draw.sample(sized, 2)
    if layout.alive[one] == layout.alive[other]:
        return None
    alive = {**layout.alive, one: layout.alive[other], other: layout.alive[one]}
    return Mutant(proposed(subject.layout, layout.draft, alive), f"%{one} and %{other} have each other's lifetimes")
