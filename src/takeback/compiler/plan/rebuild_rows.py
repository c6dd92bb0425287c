"""A `RebuildProblem` comes in; its linear form goes out: numbered unknowns, what each asks for, and the bytes alive at
every moment as fixed bytes and terms.

A row never counts less than is alive (rebuild_check.py walks the step to see that). It counts more in one case: a value
that a unit of the stop may read stays until the last such unit of the chain, whether that one is rebuilt or not.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from takeback.compiler.plan.rebuild_problem import (
    Alike,
    Carry,
    RebuildAnswer,
    RebuildProblem,
    RebuildUnit,
    RebuildValue,
    Run,
    UnitId,
    ValueId,
)

Term = tuple[int, int]  #: (unknown, bytes if it is 1)


@dataclass(frozen=True)
class Row:
    """At one moment: `fixed_bytes` and the terms together must not exceed the peak."""

    fixed_bytes: int
    terms: tuple[Term, ...]

    def height(self, ones: frozenset[int]) -> int:
        return self.fixed_bytes + sum(size for unknown, size in self.terms if unknown in ones)


@dataclass(frozen=True)
class Rule:
    """If the unknown `that` is 1, one of `those` must be; None stands for a constant 1."""

    those: tuple[int, ...]
    that: int | None


class RebuildRows:
    """The rows and rules of one problem. Unknowns are numbered: first the carries, then the runs."""

    def __init__(self, problem: RebuildProblem) -> None:
        self.problem = problem
        self.values: dict[ValueId, RebuildValue] = {v.id: v for v in problem.values}
        self.units: dict[UnitId, RebuildUnit] = {u.id: u for u in problem.units}
        carries = [(value.id, stop) for value in problem.values for stop in value.stops]
        runs = [(name, stop) for stop, chain in problem.chains.items() for name in chain]
        self.carry: dict[Carry, int] = {each: i for i, each in enumerate(carries)}
        self.run: dict[Run, int] = {each: len(carries) + i for i, each in enumerate(runs)}
        self._run_rows: dict[Run, Row] = {}
        self._at_stop: dict[int, tuple[int, list[tuple[Term, RebuildValue | None]]]] = {}
        self.rules = tuple(self._rules())
        self.op_rows = self._op_rows()

    @functools.cached_property
    def highest_rows(self) -> list[Row]:
        """Of the moments of ops, those that can be the peak: no other is ever higher than all of these."""
        return outstanding(self.op_rows)

    @property
    def unknowns(self) -> int:
        return len(self.carry) + len(self.run)

    def families(self, groups: int) -> list[int]:
        """The class of every unknown: those that are the same decision in neighbouring copies of one block are one. The
        copies are taken in as many `groups`."""
        classes: dict[object, int] = {}
        carries, runs = self.problem.carries_alike, self.problem.runs_alike
        keys: list[object] = [("carry", _group(carries[c], groups) if c in carries else c) for c in self.carry]
        keys += [("run", _group(runs[r], groups) if r in runs else r) for r in self.run]
        return [classes.setdefault(key, len(classes)) for key in keys]

    def answer(self, ones: frozenset[int]) -> RebuildAnswer:
        """What the unknowns that are 1 stand for."""
        rebuilt = frozenset(run for run, unknown in self.run.items() if unknown in ones)
        carried = frozenset(carry for carry, unknown in self.carry.items() if unknown in ones)
        cost_ns = sum(self.problem.cost_ns(self.units[name], stop) for name, stop in rebuilt)
        return RebuildAnswer(carried, rebuilt, self.height(ones), cost_ns)

    def ones(self, answer: RebuildAnswer) -> frozenset[int]:
        """The other way."""
        return frozenset((*(self.carry[c] for c in answer.carried), *(self.run[r] for r in answer.rebuilt)))

    def height(self, ones: frozenset[int]) -> int:
        """The peak of a choice."""
        while_rebuilding = (self.run_row(*run) for run, unknown in self.run.items() if unknown in ones)
        return max((row.height(ones) for row in (*self.highest_rows, *while_rebuilding)), default=0)

    # -- what must hold ---------------------------------------------------------------------------------------

    def _rules(self) -> Iterator[Rule]:
        for value in self.problem.values:
            present: tuple[int, ...] | None = None  # None: it is there in any case
            for stop in value.stops:
                here = self._here(value, stop)
                if present is not None:
                    yield Rule(present, self.carry[value.id, stop])
                present = here
                if value.wanted_at(stop):
                    yield Rule(here, None)
                    present = None
        for (name, stop), rebuilt in self.run.items():
            for v in self.units[name].reads:
                operand = self.values[v]
                if not operand.within(stop):
                    yield Rule(self._here(operand, stop), rebuilt)

    def _here(self, value: RebuildValue, stop: int) -> tuple[int, ...]:
        """The unknowns one of which must be 1 for the value to be there at a stop."""
        into = self.carry[value.id, stop]
        rebuilt = self.run.get((value.maker, stop)) if value.maker is not None else None
        return (into,) if rebuilt is None else (into, rebuilt)

    # -- the memory -------------------------------------------------------------------------------------------

    def _op_rows(self) -> tuple[Row, ...]:
        """During every op of the step, after what was rebuilt just before it."""
        fixed = list(self.problem.during_bytes)
        terms: list[list[Term]] = [[] for _ in fixed]
        for value in self.problem.values:
            for at, unknown in self._presence(value):
                if unknown is None:
                    fixed[at] += value.size_bytes
                else:
                    terms[at].append((unknown, value.size_bytes))
        for value in self.problem.values:
            after = next((stop for stop in value.stops if stop >= value.end), None)
            if after is not None and value.overwritten:
                # A result has taken these bytes; where the value is carried on, it needs bytes of its own.
                terms[value.end - 1].append((self.carry[value.id, after], value.size_bytes))
        return tuple(Row(f, tuple(t)) for f, t in zip(fixed, terms, strict=True))

    def _presence(self, value: RebuildValue) -> Iterator[tuple[int, int | None]]:
        """(position, the unknown that says whether the value is there during that op; None: it is)."""
        for first, last in value.episodes:
            for at in range(first, last + 1):
                yield at, None
        before = value.start
        for stop in value.stops:
            into = self.carry[value.id, stop]
            # At a stop that is no use, the value is there during the op itself only if it is carried on.
            begin = max(before, max(last for first, last in value.episodes if first < stop) + 1)
            for at in range(begin, stop):
                yield at, into
            before = stop

    def run_row(self, name: UnitId, stop: int) -> Row:
        """While a unit is rebuilt at a stop."""
        known = self._run_rows.get((name, stop))
        if known is None:
            known = self._run_rows[name, stop] = self._run_row(name, stop)
        return known

    def _run_row(self, name: UnitId, stop: int) -> Row:
        chain = self.problem.chains[stop]
        step, unit = chain.index(name), self.units[name]
        inside = unit.extra_bytes + unit.given_bytes  # if it is run: the row holds for answers without the unit too
        terms: list[Term] = [(self.run[name, stop], inside)] if inside else []
        fixed, others = self._others(stop)
        for term, value in others:
            if value is None:
                terms.append(term)
                continue
            made = chain.index(value.maker) if value.maker in chain else len(chain)
            last = max((i for i, other in enumerate(chain) if value.id in self.units[other].reads), default=-1)
            wanted = value.wanted_at(stop) or step < last or step == made
            if step == last and not wanted:
                # While earlier ops of the unit run it is there in any case; and of several only one is overwritten.
                wanted = len(unit.ops) > 1 or unit.overwrites != value.id
            if wanted:
                terms.append(term)
                if step >= made:
                    terms.append((self.run[chain[made], stop], value.size_bytes))
            elif (j := bisect.bisect_left(value.stops, stop)) + 1 < len(value.stops):
                terms.append((self.carry[value.id, value.stops[j + 1]], value.size_bytes))
        return Row(fixed, tuple(terms))

    def _others(self, stop: int) -> tuple[int, list[tuple[Term, RebuildValue | None]]]:
        """What is there at a stop whichever unit is rebuilt: bytes, and in the order of the values the term of each;
        with the value itself where it may stop there, for then the unit matters."""
        known = self._at_stop.get(stop)
        if known is not None:
            return known
        fixed = self.problem.before_bytes[stop]
        others: list[tuple[Term, RebuildValue | None]] = []
        for value in self.problem.values:
            if stop <= value.start:
                continue
            if value.within(stop):
                fixed += value.size_bytes
                continue
            j = bisect.bisect_left(value.stops, stop)
            if j < len(value.stops):
                term = (self.carry[value.id, value.stops[j]], value.size_bytes)
                others.append((term, value if value.stops[j] == stop else None))
        self._at_stop[stop] = fixed, others
        return fixed, others


def _group(alike: Alike, groups: int) -> tuple[tuple[int, ...], int]:
    return alike.family, alike.copy * min(groups, alike.copies) // alike.copies


def outstanding(rows: Iterable[Row]) -> list[Row]:
    """Of moments with the same terms, the highest; and only those that can be the peak at all."""
    highest: dict[tuple[Term, ...], Row] = {}
    for row in rows:
        held = highest.get(row.terms)
        if held is None or held.fixed_bytes < row.fixed_bytes:
            highest[row.terms] = row
    sure = max((row.fixed_bytes for row in highest.values()), default=0)
    return [row for row in highest.values() if row.fixed_bytes + sum(size for _, size in row.terms) >= sure]
