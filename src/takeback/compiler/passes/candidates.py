"""What of a draft could be rebuilt, and where: a `Draft` and the cost of its ops come in, a `RebuildProblem` goes out.

A value of the problem is an internal buffer with one maker; a unit is an op with the makers of what only that op reads,
so that values nobody would carry are no unknowns. What is not worth an unknown is always carried: a value below a small
share of the peak, a gap of a few ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from takeback.compiler.ownership.curve import alive_bytes, inside_bytes
from takeback.compiler.ownership.facts import EMPTY, geometry_refusal, overwritable_operands
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.passes.choice import fixed_buffers
from takeback.compiler.passes.draft import Choice, Draft, Overwrites, Rebuild, owner_of
from takeback.compiler.passes.join import may_join
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.rebuildable import may_rebuild, rebuild_gives, rebuild_reads, stand_in
from takeback.compiler.passes.repeats import repeats
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
from takeback.compiler.program import BufferId, Cluster, Op, Region

_LEAST_SHARE = 0.0005  #: of the peak; smaller values are always carried
_SHORT_GAP = 4  #: ops; over fewer a value is always carried
_LONGEST_CHAIN = 16  #: units that one stop may rebuild
_MOST_PAIRS = 1000  #: units over all stops; with more the chains are cut shorter
NS = 1_000_000_000  #: in a second


def candidates(draft: Draft, seconds: Callable[[Op], float]) -> RebuildProblem:
    """The problem of what to rebuild. Its ids are those of the program: a value is called like its buffer, a unit like
    the position of its last op."""
    return _Candidates(draft, seconds).problem()


def choice_of(problem: RebuildProblem, answer: RebuildAnswer) -> Choice:
    """The ops that an answer runs again, and where."""
    ops = {unit.id: unit.ops for unit in problem.units}
    return Choice(tuple(sorted({Rebuild(stop, op) for name, stop in answer.rebuilt for op in ops[name]})))


@dataclass(frozen=True)
class _Unit:
    """Ops that are rebuilt together; the last of them names it."""

    ops: tuple[int, ...]
    reads: tuple[BufferId, ...]  #: of any kind; the problem's unit names the values among them
    gives: tuple[BufferId, ...]
    seconds: float
    extra_bytes: int


class _Candidates:
    """The tables that a problem is put together from."""

    def __init__(self, draft: Draft, seconds: Callable[[Op], float]) -> None:
        program = self._program = draft.program
        self._device = program.device_type
        self._seconds = seconds
        placed = overwrite(draft)
        self._slots = {b: owner_of(placed, b) for b in placed.placements}
        self._curve = alive_bytes(program, self._slots, draft.kept)
        self._alive = lifetimes(program, draft.kept)
        self._fixed = fixed_buffers(draft)
        self._taken: dict[int, set[BufferId]] = {}  # by op: the operand that its result overwrites
        for placement in placed.placements.values():
            if isinstance(placement, Overwrites):
                self._taken.setdefault(placement.op, set()).add(placement.buffer)
        self._written: dict[BufferId, list[int]] = {}
        self._uses: dict[BufferId, list[int]] = {}
        maker: dict[BufferId, int] = {}
        for position, op in enumerate(program.ops):
            for b in op.mutates:
                self._written.setdefault(b, []).append(position)
            for b in dict.fromkeys(r.buffer for r in op.inputs if op.target not in EMPTY):
                self._uses.setdefault(b, []).append(position)
            for r in op.outputs:
                maker.setdefault(r.buffer, position)
        least = int(max(self._curve, default=0) * _LEAST_SHARE)
        self._values: dict[BufferId, RebuildValue] = {}
        for b, life in self._alive.items():
            size = program.buffers[b].size_bytes
            if b not in self._fixed and maker.get(b) == life.start and size > least:
                value = RebuildValue(ValueId(b), size, _episodes(life.start, self._uses.get(b, [])))
                assert value.end == life.end, "a buffer with one maker dies at its last use"
                self._values[b] = value
        self._units = self._find_units()
        for position, unit in self._units.items():
            for b in unit.gives:
                if b in self._values:
                    self._values[b] = replace(self._values[b], maker=UnitId(position))
        self._chains = self._find_chains()
        self._places = repeats(program)

    def problem(self) -> RebuildProblem:
        values = tuple(self._with_stops())
        chains = {stop: tuple(UnitId(name) for name in chain) for stop, chain in self._chains.items()}
        return RebuildProblem(
            values,
            tuple(self._problem_unit(name, unit) for name, unit in self._units.items()),
            chains,
            tuple(self._during()),
            tuple(self._before()),
            sum(round(self._seconds(op) * NS) for op in self._program.ops),
            dict(self._carries_alike(values)),
            dict(self._runs_alike()),
            dict(self._joined()),
        )

    # -- which ops at which stops -----------------------------------------------------------------------------

    def _find_units(self) -> dict[int, _Unit]:
        units: dict[int, _Unit] = {}
        inlined: dict[BufferId, int] = {}
        for position, op in enumerate(self._program.ops):
            if not may_rebuild(op, self._device):
                continue
            ops, buffers = [position], []
            for b in dict.fromkeys(r.buffer for r in rebuild_reads(op, self._device)):
                made = inlined.get(b)
                if made is None or made not in units:
                    buffers.append(b)
                    continue
                unit = units.pop(made)
                del self._values[b]
                ops = [*unit.ops, *ops]
                buffers += unit.reads
            given = tuple(dict.fromkeys(r.buffer for r in rebuild_gives(op, self._device)))
            ops = sorted(set(ops))
            extra = self._inside(ops)
            total = sum(self._seconds(stand_in(self._program.ops[i], self._device)) for i in ops)
            units[position] = _Unit(tuple(ops), tuple(dict.fromkeys(buffers)), given, total, extra)
            # What one other op reads soon, and nobody later, is rebuilt by that op's unit.
            big = [b for b in given if b in self._values]
            if len(big) == 1 and len(self._values[big[0]].episodes) == 1 and len(self._uses.get(big[0], ())) == 1:
                reader = self._program.ops[self._uses[big[0]][0]]
                read = (
                    {r.buffer for r in rebuild_reads(reader, self._device)} if may_rebuild(reader, self._device) else ()
                )
                if big[0] in read:
                    inlined[big[0]] = position
        return units

    def _problem_unit(self, name: int, unit: _Unit) -> RebuildUnit:
        def among(buffers: tuple[BufferId, ...]) -> tuple[ValueId, ...]:
            return tuple(ValueId(b) for b in buffers if b in self._values)

        overwritten = self._overwritten(name, self._values.keys())
        return RebuildUnit(
            UnitId(name),
            unit.ops,
            among(unit.reads),
            among(unit.gives),
            round(unit.seconds * NS),
            sum(self._program.buffers[b].size_bytes for b in unit.gives if b not in self._values),
            unit.extra_bytes,
            None if overwritten is None else ValueId(overwritten),
        )

    def _inside(self, ops: Sequence[int]) -> int:
        """The most bytes that running these ops takes above what they read and what the last of them gives."""
        program = self._program
        last = {r.buffer for r in rebuild_gives(program.ops[ops[-1]], self._device)}
        result = sum(program.buffers[b].size_bytes for b in last)
        held: dict[BufferId, int] = {}
        most = 0
        for k, i in enumerate(ops):
            op = program.ops[i]
            level = sum(held.values()) + inside_bytes(op, {})
            later = {r.buffer for j in ops[k + 1 :] for r in rebuild_reads(program.ops[j], self._device)}
            dying = [b for b in held if b not in later]
            taken = held[overwritten] if (overwritten := self._overwritten(i, dying)) is not None else 0
            new = {r.buffer: program.buffers[r.buffer].size_bytes for r in rebuild_gives(op, self._device)}
            level += sum(new.values()) - taken
            most = max(most, level - result)
            for b in dying:
                del held[b]
            if k < len(ops) - 1:
                held |= new
        return max(most, 0)

    def _overwritten(self, position: int, dying: Collection[BufferId]) -> BufferId | None:
        """The first operand among those dying whose bytes the op's result may take: one is all it takes."""
        op = self._program.ops[position]
        result = op.results[0] if op.results else None
        for index in overwritable_operands(op):
            operand = op.args[index]
            if not isinstance(operand, Region) or not isinstance(result, Region) or operand.buffer not in dying:
                continue
            if geometry_refusal(op, result, operand, self._program.buffers) is None:
                return operand.buffer
        return None

    def _find_chains(self) -> dict[int, list[int]]:
        """By stop: the units that may be rebuilt there, in order."""
        roots: dict[int, list[int]] = {}
        for value in self._values.values():
            if value.maker is not None:
                for first, _ in value.episodes[1:]:
                    roots.setdefault(first, []).append(value.maker)
        longest = min(_LONGEST_CHAIN, max(_MOST_PAIRS // max(len(roots), 1), 4))
        chains: dict[int, list[int]] = {}
        for stop, makers in sorted(roots.items()):
            chain: dict[int, None] = {}
            front = list(dict.fromkeys(makers))
            while front and len(chain) < longest:
                front.sort()
                name = front.pop()  # the nearest first
                if name in chain or not self._legal(self._units[name], stop):
                    continue
                chain[name] = None
                for b in self._units[name].reads:
                    operand = self._values.get(b)
                    if operand is not None and operand.maker is not None and not operand.within(stop):
                        front.append(operand.maker)
            if chain:
                chains[stop] = sorted(chain)
        return chains

    def _with_stops(self) -> Iterator[RebuildValue]:
        """The values, with a stop wherever a gap ends or a unit that touches them may be rebuilt."""
        stops: dict[BufferId, set[int]] = {}
        for stop, chain in self._chains.items():
            for name in chain:
                for b in (*self._units[name].reads, *self._units[name].gives):
                    stops.setdefault(b, set()).add(stop)
        for b, value in self._values.items():
            here = {stop for stop in stops.get(b, ()) if not value.within(stop)}
            here |= {first for first, _ in value.episodes[1:]}
            taken = b in self._taken.get(value.end - 1, ())
            yield replace(value, stops=tuple(sorted(here)), overwritten=taken)

    def _legal(self, unit: _Unit, stop: int) -> bool:
        """True if what the unit read is unchanged at the stop, or can be carried there."""
        if unit.ops[-1] >= stop:
            return False
        for position in unit.ops:
            for region in rebuild_reads(self._program.ops[position], self._device):
                b = region.buffer
                if any(position <= w < stop for w in self._written.get(b, ())):
                    return False
                if b in self._fixed and b in self._alive and self._alive[b].end <= stop:
                    return False  # would have to live longer, and something else may own its place by then
        return True

    def _joined(self) -> Iterator[tuple[Run, int]]:
        """What a unit costs where the cluster that it is rebuilt beside will make it (join.py): that reads most of what
        it is made of anyway."""
        ops = self._program.ops
        for stop, chain in self._chains.items():
            beside = [ops[i] for i in (stop, stop - 1) if i >= 0 and isinstance(ops[i].target, Cluster)]
            for name in chain if beside else ():
                unit = self._units[name]
                parts = [stand_in(ops[i], self._device) for i in unit.ops]
                host = next((op for op in beside if all(may_join(part, op, self._program) for part in parts)), None)
                if host is not None:
                    there = {r.buffer for r in host.inputs}
                    moved = {r.buffer for r in rebuild_gives(ops[name], self._device)} | set(unit.reads) - there
                    whole = {r.buffer for part in parts for r in (*part.inputs, *part.outputs)}
                    sizes = self._program.buffers
                    share = sum(sizes[b].size_bytes for b in moved) / max(1, sum(sizes[b].size_bytes for b in whole))
                    yield (UnitId(name), stop), round(min(share, 1.0) * unit.seconds * NS)

    # -- the memory besides the values ------------------------------------------------------------------------

    def _during(self) -> list[int]:
        """By op: the bytes that are alive while it runs, less those of the values."""
        change = [0] * (len(self._curve) + 1)
        for value in self._values.values():
            change[value.start] -= value.size_bytes
            change[value.end] += value.size_bytes
        return [level + less for level, less in zip(self._curve, itertools.accumulate(change[:-1]), strict=True)]

    def _before(self) -> list[int]:
        """By op: the bytes that are alive just before it, less those of the values."""
        buffers, ops = self._program.buffers, self._program.ops
        windows: dict[BufferId, list[int]] = {}
        for buffer, life in self._alive.items():
            window = windows.setdefault(self._slots.get(buffer, buffer), [life.start, life.end])
            window[0], window[1] = min(window[0], life.start), max(window[1], life.end)
        change = [0] * (len(ops) + 2)
        spans = [(start, end, buffers[owner].size_bytes) for owner, (start, end) in windows.items()]
        spans += [(value.start, value.end, -value.size_bytes) for value in self._values.values()]
        for start, end, size in spans:
            if start + 1 < end:
                change[start + 1] += size
                change[end] -= size
        level, levels = 0, []
        for position in range(len(ops)):
            level += change[position]
            levels.append(level)
        return levels

    # -- what the step repeats --------------------------------------------------------------------------------

    def _carries_alike(self, values: Sequence[RebuildValue]) -> Iterator[tuple[Carry, Alike]]:
        for value in values:
            result = [r.buffer for r in self._program.ops[value.start].outputs].index(BufferId(value.id))
            for stop in value.stops:
                alike = self._same_decision(value.start, stop)
                if alike is not None:
                    yield (value.id, stop), replace(alike, family=(*alike.family, result))

    def _runs_alike(self) -> Iterator[tuple[Run, Alike]]:
        for stop, chain in self._chains.items():
            for name in chain:
                alike = self._same_decision(name, stop)
                if alike is not None:
                    yield (UnitId(name), stop), alike

    def _same_decision(self, op: int, stop: int) -> Alike | None:
        """What the copies of one block decide on alike: those with the same distance between maker and reader."""
        maker, reader = self._places.get(op), self._places.get(stop)
        if maker is None or reader is None:
            return None
        # The backward takes the copies in the opposite order.
        opposite = self._program.ops[op].phase is not self._program.ops[stop].phase
        apart = maker.copy + reader.copy if opposite else maker.copy - reader.copy
        return Alike((maker.run, maker.offset, reader.run, reader.offset, apart), maker.copy, maker.copies)


def _episodes(start: int, uses: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Uses that follow one another closely make one episode."""
    found = [(start, start)]
    for use in uses:
        first, last = found[-1]
        if use - last <= _SHORT_GAP:
            found[-1] = (first, use)
        else:
            found.append((use, use))
    return tuple(found)
