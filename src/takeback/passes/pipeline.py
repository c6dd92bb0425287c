"""The table of contents of the compiler: which passes run, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from takeback.passes.chunk_loss import chunk_loss
from takeback.passes.draft import Draft
from takeback.passes.move import move
from takeback.passes.overwrite import overwrite

Pass = Callable[[Draft], Draft]

PASSES: tuple[Pass, ...] = (move, chunk_loss, overwrite)


def run_passes(draft: Draft, passes: Sequence[Pass] = PASSES) -> Draft:
    for each in passes:
        draft = each(draft)
    return draft
