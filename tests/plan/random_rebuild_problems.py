"""Hypothesis draws come in, small `RebuildProblem`s go out; and the slow obvious ways to look at one: every choice, and
what a choice comes to, by asking for each moment who is there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from hypothesis import strategies as st

from takeback.compiler.plan.rebuild_problem import (
    Carry,
    RebuildAnswer,
    RebuildProblem,
    RebuildUnit,
    RebuildValue,
    Run,
    UnitId,
    ValueId,
)

MOST = 11  #: unknowns: all choices are tried


def problem_of(seed: int) -> RebuildProblem:
    """A forward of single ops, each making a value of earlier ones; then a backward that reads them again."""
    rng = random.Random(seed)
    forward = rng.randrange(2, 6)
    ops = forward + rng.randrange(2, 6)
    values: list[RebuildValue] = []
    units: list[RebuildUnit] = []
    reads: dict[int, list[int]] = {}
    for at in range(forward):
        reads[at] = sorted(rng.sample(range(at), rng.randrange(0, min(at, 2) + 1)))
    uses = {v: {v, *(at for at in range(v + 1, forward) if v in reads[at])} for v in range(forward)}
    for at in range(forward, ops):
        for v in rng.sample(range(forward), rng.randrange(0, 3)):
            uses[v].add(at)
    pure = {v for v in range(forward) if rng.random() < 0.8}
    episodes = {v: _episodes(sorted(uses[v])) for v in range(forward)}

    def within(v: int, at: int) -> bool:
        return any(first < at <= last for first, last in episodes[v])

    chains: dict[int, set[int]] = {}
    for v in pure:
        for first, _ in episodes[v][1:]:
            if rng.random() < 0.9:
                chain = chains.setdefault(first, set())
                chain.add(v)
                chain |= {u for u in reads[v] if u in pure and not within(u, first) and rng.random() < 0.7}
    stops: dict[int, set[int]] = {v: {first for first, _ in episodes[v][1:]} for v in range(forward)}
    for stop, chain in chains.items():
        for name in chain:
            for v in (*reads[name], name):
                if not within(v, stop):
                    stops[v].add(stop)
    for v in range(forward):
        size = rng.choice((1, 3, 8, 20))
        overwritten = rng.random() < 0.3
        maker = UnitId(v) if v in pure else None
        values.append(RebuildValue(ValueId(v), size, episodes[v], tuple(sorted(stops[v])), maker, overwritten))
    for v in sorted(pure):
        inputs = tuple(ValueId(u) for u in reads[v])
        taken = rng.choice((*inputs, None)) if inputs else None
        extra = rng.choice((0, 0, 2))
        units.append(
            RebuildUnit(UnitId(v), (v,), inputs, (ValueId(v),), rng.randrange(1, 9), rng.choice((0, 1)), extra, taken)
        )
    fixed = [rng.randrange(0, 6) for _ in range(2 * ops)]
    during = fixed[:ops]
    # Between two ops no more is there than during either of them.
    before = [min(level, during[at], during[max(at - 1, 0)]) for at, level in enumerate(fixed[ops:])]
    ordered = {stop: tuple(UnitId(n) for n in sorted(chain)) for stop, chain in sorted(chains.items())}
    return RebuildProblem(tuple(values), tuple(units), ordered, tuple(during), tuple(before), 4 * ops)


def _episodes(uses: list[int]) -> tuple[tuple[int, int], ...]:
    found = [(uses[0], uses[0])]
    for use in uses[1:]:
        first, last = found[-1]
        if use - last <= 1:
            found[-1] = (first, use)
        else:
            found.append((use, use))
    return tuple(found)


def unknowns(problem: RebuildProblem) -> tuple[list[Carry], list[Run]]:
    carries = [(value.id, stop) for value in problem.values for stop in value.stops]
    return carries, [(name, stop) for stop, chain in problem.chains.items() for name in chain]


def _interesting(problem: RebuildProblem) -> bool:
    carries, runs = unknowns(problem)
    return bool(runs) and len(carries) + len(runs) <= MOST


#: Drawn by number: hypothesis left to itself prefers problems in which nothing can be rebuilt.
rebuild_problems = st.integers(0, 1 << 32).map(problem_of).filter(_interesting)


def every_choice(problem: RebuildProblem) -> Iterator[tuple[frozenset[Carry], frozenset[Run]]]:
    """All subsets of the unknowns, right or wrong."""
    carries, runs = unknowns(problem)
    for bits in itertools.product((False, True), repeat=len(carries) + len(runs)):
        carried = frozenset(c for c, bit in zip(carries, bits, strict=False) if bit)
        yield carried, frozenset(r for r, bit in zip(runs, bits[len(carries) :], strict=True) if bit)


def is_right(problem: RebuildProblem, carried: frozenset[Carry], rebuilt: frozenset[Run]) -> bool:
    """Asked backwards, from each read to where the value comes from."""
    units = {unit.id: unit for unit in problem.units}

    def arrives(value: RebuildValue, stop: int) -> bool:
        """True if the value is there just before the op at `stop`, before anything is rebuilt for it."""
        if value.within(stop):
            return True
        if (value.id, stop) not in carried:
            return False
        earlier = [s for s in value.stops if s < stop]
        return not earlier or value.wanted_at(earlier[-1]) or there(value, earlier[-1])

    def there(value: RebuildValue, stop: int) -> bool:
        return arrives(value, stop) or (value.maker, stop) in rebuilt

    values = {value.id: value for value in problem.values}
    if any(not arrives(values[v], stop) for v, stop in carried):
        return False
    if any(not there(value, first) for value in problem.values for first, _ in value.episodes[1:]):
        return False
    return all(there(values[v], stop) for name, stop in rebuilt for v in units[name].reads)


def answer_of(
    problem: RebuildProblem, carried: frozenset[Carry], rebuilt: frozenset[Run], peak_bytes: int
) -> RebuildAnswer:
    cost = {unit.id: unit.cost_ns for unit in problem.units}
    return RebuildAnswer(carried, rebuilt, peak_bytes, sum(cost[name] for name, _ in rebuilt))
