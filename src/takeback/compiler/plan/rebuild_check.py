"""A `RebuildProblem` and a `RebuildAnswer` come in; a wrong answer raises `PlanError`, naming units, values, positions.

The step is walked op by op with a set of the values that are there, which shares no code with the solver, nor with
the rows it solves. What holds afterwards: whatever an op or a unit reads is there, carried from where it was or rebuilt
just before; the answer costs what it says; and at no moment are more bytes alive than it says. (It may say a little
more: the rows keep a value for the last unit of a stop that could read it, the walk for the last that does.)
"""

from __future__ import annotations

from takeback.compiler.plan.rebuild_problem import RebuildAnswer, RebuildProblem, RebuildUnit, UnitId, ValueId
from takeback.errors import PlanError

WHAT_TO_DO = "The plan must not be run; this is a bug in whatever made it."


def check_answer(problem: RebuildProblem, answer: RebuildAnswer) -> None:
    """Raises `PlanError` unless the answer can be carried out, at its cost and below its peak."""
    units = {unit.id: unit for unit in problem.units}
    stops = {(value.id, stop) for value in problem.values for stop in value.stops}
    offers = {(name, stop) for stop, chain in problem.chains.items() for name in chain}
    for value, stop in sorted(answer.carried - stops):
        raise PlanError(f"Value {value} is carried to op {stop}, which is no stop of it. {WHAT_TO_DO}")
    for name, stop in sorted(answer.rebuilt - offers):
        raise PlanError(f"Unit {name} is rebuilt before op {stop}, where the problem has none. {WHAT_TO_DO}")
    cost_ns = sum(problem.cost_ns(units[name], stop) for name, stop in answer.rebuilt)
    if cost_ns != answer.cost_ns:
        raise PlanError(f"What is rebuilt takes {cost_ns} ns, not {answer.cost_ns}. {WHAT_TO_DO}")
    _Walk(problem, answer, units).walk()


class _Walk:
    """The step as it would run, one position after the other."""

    def __init__(self, problem: RebuildProblem, answer: RebuildAnswer, units: dict[UnitId, RebuildUnit]) -> None:
        self._problem, self._answer, self._units = problem, answer, units
        self._size = {value.id: value.size_bytes for value in problem.values}
        ops = range(len(problem.during_bytes))
        self._made: list[set[ValueId]] = [set() for _ in ops]  # by op: for the first time
        self._used: list[set[ValueId]] = [set() for _ in ops]  # made, or read, or between two reads of one episode
        self._stays: list[set[ValueId]] = [set() for _ in ops]  # from this op to the next, for its episode's sake
        self._carried: list[set[ValueId]] = [set() for _ in ops]  # from this op to the next, because the answer says so
        self._beside: list[set[ValueId]] = [set() for _ in ops]  # carried on beside the result that takes its bytes
        for value in problem.values:
            self._made[value.episodes[0][0]].add(value.id)
            for first, last in value.episodes:
                for at in range(first, last + 1):
                    self._used[at].add(value.id)
                    if at < last:
                        self._stays[at].add(value.id)
            for number, stop in enumerate(value.stops):
                if (value.id, stop) in answer.carried:
                    left = max(last for first, last in value.episodes if first < stop)
                    since = max(left, value.stops[number - 1]) if number else left
                    for at in range(since, stop):
                        self._carried[at].add(value.id)
            if value.overwritten and value.id in self._carried[value.episodes[-1][1]]:
                self._beside[value.episodes[-1][1]].add(value.id)

    def walk(self) -> None:
        there: set[ValueId] = set()
        todo: dict[int, list[UnitId]] = {}
        for name, stop in sorted(self._answer.rebuilt):
            todo.setdefault(stop, []).append(name)
        for at in range(len(self._problem.during_bytes)):
            there = self._rebuild(at, todo.get(at, []), there) | self._made[at]
            during = self._used[at] | self._carried[at]
            for v in sorted(during - there):
                what = f"Op {at} reads value {v}" if v in self._used[at] else f"Value {v} is carried on from op {at}"
                raise PlanError(f"{what}, but it was neither carried there nor rebuilt. {WHAT_TO_DO}")
            level = self._problem.during_bytes[at] + self._bytes(during) + self._bytes(self._beside[at])
            self._at_most(level, f"during op {at}")
            there = self._stays[at] | self._carried[at]

    def _rebuild(self, at: int, todo: list[UnitId], there: set[ValueId]) -> set[ValueId]:
        """What is there after everything is rebuilt that is just before the op, in the order of the ops."""
        wanted = self._used[at] | self._carried[at]
        for i, name in enumerate(todo):
            unit = self._units[name]
            for v in unit.reads:
                if v not in there:
                    what = f"Unit {name} is rebuilt before op {at} from value {v}"
                    raise PlanError(f"{what}, but that was neither carried there nor rebuilt. {WHAT_TO_DO}")
            needed = there & wanted.union(*(self._units[later].reads for later in todo[i + 1 :]))
            held = needed.union(unit.reads)
            # The result of a single op takes the bytes of an operand that nobody reads after it.
            if len(unit.ops) == 1 and unit.overwrites is not None and unit.overwrites not in needed:
                held.discard(unit.overwrites)
            level = self._problem.before_bytes[at] + unit.given_bytes + unit.extra_bytes
            self._at_most(level + self._bytes(held.union(unit.gives)), f"while unit {name} is rebuilt before op {at}")
            there = needed.union(unit.gives)
        return there

    def _bytes(self, values: set[ValueId]) -> int:
        return sum(self._size[v] for v in values)

    def _at_most(self, level_bytes: int, when: str) -> None:
        if level_bytes > self._answer.peak_bytes:
            what = f"{level_bytes} bytes are alive {when}, above the peak of {self._answer.peak_bytes}"
            raise PlanError(f"{what}. {WHAT_TO_DO}")
