"""Offsets that are there already come in; a `Solution` that keeps them goes out, with everything else in the gaps.

A plan that is corrected by a few bytes of scratch need not be placed anew: where a search from nothing would scatter
it, the old places with the new items between them are as good as before. Whether the old offsets still fit is not
asked here: the validator says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from takeback.compiler.plan.problem import Item, ItemId, Problem, Solution, aligned_bytes


def solve_around(problem: Problem, kept: Mapping[ItemId, int]) -> Solution:
    """Every item of `kept` where it was, the others as low as they fit, the largest first."""
    offsets = {item.id: kept[item.id] for item in problem.items if item.id in kept}
    placed = [item for item in problem.items if item.id in offsets]
    for item in sorted(problem.items, key=lambda i: (-i.size_bytes, i.start, i.id)):
        if item.id not in offsets:
            offsets[item.id] = _lowest(item, placed, offsets, problem.alignment_bytes)
            placed.append(item)
    arena_bytes = max((offsets[i.id] + aligned_bytes(i.size_bytes, problem.alignment_bytes) for i in placed), default=0)
    return Solution(offsets, arena_bytes, "around what was there")


def _lowest(item: Item, placed: list[Item], offsets: Mapping[ItemId, int], alignment_bytes: int) -> int:
    """The lowest offset at which nothing lies that is alive at the same time."""
    beside = sorted(
        (offsets[o.id], offsets[o.id] + aligned_bytes(o.size_bytes, alignment_bytes))
        for o in placed
        if o.start < item.end and item.start < o.end
    )
    size_bytes = aligned_bytes(item.size_bytes, alignment_bytes)
    at = 0
    for begin, end in beside:
        if at + size_bytes <= begin:
            break
        at = max(at, end)
    return at
