"""The table of contents of the compiler: which passes run, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from takeback.passes.chunk_loss import chunk_loss
from takeback.passes.draft import Draft
from takeback.passes.functionalize import functionalize
from takeback.passes.move import move
from takeback.passes.overwrite import overwrite
from takeback.passes.recompute import recompute

Pass = Callable[[Draft], Draft]

PASSES: tuple[Pass, ...] = (functionalize, move, chunk_loss, recompute, overwrite)


def passes_for(memory: str) -> tuple[Pass, ...]:
    """The passes for a setting of `memory`: with "keep", nothing is rebuilt."""
    return tuple(p for p in PASSES if memory != "keep" or p is not recompute)


def run_passes(draft: Draft, passes: Sequence[Pass] = PASSES) -> Draft:
    for each in passes:
        draft = each(draft)
    return draft
