"""What could be dropped and rebuilt, as a `RebuildProblem`; what is, as a `RebuildAnswer`: plain integers, checked when
a problem is built.

A *value* is made once and read in *episodes*; between them lie gaps, over which it may be carried or not. A *stop* is a
moment in a gap, or its end, at which the value may be wanted:

    episode 0          gap                       episode 1
    |make . use|......... stop .......... stop = |use . use|
               carried?         carried?
                         rebuilt?         rebuilt?

At a stop the value must be there if something reads it: an op of the step, or a unit that is rebuilt just there, before
the op. A *unit* is some ops that are rebuilt together. Two kinds of unknowns, all 0 or 1: is a value carried into a
stop; is a unit rebuilt at a stop. After its last stop a value is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

ValueId = NewType("ValueId", int)
UnitId = NewType("UnitId", int)  #: the position of the unit's last op, so that units run in the order of their ids

Carry = tuple[ValueId, int]  #: the value is carried into the stop
Run = tuple[UnitId, int]  #: the unit is rebuilt at the stop


@dataclass(frozen=True, slots=True)
class RebuildValue:
    """A value that may be dropped, or carried longer than it is now."""

    id: ValueId
    size_bytes: int
    episodes: tuple[tuple[int, int], ...]  #: closed intervals of positions; the first begins where the value is made
    stops: tuple[int, ...] = ()
    maker: UnitId | None = None  #: the unit that makes it again, if one may
    overwritten: bool = False  #: at its last use a result takes its bytes; carried on, it needs bytes of its own

    @property
    def start(self) -> int:
        return self.episodes[0][0]

    @property
    def end(self) -> int:
        """The position after its last use."""
        return self.episodes[-1][1] + 1

    def within(self, at: int) -> bool:
        """True if the value is there just before the op at `at` in any case."""
        return any(first < at <= last for first, last in self.episodes)

    def wanted_at(self, at: int) -> bool:
        """True if an episode after a gap begins at `at`."""
        return any(first == at for first, _ in self.episodes[1:])


@dataclass(frozen=True, slots=True)
class RebuildUnit:
    """Ops that are rebuilt together, by position."""

    id: UnitId
    ops: tuple[int, ...]
    reads: tuple[ValueId, ...]
    gives: tuple[ValueId, ...]
    cost_ns: int
    given_bytes: int = 0  #: of results that are no values of the problem
    extra_bytes: int = 0  #: how far it rises inside above what it reads and gives
    overwrites: ValueId | None = None  #: of what it reads, the value whose bytes its result takes if it dies there


@dataclass(frozen=True, slots=True)
class Alike:
    """Unknowns of one `family` are the same decision in the copies of a block that the step repeats."""

    family: tuple[int, ...]
    copy: int
    copies: int


@dataclass(frozen=True)
class RebuildProblem:
    """All of a step that the choice of what to rebuild depends on. Positions are those of its ops."""

    values: tuple[RebuildValue, ...]
    units: tuple[RebuildUnit, ...]
    chains: Mapping[int, tuple[UnitId, ...]]  #: by stop: the units that may be rebuilt there, in order
    during_bytes: tuple[int, ...]  #: by op: alive while it runs, besides the values
    before_bytes: tuple[int, ...]  #: by op: alive just before it, besides the values
    step_ns: int  #: what the step takes without rebuilding
    carries_alike: Mapping[Carry, Alike] = field(default_factory=dict)  #: those that no other is like are not named
    runs_alike: Mapping[Run, Alike] = field(default_factory=dict)
    joined_ns: Mapping[Run, int] = field(default_factory=dict)  #: where a unit costs less, because a reader makes it

    def cost_ns(self, unit: RebuildUnit, stop: int) -> int:
        """What rebuilding a unit at a stop costs."""
        return self.joined_ns.get((unit.id, stop), unit.cost_ns)

    def __post_init__(self) -> None:
        values = {v.id: v for v in self.values}
        units = {u.id: u for u in self.units}
        if len(values) != len(self.values) or len(units) != len(self.units):
            raise ValueError("two values or two units have one id")
        if len(self.during_bytes) != len(self.before_bytes):
            raise ValueError(f"{len(self.during_bytes)} ops, but {len(self.before_bytes)} moments before them")
        for value in self.values:
            edges = [at for episode in value.episodes for at in episode]
            if value.size_bytes < 0 or not edges or edges != sorted(edges) or edges[-1] >= len(self.during_bytes):
                raise ValueError(f"value {value.id} has no such size or episodes: {value.size_bytes}, {value.episodes}")
            wanted = {first for first, _ in value.episodes[1:]}
            if list(value.stops) != sorted({*value.stops, *wanted}) or any(value.within(s) for s in value.stops):
                raise ValueError(f"value {value.id} needs stops in its gaps and where they end, got {value.stops}")
            if value.maker is not None and value.id not in units[value.maker].gives:
                raise ValueError(f"value {value.id} is not given by its maker, unit {value.maker}")
        for unit in self.units:
            if not unit.ops or unit.ops[-1] != unit.id or unit.cost_ns < 0:
                raise ValueError(f"unit {unit.id} must end with the op it is named by, and cost nothing or more")
        for stop, chain in self.chains.items():
            if list(chain) != sorted(set(chain)):
                raise ValueError(f"the units at stop {stop} are not in order: {chain}")
            for name in chain:
                touched = (values[v] for v in (*units[name].reads, *units[name].gives))
                if name >= stop or any(stop not in v.stops and not v.within(stop) for v in touched):
                    raise ValueError(
                        f"unit {name} cannot be rebuilt at stop {stop}: what it touches does not stop there"
                    )


@dataclass(frozen=True)
class RebuildAnswer:
    """What is carried and what is rebuilt. The peak is that of the problem's rows (rebuild_rows.py): what it comes to
    in the program may be a little less, where a result takes the bytes of what dies there."""

    carried: frozenset[Carry]
    rebuilt: frozenset[Run]
    peak_bytes: int
    cost_ns: int


def kept_bytes(problem: RebuildProblem) -> list[int]:
    """By op: the bytes that are alive while it runs if nothing is rebuilt."""
    change = [0] * (len(problem.during_bytes) + 1)
    for value in problem.values:
        change[value.start] += value.size_bytes
        change[value.end] -= value.size_bytes
    carried = itertools.accumulate(change[:-1])
    return [during + level for during, level in zip(problem.during_bytes, carried, strict=True)]
