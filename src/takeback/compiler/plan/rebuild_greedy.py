"""Choices without a search. Where the solver has found none, what is cheapest to rebuild for its size is rebuilt first.
Where there is more room than one takes, what costs most for its size is not rebuilt after all. They are right, as every
choice is; they are only not the best ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from takeback.compiler.plan.rebuild_problem import (
    Carry,
    RebuildAnswer,
    RebuildValue,
    Run,
    ValueId,
    kept_bytes,
)
from takeback.compiler.plan.rebuild_rows import RebuildRows

_MOST_TRIED = 1000  #: families of runs that are left out on trial: a few seconds


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


def with_less(
    rows: RebuildRows, answer: RebuildAnswer, room_bytes: int, classes: Sequence[int] | None = None
) -> RebuildAnswer:
    """The answer without what need not be rebuilt to stay below `room_bytes`. Of runs that are of one of the `classes`
    (by unknown) all are rebuilt or none. An answer that is above the room is given back."""
    runs, best = answer.rebuilt, answer
    families: dict[int, list[Run]] = {}
    for run in sorted(runs):
        unknown = rows.run[run]
        families.setdefault(unknown if classes is None else classes[unknown], []).append(run)
    for family in sorted(families.values(), key=lambda family: _saved(rows, family))[:_MOST_TRIED]:
        rest = _useful(rows, runs.difference(family))
        if len(rest) < len(runs):
            found = answer_with(rows, rest)
            if found.peak_bytes <= room_bytes and found.cost_ns <= best.cost_ns:
                runs, best = rest, found
    return best


def _saved(rows: RebuildRows, family: Sequence[Run]) -> tuple[float, Run]:
    """What leaving these out saves for the bytes that stay then: the most comes first."""
    cost_ns = sum(rows.problem.cost_ns(rows.units[name], stop) for name, stop in family)
    given = (rows.values[v] for name, _ in family for v in rows.units[name].gives)
    return -cost_ns / max(sum(value.size_bytes for value in given), 1), family[0]


def _useful(rows: RebuildRows, rebuilt: frozenset[Run]) -> frozenset[Run]:
    """Of what is rebuilt, what an op needs, or another unit that one needs."""
    while True:
        _, made = _carried(rows, rebuilt)
        if len(made) == len(rebuilt):
            return rebuilt
        rebuilt = frozenset(made)


def answer_with(rows: RebuildRows, rebuilt: Collection[Run]) -> RebuildAnswer:
    """The answer that rebuilds just this, and carries what it takes and no more."""
    carried, _ = _carried(rows, frozenset(rebuilt))
    return rows.answer(frozenset((*(rows.carry[c] for c in carried), *(rows.run[r] for r in rebuilt))))


def _carried(rows: RebuildRows, rebuilt: frozenset[Run]) -> tuple[list[Carry], set[Run]]:
    """What must be carried, and which of these runs make something that is needed where they run."""
    read = {(v, stop) for name, stop in rebuilt for v in rows.units[name].reads}
    carried: list[Carry] = []
    made: set[Run] = set()
    for value in rows.problem.values:
        on = False  # whether it is carried into the stop that follows
        for stop in reversed(value.stops):
            needed = on or value.wanted_at(stop) or (value.id, stop) in read
            on = needed and (value.maker, stop) not in rebuilt
            if on:
                carried.append((value.id, stop))
            elif needed and value.maker is not None:
                made.add((value.maker, stop))
    return carried, made


def _stop_after(value: RebuildValue, top: int) -> int | None:
    """Where a value that is only carried over the peak is read again."""
    before = value.start
    for first, last in value.episodes:
        if before < top < first:
            return first
        before = last
    return None
