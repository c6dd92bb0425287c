"""Writes a `RowLoop` as ops: all of them for the first part of the rows, then for the second, and so on.

What is known before any row is (how much the targets weigh) is computed first. Sums over rows are chunk_totals.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from takeback.compiler.ownership.facts import EMPTY, FILL, out_overload
from takeback.compiler.passes.chunk_totals import Totals
from takeback.compiler.passes.op_writer import OpWriter
from takeback.compiler.passes.row_cuts import RowPart, Run, cut_inside, cut_sizes, cut_whole
from takeback.compiler.passes.row_loop import RowLoop
from takeback.compiler.passes.rowwise import PRODUCTS, Folded, RowCut, name_of
from takeback.compiler.program import (
    Argument,
    Buffer,
    BufferId,
    Op,
    OpOverload,
    Program,
    Region,
    Special,
    map_regions,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class LoopOps:
    """A loop as ops. `dropped` are ops behind it that have nothing to do now."""

    ops: tuple[Op, ...]
    buffers: Mapping[BufferId, Buffer]
    dropped: frozenset[int]


def write_loop(program: Program, kept: frozenset[BufferId], loop: RowLoop, parts: tuple[RowPart, ...]) -> LoopOps:
    """The loop for each part in turn."""
    writer = OpWriter(program)
    totals = Totals(writer, kept, loop)
    for position, cut in loop.cuts.items():
        if Folded.WEIGHT in cut.results:
            _weigh(writer, program.ops[position])
    for buffer in sorted(loop.copied):
        _make_room(writer, loop, buffer)
    for part in parts:
        _PartWriter(writer, totals, loop, part).write()
    for position, cut in loop.cuts.items():
        if not {Folded.SUM, Folded.MEAN}.isdisjoint(cut.results):
            totals.finish(position)
    return LoopOps(tuple(writer.ops), writer.buffers, frozenset(totals.dropped))


def parts_of(groups: int, count: int, multiple: int = 1) -> Iterator[RowPart]:
    """About `count` parts of as many groups each, the last one smaller; each but the last is so many times `multiple`,
    if it can be."""
    size = -(-groups // count)
    if multiple < size:
        size = -(-size // multiple) * multiple
    for start in range(0, groups, size):
        yield RowPart(start, min(size, groups - start), groups)


def written_fill(program: Program, op: Op, result: Region | None = None) -> Op:
    """A fill that asks no operand for its shape."""
    target = op.target
    assert not isinstance(target, Special)
    region = op.results[0] if result is None else result
    assert isinstance(region, Region)
    kwargs = {"dtype": region.dtype, "device": program.device}
    if target in EMPTY:
        made: OpOverload = aten.empty.memory_format
        args: tuple[Argument, ...] = (region.shape,)
    else:
        at, number = FILL[target]
        made, args = aten.full.default, (region.shape, number if at is None else op.args[at])
    return replace(op, target=made, args=args, kwargs=kwargs, results=(region,), scratch=())


class _PartWriter:
    """The loop for one part of the rows."""

    def __init__(self, writer: OpWriter, totals: Totals, loop: RowLoop, part: RowPart) -> None:
        self.writer, self.totals, self.loop, self.part = writer, totals, loop, part
        self.names: dict[BufferId, BufferId] = {}  # what each value of the loop is called in this part

    def write(self) -> None:
        for position, cut in self.loop.cuts.items():
            self._op(position, cut)
        self.totals.flush()
        for buffer in sorted(self.loop.copied):
            self._copy_out(buffer)

    def _op(self, position: int, cut: RowCut) -> None:
        op, ops = self.writer.program.ops[position], self.writer.ops
        if op.target in FILL or op.target in EMPTY:
            [result], [run] = op.results, cut.results
            assert isinstance(result, Region)
            ops.append(written_fill(self.writer.program, op, self._cut(result, run)))
            return
        args = tuple(self._argument(a, run) for a, run in zip(op.args, cut.operands, strict=True))
        if cut.sizes is not None:
            sizes, run = args[cut.sizes], cut.results[0]
            assert isinstance(sizes, tuple)
            assert isinstance(run, Run)
            args = (*args[: cut.sizes], cut_sizes(sizes, run, self.part), *args[cut.sizes + 1 :])
        op = replace(op, args=args, scratch=())
        if not {Folded.SUM, Folded.MEAN}.isdisjoint(cut.results):
            self.totals.add(position, op, first=self.part.start == 0)
        elif name_of(op) in PRODUCTS and position != self.loop.seed:
            ops.append(self._onto_rows(op, cut))
        else:
            results = tuple(self._argument(r, how) for r, how in zip(op.results, cut.results, strict=True))
            ops.append(replace(op, results=results, mutates=tuple(map(self._name, op.mutates))))

    def _argument(self, argument: Argument, run: Run | Folded | None) -> Argument:
        return map_regions(argument, lambda region: self._cut(region, run))

    def _cut(self, region: Region, run: Run | Folded | None) -> Region:
        if region.buffer in self.loop.inside:
            named = replace(region, buffer=self._name(region.buffer))
            return cut_inside(named, run, self.part) if isinstance(run, Run) else named
        if not isinstance(run, Run) or region.shape == (0,):
            return region
        found = cut_whole(region, run, self.part)
        assert found is not None, "a loop was found whose operands cannot be cut"
        return found

    def _name(self, buffer: BufferId) -> BufferId:
        if buffer not in self.names:
            size = self.writer.program.buffers[buffer].size_bytes
            local = buffer in self.loop.local
            self.names[buffer] = self.writer.new(size if local else size // self.part.total * self.part.count)
        return self.names[buffer]

    def _onto_rows(self, op: Op, cut: RowCut) -> Op:
        """A product whose result exists as a whole: it writes its rows of it."""
        [result], [run] = op.results, cut.results
        assert isinstance(result, Region)
        assert isinstance(run, Run)
        onto = cut_whole(result, run, self.part)
        assert onto is not None
        assert not isinstance(op.target, Special)
        out = out_overload(op.target)
        assert out is not None
        return replace(op, target=out, kwargs={**op.kwargs, "out": onto}, results=(onto,), mutates=(onto.buffer,))

    def _copy_out(self, buffer: BufferId) -> None:
        op, whole = _made(self.writer.program, self.loop, buffer)
        group = whole.numel // self.part.total
        source = replace(whole, buffer=self._name(buffer), shape=(group * self.part.count,))
        onto = replace(source, buffer=buffer, offset=group * self.part.start)
        self.writer.write(op, aten.copy_.default, (onto, source), {}, onto, in_place=True)


def _made(program: Program, loop: RowLoop, buffer: BufferId) -> tuple[Op, Region]:
    """The op that makes a value of the loop, and all of its buffer, flat."""
    made = ((program.ops[i], r) for i in loop.cuts for r in program.ops[i].outputs)
    op, dtype = next((op, r.dtype) for op, r in made if r.buffer == buffer)
    return op, Region(buffer, dtype, (program.buffers[buffer].size_bytes // dtype.itemsize,), (1,), 0)


def _make_room(writer: OpWriter, loop: RowLoop, buffer: BufferId) -> None:
    """For what is copied out part by part."""
    op, whole = _made(writer.program, loop, buffer)
    kwargs = {"dtype": whole.dtype, "device": writer.program.device}
    writer.write(op, aten.empty.memory_format, (whole.shape,), kwargs, whole)


def _weigh(writer: OpWriter, op: Op) -> None:
    """How much the targets of a loss weigh that are not ignored: each 1, or what its class weighs."""
    target, weight, ignored = op.args[1], op.args[2], op.args[4]
    result = op.results[1]
    assert isinstance(target, Region)
    assert isinstance(result, Region)
    skipped = writer.dense(target.shape, torch.bool)
    writer.write(op, aten.eq.Scalar, (target, ignored), {}, skipped)
    if not isinstance(weight, Region):
        counted, count = writer.dense(target.shape, torch.bool), writer.dense((), torch.int64)
        writer.write(op, aten.bitwise_not.default, (skipped,), {}, counted)
        writer.write(op, aten.sum.default, (counted,), {}, count)
        writer.write(op, aten._to_copy.default, (count,), {"dtype": result.dtype}, result)
        return
    known = writer.dense(target.shape, target.dtype)
    each, counts = (writer.dense(target.shape, weight.dtype) for _ in range(2))
    flat, found = (replace(r, shape=(target.numel,), stride=(1,)) for r in (known, each))
    writer.write(op, aten.masked_fill.Scalar, (target, skipped, 0), {}, known)
    writer.write(op, aten.index_select.default, (weight, 0, flat), {}, found)
    writer.write(op, aten.masked_fill.Scalar, (each, skipped, 0), {}, counts)
    writer.write(op, aten.sum.default, (counts,), {"dtype": result.dtype}, result)
