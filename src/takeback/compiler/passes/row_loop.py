"""Finds what a product's rows go through until nothing of them is left but sums and further products.

In: a program and the position of a product [rows, inner] × [inner, columns]. Out: a `RowLoop`, the ops that can be run
for some of the rows, then for the next ones; or why there is none. Data flow is followed: whatever reads rows treats
them one by one (rowwise.py), adds them up, or multiplies them. What is read of the rows elsewhere must be small. No op
outside may stand between two of the loop, reading what the one gives and making what the other needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from takeback.compiler.ownership.facts import EMPTY, FILL
from takeback.compiler.passes.row_cuts import Run, collapsed, run_of
from takeback.compiler.passes.rowwise import PRODUCTS, Folded, RowCut, cut_of, name_of
from takeback.compiler.program import BufferId, Op, Phase, Program, Region, Special, regions

#: A value of at most this share of the product's result may exist as a whole beside the loop.
SMALL = 1 / 8
_TARGETS = 1  #: their place among the operands of a loss that weighs them


@dataclass
class RowLoop:
    """Ops of a program, by position, and what becomes of their values."""

    seed: int
    groups: int
    cuts: dict[int, RowCut] = field(default_factory=dict)  #: of every op of the loop, in order
    rows: set[BufferId] = field(default_factory=set)  #: exist for some rows at a time
    local: set[BufferId] = field(default_factory=set)  #: have no rows, and exist once for each part
    written: set[BufferId] = field(default_factory=set)  #: results of products, a part of whose rows each part writes
    copied: set[BufferId] = field(default_factory=set)  #: of `rows`, what is read elsewhere: copied out, part by part
    sums: set[BufferId] = field(default_factory=set)
    weights: set[BufferId] = field(default_factory=set)  #: made before the loop, of the targets
    numbers: set[int] = field(default_factory=set)  #: ops that fill, and ask the rows for their shape alone
    before: list[int] = field(default_factory=list)  #: ops behind the seed that the loop needs

    @property
    def inside(self) -> set[BufferId]:
        return self.rows | self.local

    @property
    def given(self) -> set[BufferId]:
        """What is there when the loop is over, and not before."""
        return self.written | self.copied | self.sums


class NoLoopError(Exception):
    """Why ops cannot be run part by part: `op` is the first that cannot. `room`: it could, if this buffer, into which
    it writes rows, had been made part by part."""

    def __init__(self, reason: str, op: Op, room: BufferId | None = None) -> None:
        super().__init__(reason)
        self.reason, self.op, self.room = f"{op.name}: {reason}", op, room


def is_last(program: Program, seed: int) -> bool:
    """Whether no other product of the forward is computed from this one's result: a model's head, not its middle."""
    reached = {r.buffer for r in program.ops[seed].outputs}
    for op in program.ops[seed + 1 :]:
        if op.phase is Phase.FORWARD and any(r.buffer in reached for r in op.inputs):
            if name_of(op) in PRODUCTS:
                return False
            reached |= {*(r.buffer for r in op.outputs), *op.mutates}
    return True


def find_loop(program: Program, kept: Collection[BufferId], seed: int, groups: int) -> RowLoop:
    """Raises `NoLoopError`."""
    rooms = frozenset[BufferId]()
    while True:
        finder = _Finder(program, kept, RowLoop(seed, groups), rooms)
        try:
            sunk = finder.find()
            break
        except NoLoopError as error:
            if error.room is None or error.room in rooms:
                raise
            rooms |= {error.room}
    while sunk > finder.sunk:
        try:
            finder = _Finder(program, kept, RowLoop(seed, groups), sunk)
            sunk = finder.find()
        except NoLoopError:  # then they are made before, and read row by row
            finder = _Finder(program, kept, RowLoop(seed, groups), rooms)
            finder.find()
            break
    return finder.loop


class _Finder:
    """One walk. `sunk` are values that do not begin with the product's rows, and are made for some of them at a time
    all the same: rows are written into them, or they are large."""

    def __init__(self, program: Program, kept: Collection[BufferId], loop: RowLoop, sunk: frozenset[BufferId]) -> None:
        self.program, self.kept, self.loop, self.sunk = program, kept, loop, sunk
        self.ops = program.ops
        self.limit = SMALL * sum(program.buffers[r.buffer].size_bytes for r in self.ops[loop.seed].outputs)
        loop.rows |= set(sunk)

    def find(self) -> frozenset[BufferId]:
        """Fills the loop. Gives `sunk`, and what other large values it reads."""
        loop = self.loop
        for position, op in enumerate(self.ops):
            if op.phase is Phase.UPDATE:
                break
            if position == loop.seed:
                self._take(position, op, {1 if name_of(op) == "addmm" else 0: Run(-2, -2)})
            elif position > loop.seed or self.sunk:
                self._visit(position, op)
        if not any(self._adds_up(i) for i in loop.cuts):
            raise NoLoopError("no op that takes rows one by one adds them up", self.ops[loop.seed])
        self._check_outside()
        self._sort_out()
        return self._large()

    # -- the walk --------------------------------------------------------------------------------------------------

    def _visit(self, position: int, op: Op) -> None:
        loop = self.loop
        touched = {r.buffer for r in op.inputs} | {r.buffer for r in op.outputs}
        if op.target in FILL or op.target in EMPTY:
            if any(r.buffer in loop.rows for r in op.outputs):
                self._take(position, op, {})
            elif any(r.buffer in loop.inside or r.buffer in loop.sums for r in op.inputs):
                loop.numbers.add(position)
            return
        if not touched & loop.inside:
            return
        runs: dict[int, Run] = {}
        try:
            for place, argument in enumerate(op.args):
                found = {self._run(op, r) for r in regions(argument) if r.buffer in loop.rows}
                if len(found) > 1:
                    raise NoLoopError("the rows of its operands lie in different dimensions", op)
                if found:
                    runs[place] = found.pop()
            self._take(position, op, runs)
        except NoLoopError as error:
            # What is small may exist as a whole: then the op is none of the loop's.
            if error.room is not None:
                raise
            if any(r.buffer in loop.inside and not self._is_small(r.buffer) for r in op.inputs):
                raise
            if any(r.buffer in loop.inside for r in op.outputs):
                raise

    def _take(self, position: int, op: Op, runs: Mapping[int, Run]) -> None:
        """The op becomes one of the loop's, or nothing has changed."""
        loop = self.loop
        outside = [r for value in op.kwargs.values() for r in regions(value)]
        if any(r.buffer in loop.inside for r in outside):
            raise NoLoopError("it is given rows in an unusual way", op)
        late = [r for r in op.inputs if r.buffer in loop.sums or r.buffer in loop.written]
        if late:
            raise NoLoopError("it needs what all rows together give", op)
        result = next((self._run(op, r) for r in op.outputs if r.buffer in loop.rows), None)
        cut = cut_of(op, runs, result)
        if isinstance(cut, str):
            raise NoLoopError(cut, op)
        for b in op.mutates:
            if b not in loop.inside:
                room = None if self.program.buffers[b].role.borrowed else b
                raise NoLoopError("it writes rows into a tensor that was there before", op, room)
        product = name_of(op) in PRODUCTS
        if product and position != loop.seed and op.phase is Phase.FORWARD:
            raise NoLoopError("another product follows", op)
        if Folded.WEIGHT in cut.results and any(r.buffer in loop.inside for r in regions(op.args[_TARGETS])):
            raise NoLoopError("its targets are made row by row, and what they weigh is needed before the first row", op)
        self._check_extents(op, cut)
        changes: list[tuple[set[BufferId], BufferId]] = []
        for region, where in zip(op.results, cut.results, strict=True):
            assert isinstance(region, Region)
            if isinstance(where, Folded):
                into = {Folded.LOCAL: loop.local, Folded.WEIGHT: loop.weights}.get(where, loop.sums)
                changes.append((into, region.buffer))
                continue
            if self._run(op, region) != where:
                raise NoLoopError("the rows of its result do not lie one after another", op)
            exits = product and position != loop.seed
            changes.append((loop.written if exits else loop.rows, region.buffer))
        for into, buffer in changes:
            into.add(buffer)
        loop.cuts[position] = cut

    def _run(self, op: Op, region: Region) -> Run:
        run = run_of(region, self.loop.groups, self.program.buffers[region.buffer].size_bytes)
        if run is None:
            raise NoLoopError(f"its rows cannot be told apart in {self.loop.groups} groups", op)
        return run

    def _check_extents(self, op: Op, cut: RowCut) -> None:
        """Rows are paired by their number, so all operands must have as many, or one for all."""
        extents: set[int] = set()
        pairs = (*zip(op.args, cut.operands, strict=False), *zip(op.results, cut.results, strict=False))
        for argument, run in pairs:
            if not isinstance(run, Run):
                continue
            for region in regions(argument):
                if region.shape == (0,):
                    continue
                one = collapsed(region, run)
                if one is None:
                    raise NoLoopError("the rows of an operand do not lie one after another", op)
                extents.add(one[0])
        extents.discard(1)
        if len(extents) != 1 or extents.pop() % self.loop.groups:
            raise NoLoopError("its operands have different numbers of rows", op)

    def _adds_up(self, position: int) -> bool:
        folded = any(f in (Folded.SUM, Folded.MEAN) for f in self.loop.cuts[position].results)
        return folded and self.ops[position].phase is Phase.FORWARD and name_of(self.ops[position]) not in PRODUCTS

    # -- what is outside -------------------------------------------------------------------------------------------

    def _check_outside(self) -> None:
        """What is read or returned elsewhere must be small."""
        loop = self.loop
        for i, op in enumerate(self.ops):
            if i not in loop.cuts and i not in loop.numbers:
                for region in op.inputs:
                    self._leave(region.buffer, op, f"{op.name} reads it")
        for name, region in self.program.named_regions():
            self._leave(region.buffer, self.ops[loop.seed], f"it is returned ({name})")
        for buffer in sorted(self.kept):
            self._leave(buffer, self.ops[loop.seed], "it is kept")
        for i, op in enumerate(self.ops):
            if i not in loop.cuts and any(r.buffer in loop.inside for r in op.outputs):
                raise NoLoopError("it writes rows in an unusual way", op)

    def _leave(self, buffer: BufferId, op: Op, why: str) -> None:
        loop = self.loop
        if buffer not in loop.inside:
            return
        if buffer in loop.local or not self._is_small(buffer):
            size = self.program.buffers[buffer].size_bytes
            raise NoLoopError(f"{size:,} bytes of rows are needed as a whole: {why}", op)
        loop.copied.add(buffer)

    def _is_small(self, buffer: BufferId) -> bool:
        return self.program.buffers[buffer].size_bytes <= self.limit

    def _sort_out(self) -> None:
        """What of the ops behind the seed must come before the loop; all others come after it."""
        loop = self.loop
        last = max(loop.cuts)
        needed = {r.buffer for i in loop.cuts for r in self.ops[i].inputs} - loop.inside - loop.weights
        for position in range(last, loop.seed, -1):
            op = self.ops[position]
            if position in loop.cuts or not needed & {*(r.buffer for r in op.outputs), *op.mutates}:
                continue
            loop.before.insert(0, position)
            if op.target in FILL or op.target in EMPTY:
                loop.numbers.add(position)
                continue
            read = {r.buffer for r in op.inputs}
            if read & (loop.given | loop.inside):
                raise NoLoopError("the backward needs what it makes of the loss, or of other sums over all rows", op)
            if isinstance(op.target, Special) or torch.Tag.nondeterministic_seeded in op.target.tags:
                raise NoLoopError("the loop needs its random numbers", op)
            needed |= read - loop.weights
        self._check_order()

    def _check_order(self) -> None:
        """Ops change places: none may pass another that writes in place what it reads, or reads what it writes so."""
        loop = self.loop
        early = set(loop.before)
        writers: dict[BufferId, list[int]] = {}
        for position, op in enumerate(self.ops[: max(loop.cuts) + 1]):
            if position not in loop.cuts:
                for b in op.mutates:
                    writers.setdefault(b, []).append(position)
        for position in loop.cuts:
            for region in self.ops[position].inputs:
                for writer in writers.get(region.buffer, ()):
                    if (writer < position) != (writer < loop.seed or writer in early):
                        raise NoLoopError("it writes in place what the rows are computed from", self.ops[writer])
        for position in loop.before:
            passed = [i for i in range(loop.seed, position) if i not in loop.cuts and i not in early]
            wrote = set(self.ops[position].mutates)
            if wrote and any(r.buffer in wrote for i in passed for r in (*self.ops[i].inputs, *self.ops[i].outputs)):
                raise NoLoopError("it writes in place what others read before", self.ops[position])

    def _large(self) -> frozenset[BufferId]:
        """Values as large as the rows that the loop reads row by row, and that are made without it."""
        loop, found = self.loop, set[BufferId]()
        for position, cut in loop.cuts.items():
            for argument, run in zip(self.ops[position].args, cut.operands, strict=False):
                for region in regions(argument):
                    if run is None or region.buffer in loop.inside or self._is_small(region.buffer):
                        continue
                    if not self.program.buffers[region.buffer].role.borrowed:
                        found.add(region.buffer)
        return self.sunk | (found - {r.buffer for i in loop.cuts for r in self._whole(i)})

    def _whole(self, position: int) -> tuple[Region, ...]:
        """What an op of the loop needs all of before it: the factors of a product, the targets of a loss."""
        op = self.ops[position]
        if Folded.WEIGHT in self.loop.cuts[position].results:
            return tuple(regions(op.args[_TARGETS]))
        return op.inputs if name_of(op) in PRODUCTS else ()
