"""A mutant: a valid layout with one fault in it, and the small changes of layouts that faults are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from unittest import mock

from plans_to_break import Subject

from takeback.compiler import layout as layout_module
from takeback.compiler.layout import Layout, Request, propose
from takeback.compiler.ownership.lifetimes import Lifetime
from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import BufferId, Op

ALIGNMENT = 64
_ANY = 1 << 60  #: an arena of any size will do


@dataclass(frozen=True)
class Mutant:
    """`layout` has not been checked. `asks`: says what else is wrong with it in truth, if the oracle cannot know."""

    layout: Layout
    what: str
    asks: Callable[[], str | None] | None = None


Mutator = Callable[[Subject, Random], Mutant | None]
"""Makes a fault, drawn at random; None where the subject has nothing of the kind."""


def moved(layout: Layout, places: Mapping[BufferId, int]) -> Layout:
    """The layout with other offsets for the bytes of these owners, and for everything that takes them."""
    offsets = {b: places.get(layout.owners[b], at) for b, at in layout.placed.offsets.items()}

    def answered(asked: Request) -> Request:
        if asked.result is None or asked.offset_bytes < 0 or asked.result not in offsets:
            return asked
        return replace(asked, offset_bytes=offsets[asked.result])

    requests = tuple(tuple(map(answered, asked)) for asked in layout.placed.requests)
    return replace(layout, arena=replace(layout.placed, offsets=offsets, requests=requests))


def proposed(layout: Layout, draft: Draft, alive: Mapping[BufferId, Lifetime] | None = None) -> Layout:
    """A layout for a faulty draft, or for lifetimes that are not the program's: whoever places goes by them. Things are
    placed in the order in which they were in the valid layout, which is quick."""
    order = layout.placed.placing
    like = replace(order, arena_bytes=_ANY) if order is not None else None
    if alive is None:
        return propose(draft, like=like)
    with mock.patch.object(layout_module, "lifetimes", return_value=alive):
        return propose(draft, like=like)


def with_ops(draft: Draft, ops: tuple[Op, ...]) -> Draft:
    return replace(draft, program=replace(draft.program, ops=ops))


def owners_of(layout: Layout) -> list[BufferId]:
    """Those that have bytes."""
    found = dict.fromkeys(layout.owners.values())
    return [b for b in found if layout.program.buffers[b].size_bytes]


def span_of(layout: Layout, owner: BufferId) -> tuple[int, int]:
    """When the bytes of an owner are in use, by it or by who took them."""
    mine = [life for b, life in layout.alive.items() if layout.owners[b] == owner]
    return min(life.start for life in mine), max(life.end for life in mine)


def size_of(layout: Layout, buffer: BufferId) -> int:
    return layout.program.buffers[buffer].size_bytes


def fits(layout: Layout, owner: BufferId, offset: int) -> bool:
    return offset >= 0 and offset + size_of(layout, owner) <= layout.placed.size_bytes
