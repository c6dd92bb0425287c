"""Offsets that are there already come in; a `Solution` that keeps them goes out, with everything else in the gaps.

A plan that is corrected by a few bytes of scratch need not be placed anew: where a search from nothing would scatter
it, the old places with the new items between them are as good as before. Whether the old offsets still fit is not
asked here: the validator says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from takeback.compiler.plan.placing import Ints, PlaceFunction, Placer
from takeback.compiler.plan.problem import ItemId, Problem, Solution, aligned_bytes

_NO_CEILING = np.iinfo(np.int64).max


def solve_around(
    problem: Problem, kept: Mapping[ItemId, int], native: Callable[[], PlaceFunction | None] | None = None
) -> Solution:
    """Every item of `kept` where it was, the others as low as they fit, the largest first. `native` is asked for the
    loop in C++, which gives the same offsets."""
    items = sorted(problem.items, key=lambda i: (-i.size_bytes, i.start, i.id))
    pinned = [n for n, item in enumerate(items) if item.id in kept]
    new = [n for n, item in enumerate(items) if item.id not in kept]
    sizes = _ints([aligned_bytes(item.size_bytes, problem.alignment_bytes) for item in items])
    starts, ends = _ints([item.start for item in items]), _ints([item.end for item in items])
    offsets = _ints([kept.get(item.id, 0) for item in items])
    function = native() if native is not None and new else None
    if function is not None:
        offsets = _placed_natively(Placer(function, sizes, starts, ends), _ints(pinned), _ints(new), offsets)
    else:
        _place_(sizes, starts, ends, pinned, new, offsets)
    arena_bytes = int((offsets + sizes).max()) if items else 0
    found = {item.id: int(offset) for item, offset in zip(items, offsets, strict=True)}
    return Solution({item.id: found[item.id] for item in problem.items}, arena_bytes, "around what was there")


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _placed_natively(placer: Placer, pinned: Ints, new: Ints, offsets: Ints) -> Ints:
    hangs = np.zeros(len(offsets), dtype=np.uint8)
    return placer.place(
        new, pinned, hangs, offsets=offsets, best_fit=False, ceiling=_NO_CEILING, give_up_at=None
    ).offsets


def _place_(sizes: Ints, starts: Ints, ends: Ints, pinned: list[int], new: list[int], offsets: Ints) -> None:
    """Each of `new` at the lowest offset at which nothing lies that is alive at the same time."""
    there = np.zeros(len(sizes), dtype=bool)
    there[pinned] = True
    for index in new:
        beside = np.flatnonzero(there & (starts < ends[index]) & (ends > starts[index]))
        beside = beside[np.argsort(offsets[beside], kind="stable")]
        at = 0
        for begin, end in zip(offsets[beside].tolist(), (offsets + sizes)[beside].tolist(), strict=True):
            if at + sizes[index] <= begin:
                break
            at = max(at, end)
        offsets[index] = at
        there[index] = True
