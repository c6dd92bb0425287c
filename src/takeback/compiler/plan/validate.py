"""A `Problem` and a `Solution` come in; a wrong solution raises `PlanError`, naming items, lifetimes, bytes.

A sweep over time that shares no code with the solver: items enter and leave, no two inside may share a byte.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from takeback.compiler.plan.problem import Item, ItemId, Problem, Solution
from takeback.errors import PlanError

WHAT_TO_DO = "The plan must not be run; this is a bug in whatever made it."


def validate(problem: Problem, solution: Solution) -> None:
    """Raises `PlanError` unless every item has aligned bytes of its own in the arena, all its lifetime."""
    items = {item.id: item for item in problem.items}
    for unknown in solution.offsets:
        if unknown not in items:
            raise PlanError(f"The solution has an offset for item {unknown}, which the problem lacks. {WHAT_TO_DO}")
    if solution.arena_bytes < 0:
        raise PlanError(f"The arena has a negative size: {solution.arena_bytes} bytes. {WHAT_TO_DO}")
    for item in problem.items:
        _check_alone(item, problem, solution)
    _check_together(problem, solution)
    _check_packs(problem, solution)


def _check_alone(item: Item, problem: Problem, solution: Solution) -> None:
    if item.id not in solution.offsets:
        lifetime = f"{item.size_bytes} bytes alive during [{item.start}, {item.end})"
        raise PlanError(f"Item {item.id} ({lifetime}) has no offset. {WHAT_TO_DO}")
    offset = solution.offsets[item.id]
    if offset < 0:
        raise PlanError(f"{_describe(item, offset)} starts below the arena. {WHAT_TO_DO}")
    if offset % problem.alignment_bytes:
        wanted = f"a multiple of {problem.alignment_bytes}"
        raise PlanError(f"{_describe(item, offset)} has an unaligned offset, not {wanted}. {WHAT_TO_DO}")
    if offset + item.size_bytes > solution.arena_bytes:
        arena = f"the arena of {solution.arena_bytes} bytes"
        raise PlanError(f"{_describe(item, offset)} reaches beyond {arena}. {WHAT_TO_DO}")


def _check_together(problem: Problem, solution: Solution) -> None:
    items = {item.id: item for item in problem.items if item.size_bytes > 0}
    # At equal times what leaves (0) comes before what enters (1), because lifetimes are half-open.
    events = [(item.end, 0, item.id) for item in items.values()]
    events += [(item.start, 1, item.id) for item in items.values()]
    inside: list[tuple[int, ItemId]] = []
    for _, enters, item_id in sorted(events):
        entry = (solution.offsets[item_id], item_id)
        if not enters:
            inside.pop(bisect_left(inside, entry))
            continue
        # What is inside is disjoint and sorted by offset: only the two neighbours can touch a newcomer.
        at = bisect_left(inside, entry)
        for neighbour_offset, neighbour_id in inside[max(at - 1, 0) : at + 1]:
            item, neighbour = items[item_id], items[neighbour_id]
            below_end = neighbour_offset + neighbour.size_bytes
            if entry[0] < below_end and neighbour_offset < entry[0] + item.size_bytes:
                both = f"{_describe(neighbour, neighbour_offset)} and {_describe(item, entry[0])}"
                raise PlanError(f"{both} overlap in time and in bytes. {WHAT_TO_DO}")
        insort(inside, entry)


def _check_packs(problem: Problem, solution: Solution) -> None:
    for number, pack in enumerate(problem.packs):
        bases = {solution.offsets[item_id] - distance for item_id, distance in pack.members}
        if len(bases) > 1:
            first, first_distance = pack.members[0]
            base = solution.offsets[first] - first_distance
            other, distance = next(m for m in pack.members if solution.offsets[m[0]] - m[1] != base)
            raise PlanError(
                f"Pack {number} is torn: item {other} is at {solution.offsets[other]}, and it must be at "
                f"{base + distance}, {distance} bytes above the base that item {first} gives. {WHAT_TO_DO}"
            )


def _describe(item: Item, offset: int) -> str:
    return f"Item {item.id} (bytes [{offset}, {offset + item.size_bytes}) during [{item.start}, {item.end}))"
