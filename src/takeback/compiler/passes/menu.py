"""What could be dropped and where it could be rebuilt: the unknowns of the choice, and the memory each choice needs.

A *value* here is an internal buffer with one maker. Its uses fall into *episodes*; between them lie gaps, over which it
may be carried or not. A *stop* is a moment in a gap, or its end, at which the value may be wanted:

    episode 0          gap                       episode 1
    |make . use|......... stop .......... stop = |use . use|
               carried?         carried?
                         rebuilt?         rebuilt?

At a stop the value must be there if something reads it: an op of the step, or a unit that is run again just there. A
*unit* is an op with the makers of what only that op reads, so that values nobody would carry are no unknowns. Two kinds
of unknowns remain, all 0 or 1: is a value carried into a stop; is a unit run again at a stop.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from takeback.compiler.ownership.curve import alive_bytes, inside_bytes
from takeback.compiler.ownership.facts import geometry_refusal, overwritable_operands
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.passes.again import gives, may_run_again, reads, stand_in
from takeback.compiler.passes.choice import Choice, Rebuild, fixed_buffers
from takeback.compiler.passes.draft import Draft, Overwrites, slot_of
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.repeats import Place, repeats
from takeback.compiler.program import BufferId, Op, Region

_LEAST_SHARE = 0.0005  #: of the peak; smaller values are always carried
_SHORT_GAP = 4  #: ops; over fewer a value is always carried
_LONGEST_CHAIN = 16  #: units that one stop may run again
_MOST_PAIRS = 1000  #: units over all stops; with more the chains are cut shorter


@dataclass
class Value:
    """A buffer that may be dropped, or kept longer than it is now."""

    buffer: BufferId
    size_bytes: int
    start: int
    episodes: list[tuple[int, int]]  #: closed intervals of positions
    maker: int | None = None  #: the unit that makes it again, if one may
    stops: list[int] = field(default_factory=list)

    def within(self, at: int) -> bool:
        """True if the value is there at `at` in any case."""
        return any(first < at <= last for first, last in self.episodes)

    def starts_at(self, at: int) -> bool:
        """True if an episode after a gap begins at `at`."""
        return any(first == at for first, _ in self.episodes[1:])


@dataclass(frozen=True)
class Unit:
    """Ops that are run again together; named by the position of the last."""

    ops: tuple[int, ...]
    reads: tuple[BufferId, ...]
    gives: tuple[BufferId, ...]
    seconds: float
    extra_bytes: int  #: how far it rises inside above what it reads and gives


Term = tuple[int, int]  #: (unknown, bytes if it is 1)


@dataclass(frozen=True)
class Row:
    """At one moment: `fixed_bytes` and the terms together must not exceed the peak."""

    fixed_bytes: int
    terms: tuple[Term, ...]


class Menu:
    """Everything the solver needs to know of a draft."""

    def __init__(self, draft: Draft, seconds: Callable[[Op], float]) -> None:
        program = self.program = draft.program
        self._device = program.device_type
        placed = overwrite(draft)
        slots = {b: slot_of(placed, b) for b in placed.placements}
        self.curve = alive_bytes(program, slots, draft.kept)
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
            for b in dict.fromkeys(r.buffer for r in op.inputs):
                self._uses.setdefault(b, []).append(position)
            for r in op.outputs:
                maker.setdefault(r.buffer, position)
        least = int(max(self.curve, default=0) * _LEAST_SHARE)
        self.values: dict[BufferId, Value] = {}
        for b, life in self._alive.items():
            size = program.buffers[b].size_bytes
            if b not in self._fixed and maker.get(b) == life.start and size > least:
                self.values[b] = Value(b, size, life.start, _episodes(life.start, self._uses.get(b, [])))
        self.units = self._units(maker, seconds)
        for position, unit in self.units.items():
            for b in unit.gives:
                if b in self.values:
                    self.values[b].maker = position
        self.chains = self._chains()
        self._add_stops()
        self.carry: dict[tuple[BufferId, int], int] = {}
        self.rebuild: dict[tuple[int, int], int] = {}
        for value in self.values.values():
            for stop in value.stops:
                self.carry[value.buffer, stop] = len(self.carry)
        for stop, chain in self.chains.items():
            for name in chain:
                self.rebuild[name, stop] = len(self.carry) + len(self.rebuild)
        self._before = self._levels_before(slots)

    @property
    def unknowns(self) -> int:
        return len(self.carry) + len(self.rebuild)

    def alive_until(self, buffer: BufferId) -> int:
        """The position after its last use."""
        return self._alive[buffer].end

    def choice(self, ones: frozenset[int]) -> Choice:
        """The choice that the unknowns in `ones` stand for."""
        chosen = {
            Rebuild(stop, op)
            for (name, stop), unknown in self.rebuild.items()
            if unknown in ones
            for op in self.units[name].ops
        }
        return Choice(tuple(sorted(chosen)))

    # -- which ops at which stops -----------------------------------------------------------------------------

    def _units(self, maker: Mapping[BufferId, int], seconds: Callable[[Op], float]) -> dict[int, Unit]:
        units: dict[int, Unit] = {}
        inlined: dict[BufferId, int] = {}
        for position, op in enumerate(self.program.ops):
            if not may_run_again(op, self._device):
                continue
            ops, buffers, inner = [position], [], set()
            for b in dict.fromkeys(r.buffer for r in reads(op, self._device)):
                made = inlined.get(b)
                if made is None or made not in units:
                    buffers.append(b)
                    continue
                unit = units.pop(made)
                del self.values[b]
                inner.add(b)
                ops = [*unit.ops, *ops]
                buffers += unit.reads
            given = tuple(dict.fromkeys(r.buffer for r in gives(op, self._device)))
            ops = sorted(set(ops))
            extra = self._inside(ops)
            total = sum(seconds(stand_in(self.program.ops[i], self._device)) for i in ops)
            units[position] = Unit(tuple(ops), tuple(dict.fromkeys(buffers)), given, total, extra)
            # What one other op reads soon, and nobody later, is made again by that op's unit.
            big = [b for b in given if b in self.values]
            if len(big) == 1 and len(self.values[big[0]].episodes) == 1 and len(self._uses.get(big[0], ())) == 1:
                reader = self.program.ops[self._uses[big[0]][0]]
                if may_run_again(reader, self._device) and big[0] in {r.buffer for r in reads(reader, self._device)}:
                    inlined[big[0]] = position
        return units

    def _inside(self, ops: Sequence[int]) -> int:
        """The most bytes that running these ops takes above what they read and what the last of them gives."""
        program = self.program
        last = {r.buffer for r in gives(program.ops[ops[-1]], self._device)}
        result = sum(program.buffers[b].size_bytes for b in last)
        held: dict[BufferId, int] = {}
        most = 0
        for k, i in enumerate(ops):
            op = program.ops[i]
            final = k == len(ops) - 1
            level = sum(held.values()) + inside_bytes(op, {})
            dying = [
                b
                for b in held
                if not any(b == r.buffer for j in ops[k + 1 :] for r in reads(program.ops[j], self._device))
            ]
            taken = held[overwritten] if (overwritten := self._overwritten(i, dying)) is not None else 0
            new = {r.buffer: program.buffers[r.buffer].size_bytes for r in gives(op, self._device)}
            level += sum(new.values()) - taken
            most = max(most, level - result)
            for b in dying:
                del held[b]
            if not final:
                held |= new
        return max(most, 0)

    def _overwritten(self, position: int, dying: Collection[BufferId]) -> BufferId | None:
        """The first operand among those dying whose bytes the op's result may take: one is all it takes."""
        op = self.program.ops[position]
        result = op.results[0] if op.results else None
        for index in overwritable_operands(op):
            operand = op.args[index]
            if not isinstance(operand, Region) or not isinstance(result, Region) or operand.buffer not in dying:
                continue
            if geometry_refusal(op, result, operand, self.program.buffers) is None:
                return operand.buffer
        return None

    def _chains(self) -> dict[int, list[int]]:
        """By stop: the units that may be run again there, in order."""
        roots: dict[int, list[int]] = {}
        for value in self.values.values():
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
                if name in chain or not self._legal(self.units[name], stop):
                    continue
                chain[name] = None
                for b in self.units[name].reads:
                    operand = self.values.get(b)
                    if operand is not None and operand.maker is not None and not operand.within(stop):
                        front.append(operand.maker)
            if chain:
                chains[stop] = sorted(chain)
        return chains

    def _add_stops(self) -> None:
        for stop, chain in self.chains.items():
            touched = {b for name in chain for b in (*self.units[name].reads, *self.units[name].gives)}
            for b in sorted(touched & self.values.keys()):
                if not self.values[b].within(stop):
                    self.values[b].stops.append(stop)
        for value in self.values.values():
            value.stops = sorted({*value.stops, *(first for first, _ in value.episodes[1:])})

    def _legal(self, unit: Unit, stop: int) -> bool:
        """True if what the unit read is unchanged at the stop, or can be carried there."""
        if unit.ops[-1] >= stop:
            return False
        for position in unit.ops:
            for region in reads(self.program.ops[position], self._device):
                b = region.buffer
                if any(position <= w < stop for w in self._written.get(b, ())):
                    return False
                if b in self._fixed and b in self._alive and self._alive[b].end <= stop:
                    return False  # would have to live longer, and something else may own its place by then
        return True

    # -- what must hold ---------------------------------------------------------------------------------------

    def implications(self) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """(those, that): if the unknown `that` is 1, one of `those` must be; None stands for a constant 1."""
        for value in self.values.values():
            present: tuple[int, ...] | None = None  # None: it is there in any case
            for stop in value.stops:
                into = self.carry[value.buffer, stop]
                here = self._here(value, stop)
                if present is not None:
                    yield present, into
                if value.starts_at(stop):
                    yield here, None
                    present = None
                else:
                    present = here
        for (name, stop), again in self.rebuild.items():
            for b in self.units[name].reads:
                operand = self.values.get(b)
                if operand is not None and not operand.within(stop):
                    yield self._here(operand, stop), again

    def _here(self, value: Value, stop: int) -> tuple[int, ...]:
        """The unknowns one of which must be 1 for the value to be there at a stop."""
        into = self.carry[value.buffer, stop]
        again = self.rebuild.get((value.maker, stop)) if value.maker is not None else None
        return (into,) if again is None else (into, again)

    def ties(self, groups: int) -> list[int]:
        """The class of every unknown: those that stand for the same decision in neighbouring copies of one block are
        one. The copies are taken in as many `groups`."""
        places = repeats(self.program)
        classes: dict[object, int] = {}
        found = [0] * self.unknowns
        for (b, stop), unknown in self.carry.items():
            key = self._decision(self.values[b].start, stop, places, groups)
            which = [r.buffer for r in self.program.ops[self.values[b].start].outputs].index(b)
            found[unknown] = classes.setdefault(("carry", which, key), len(classes))
        for (name, stop), unknown in self.rebuild.items():
            key = self._decision(name, stop, places, groups)
            found[unknown] = classes.setdefault(("rebuild", key), len(classes))
        return found

    def _decision(self, op: int, stop: int, places: Mapping[int, Place], groups: int) -> object:
        maker, reader = places.get(op), places.get(stop)
        if maker is None or reader is None:
            return (op, stop)
        # The backward takes the copies in the opposite order.
        opposite = self.program.ops[op].phase is not self.program.ops[stop].phase
        apart = maker.copy + reader.copy if opposite else maker.copy - reader.copy
        group = maker.copy * min(groups, maker.copies) // maker.copies
        return (maker.run, maker.offset, reader.run, reader.offset, apart, group)

    # -- the memory -------------------------------------------------------------------------------------------

    def op_rows(self) -> list[Row]:
        """During every op of the step, after what was rebuilt just before it."""
        terms: list[list[Term]] = [[] for _ in self.curve]
        fixed = list(self.curve)
        for value in self.values.values():
            for at in range(value.start, self._alive[value.buffer].end):
                fixed[at] -= value.size_bytes
            for at, unknown in self._presence(value):
                if unknown is None:
                    fixed[at] += value.size_bytes
                else:
                    terms[at].append((unknown, value.size_bytes))
        for value in self.values.values():
            death = value.episodes[-1][1]
            after = next((stop for stop in value.stops if stop > death), None)
            if after is not None and value.buffer in self._taken.get(death, ()):
                # A result has taken these bytes; where the value is carried on, it needs bytes of its own.
                terms[death].append((self.carry[value.buffer, after], value.size_bytes))
        return [Row(f, tuple(t)) for f, t in zip(fixed, terms, strict=True)]

    def _presence(self, value: Value) -> Iterator[tuple[int, int | None]]:
        """(position, the unknown that says whether the value is there during that op; None: it is)."""
        for first, last in value.episodes:
            for at in range(first, last + 1):
                yield at, None
        before = value.start
        for stop in value.stops:
            into = self.carry[value.buffer, stop]
            # At a stop that is no use, the value is there during the op itself only if it is carried on.
            begin = max(before, max(last for first, last in value.episodes if first < stop) + 1)
            for at in range(begin, stop):
                yield at, into
            before = stop

    def _levels_before(self, slots: Mapping[BufferId, BufferId]) -> list[int]:
        """By position: the bytes that are alive just before the op, less those of the values of the menu."""
        program = self.program
        windows: dict[BufferId, list[int]] = {}
        for buffer, life in self._alive.items():
            window = windows.setdefault(slots.get(buffer, buffer), [life.start, life.end])
            window[0], window[1] = min(window[0], life.start), max(window[1], life.end)
        change = [0] * (len(program.ops) + 2)
        for slot, (start, end) in windows.items():
            if start + 1 < end:
                change[start + 1] += program.buffers[slot].size_bytes
                change[end] -= program.buffers[slot].size_bytes
        for value in self.values.values():
            end = self._alive[value.buffer].end
            if value.start + 1 < end:
                change[value.start + 1] -= value.size_bytes
                change[end] += value.size_bytes
        level, levels = 0, []
        for position in range(len(program.ops)):
            level += change[position]
            levels.append(level)
        return levels

    def rebuild_row(self, name: int, stop: int) -> Row:
        """While a unit is run again at a stop."""
        chain = self.chains[stop]
        step = chain.index(name)
        unit = self.units[name]
        fixed = self._before[stop] + unit.extra_bytes
        fixed += sum(self.program.buffers[b].size_bytes for b in unit.gives if b not in self.values)
        terms: list[Term] = []
        for value in self.values.values():
            if stop <= value.start:
                continue
            if value.within(stop):
                fixed += value.size_bytes
                continue
            j = bisect.bisect_left(value.stops, stop)
            if j == len(value.stops):
                continue
            into = self.carry[value.buffer, value.stops[j]]
            if value.stops[j] != stop:
                terms.append((into, value.size_bytes))
                continue
            made = chain.index(value.maker) if value.maker in chain else len(chain)
            last = max((i for i, other in enumerate(chain) if value.buffer in self.units[other].reads), default=-1)
            wanted = value.starts_at(stop) or step < last or step == made
            if step == last and not wanted:
                # While earlier ops of the unit run it is there in any case; and of several only one is overwritten.
                wanted = len(unit.ops) > 1 or self._overwritten(unit.ops[-1], self.values.keys()) != value.buffer
            if wanted:
                terms.append((into, value.size_bytes))
                if step >= made:
                    terms.append((self.rebuild[chain[made], stop], value.size_bytes))
            elif j + 1 < len(value.stops):
                terms.append((self.carry[value.buffer, value.stops[j + 1]], value.size_bytes))
        return Row(fixed, tuple(terms))


def _episodes(start: int, uses: Sequence[int]) -> list[tuple[int, int]]:
    """Uses that follow one another closely make one episode."""
    found = [(start, start)]
    for use in uses:
        first, last = found[-1]
        if use - last <= _SHORT_GAP:
            found[-1] = (first, use)
        else:
            found.append((use, use))
    return found
