"""A choice without a search, for when the solver has found none: what is cheapest to rebuild for its size is rebuilt
first. It is right like every choice; it is only not the best one.
"""

from __future__ import annotations

from collections.abc import Collection

from takeback.compiler.plan.rebuild_problem import (
    Carry,
    RebuildAnswer,
    RebuildProblem,
    RebuildValue,
    Run,
    ValueId,
    kept_bytes,
)
from takeback.compiler.plan.rebuild_rows import RebuildRows


def cheapest_first(rows: RebuildRows, most_ns: int | None = None) -> list[RebuildAnswer]:
    """Some answers of growing size, none of which costs more than `most_ns`.

    Considered is what lies over the peak of the step and can be made from what is there anyway when it is read again:
    whole chains are left to the solver.
    """
    problem = rows.problem
    levels = kept_bytes(problem)
    top = max(range(len(levels)), key=levels.__getitem__, default=0)
    offers: list[tuple[float, ValueId, RebuildValue, int]] = []
    for value in problem.values:
        stop = _stop_after(value, top)
        if value.maker is not None and stop is not None and (value.maker, stop) in rows.run:
            cost = problem.cost_ns(rows.units[value.maker], stop)
            offers.append((cost / value.size_bytes, value.id, value, stop))
    dropped: dict[ValueId, int] = {}  # what is dropped, and where it is made again
    needed: dict[ValueId, int] = {}  # what must be there, and the first place where
    taken: dict[Run, None] = {}
    sizes, cost_ns = [0], 0
    for _, _, value, stop in sorted(offers, key=lambda offer: offer[:2]):
        assert value.maker is not None
        unit = rows.units[value.maker]
        there = all(rows.values[v].end > stop and dropped.get(v, stop) <= stop for v in unit.reads)
        added = 0 if (unit.id, stop) in taken else problem.cost_ns(unit, stop)  # a unit may give two values
        if not there or needed.get(value.id, stop) < stop or (most_ns is not None and cost_ns + added > most_ns):
            continue
        taken[unit.id, stop] = None
        dropped[value.id] = stop
        for v in unit.reads:
            needed[v] = min(needed.get(v, stop), stop)
        cost_ns += added
        sizes.append(len(taken))
    runs = list(taken)
    wanted = sorted({sizes[(len(sizes) - 1) * part // 4] for part in (1, 2, 3, 4)} - {0})
    return [answer_with(rows, runs[:size]) for size in wanted]


def answer_with(rows: RebuildRows, rebuilt: Collection[Run]) -> RebuildAnswer:
    """The answer that rebuilds just this, and carries what it takes and no more."""
    carried = _carried(rows.problem, frozenset(rebuilt))
    return rows.answer(frozenset((*(rows.carry[c] for c in carried), *(rows.run[r] for r in rebuilt))))


def _carried(problem: RebuildProblem, rebuilt: frozenset[Run]) -> list[Carry]:
    units = {unit.id: unit for unit in problem.units}
    read = {(v, stop) for name, stop in rebuilt for v in units[name].reads}
    carried: list[Carry] = []
    for value in problem.values:
        on = False  # whether it is carried into the stop that follows
        for stop in reversed(value.stops):
            needed = on or value.wanted_at(stop) or (value.id, stop) in read
            on = needed and (value.maker, stop) not in rebuilt
            if on:
                carried.append((value.id, stop))
    return carried


def _stop_after(value: RebuildValue, top: int) -> int | None:
    """Where a value that is only carried over the peak is read again."""
    before = value.start
    for first, last in value.episodes:
        if before < top < first:
            return first
        before = last
    return None
