"""A `Problem` and a `Solution` come in, the first broken rule goes out as text, or None; it paints bytes."""

from __future__ import annotations

from takeback.compiler.plan import ItemId, Problem, Solution


def broken_rule(problem: Problem, solution: Solution) -> str | None:
    """Slow on purpose: at every moment, every live item claims each of its bytes, one by one."""
    if solution.offsets.keys() != {item.id for item in problem.items}:
        return "not the items of the problem"
    for item in problem.items:
        offset = solution.offsets[item.id]
        if offset < 0 or offset % problem.alignment_bytes or offset + item.size_bytes > solution.arena_bytes:
            return f"item {item.id} lies badly"
    for pack in problem.packs:
        for one, one_distance in pack.members:
            for other, other_distance in pack.members:
                if solution.offsets[one] - solution.offsets[other] != one_distance - other_distance:
                    return f"items {one} and {other} are packed at another distance"
    for moment in sorted({item.start for item in problem.items}):
        claimed: dict[int, ItemId] = {}
        for item in problem.items:
            if item.start <= moment < item.end:
                offset = solution.offsets[item.id]
                for byte in range(offset, offset + item.size_bytes):
                    if claimed.setdefault(byte, item.id) != item.id:
                        return f"items {claimed[byte]} and {item.id} at byte {byte}"
    return None
