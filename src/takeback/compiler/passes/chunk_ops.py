"""Writes a `RowLoop` as ops: all of them for the first part of the rows, then for the second, and so on.

What every part adds to is one buffer: a product adds to it inside (`addmm_`), in float32 where the operands are
narrower; a sum of a few numbers is added. What is known before any row is (how much the targets weigh) is computed
first; what is known after the last (a mean, a narrow result) last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from takeback.compiler.ownership.facts import EMPTY, FILL, out_overload
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
    Role,
    Special,
    map_regions,
)

aten = torch.ops.aten

_NARROW = frozenset((torch.bfloat16, torch.float16))
_MEAN, _SUM = 1, 2  # torch's numbers for `reduction`


@dataclass(frozen=True)
class LoopOps:
    """A loop as ops: those before it, in it and after it. `dropped` are ops behind it that have nothing to do now."""

    ops: tuple[Op, ...]
    buffers: Mapping[BufferId, Buffer]
    dropped: frozenset[int]


def write_loop(program: Program, kept: frozenset[BufferId], loop: RowLoop, parts: tuple[RowPart, ...]) -> LoopOps:
    return _LoopWriter(program, kept, loop, parts).write()


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


class _LoopWriter:
    def __init__(self, program: Program, kept: frozenset[BufferId], loop: RowLoop, parts: tuple[RowPart, ...]) -> None:
        self.program, self.kept, self.loop, self.parts = program, kept, loop, parts
        self.buffers = dict(program.buffers)
        self.ops: list[Op] = []
        self.sums: dict[tuple[int, int], Region] = {}  # by op and result: what all parts add to
        self.dropped: set[int] = set()
        self.here: dict[BufferId, BufferId] = {}  # what each value of the loop is called in the present part

    def write(self) -> LoopOps:
        loop, ops = self.loop, self.program.ops
        for position, cut in loop.cuts.items():
            if Folded.WEIGHT in cut.results:
                self._weigh(ops[position])
        for buffer in sorted(loop.copied):
            self._make_room(buffer)
        for part in self.parts:
            self.here = {}
            for position, cut in loop.cuts.items():
                self._run(position, cut, part)
            for buffer in sorted(loop.copied):
                self._copy_out(buffer, part)
        for position, cut in loop.cuts.items():
            for place, how in enumerate(cut.results):
                if how in (Folded.SUM, Folded.MEAN):
                    self._finish(position, place, how)
        return LoopOps(tuple(self.ops), self.buffers, frozenset(self.dropped))

    # -- one part --------------------------------------------------------------------------------------------------

    def _run(self, position: int, cut: RowCut, part: RowPart) -> None:
        op = self.program.ops[position]
        if op.target in FILL or op.target in EMPTY:
            [result], [run] = op.results, cut.results
            assert isinstance(result, Region)
            self.ops.append(written_fill(self.program, op, self._cut(result, run, part)))
            return
        args = tuple(self._operand(a, run, part) for a, run in zip(op.args, cut.operands, strict=True))
        if cut.sizes is not None:
            sizes, run = args[cut.sizes], cut.results[0]
            assert isinstance(sizes, tuple)
            assert isinstance(run, Run)
            args = (*args[: cut.sizes], cut_sizes(sizes, run, part), *args[cut.sizes + 1 :])
        op = replace(op, args=args, scratch=())
        if any(how in (Folded.SUM, Folded.MEAN) for how in cut.results):
            self._add_up(position, op, cut, first=part.start == 0)
            return
        if name_of(op) in PRODUCTS and position != self.loop.seed:
            self._write_rows(op, cut, part)
            return
        results = tuple(self._operand(r, how, part) for r, how in zip(op.results, cut.results, strict=True))
        mutates = tuple(self._name(b, part) for b in op.mutates)
        self.ops.append(replace(op, results=results, mutates=mutates))

    def _operand(self, argument: Argument, run: Run | Folded | None, part: RowPart) -> Argument:
        return map_regions(argument, lambda region: self._cut(region, run, part))

    def _cut(self, region: Region, run: Run | Folded | None, part: RowPart) -> Region:
        if region.buffer in self.loop.inside:
            named = replace(region, buffer=self._name(region.buffer, part))
            return cut_inside(named, run, part) if isinstance(run, Run) else named
        if not isinstance(run, Run) or region.shape == (0,):
            return region
        found = cut_whole(region, run, part)
        assert found is not None, "a loop was found whose operands cannot be cut"
        return found

    def _name(self, buffer: BufferId, part: RowPart) -> BufferId:
        if buffer not in self.here:
            size = self.program.buffers[buffer].size_bytes
            self.here[buffer] = self._new(size if buffer in self.loop.local else size // part.total * part.count)
        return self.here[buffer]

    def _write_rows(self, op: Op, cut: RowCut, part: RowPart) -> None:
        """A product whose result exists as a whole: it writes its rows of it."""
        [result], [run] = op.results, cut.results
        assert isinstance(result, Region)
        assert isinstance(run, Run)
        onto = cut_whole(result, run, part)
        assert onto is not None
        assert not isinstance(op.target, Special)
        out = out_overload(op.target)
        assert out is not None
        kwargs = {**op.kwargs, "out": onto}
        self.ops.append(replace(op, target=out, kwargs=kwargs, results=(onto,), mutates=(onto.buffer,)))

    def _make_room(self, buffer: BufferId) -> None:
        """For what is copied out part by part."""
        op, dtype = self._maker(buffer)
        whole = Region(buffer, dtype, (self.buffers[buffer].size_bytes // dtype.itemsize,), (1,), 0)
        kwargs = {"dtype": dtype, "device": self.program.device}
        self._then(op, aten.empty.memory_format, (whole.shape,), kwargs, whole)

    def _copy_out(self, buffer: BufferId, part: RowPart) -> None:
        op, dtype = self._maker(buffer)
        group = self.buffers[buffer].size_bytes // part.total // dtype.itemsize
        source = Region(self._name(buffer, part), dtype, (group * part.count,), (1,), 0)
        onto = replace(source, buffer=buffer, offset=group * part.start)
        self._then(op, aten.copy_.default, (onto, source), {}, onto, in_place=True)

    def _maker(self, buffer: BufferId) -> tuple[Op, torch.dtype]:
        """The op that makes a value of the loop, and its dtype."""
        made = ((op, r) for op in map(self.program.ops.__getitem__, self.loop.cuts) for r in op.outputs)
        return next((op, r.dtype) for op, r in made if r.buffer == buffer)

    # -- what all parts add to -------------------------------------------------------------------------------------

    def _add_up(self, position: int, op: Op, cut: RowCut, *, first: bool) -> None:
        if name_of(op) in PRODUCTS:
            self._add_product(position, op, first=first)
            return
        result = op.results[0]
        assert isinstance(result, Region)
        total = self._total(position, 0, result, cut.results[0] is Folded.MEAN)
        if name_of(op) in ("sum", "mean"):
            target = aten.sum.default if op.target in (aten.sum.default, aten.mean.default) else aten.sum.dim_IntList
            kwargs = {**op.kwargs, "dtype": total.dtype}
            self._add(replace(op, target=target, kwargs=kwargs), total, (), first=first)
            return
        args = (*op.args[:3], _SUM, *op.args[4:])
        weight = op.results[1]
        assert isinstance(weight, Region)
        rest = (replace(weight, buffer=self._new(self.buffers[weight.buffer].size_bytes)),)
        self._add(replace(op, args=args), total, rest, first=first)

    def _add(self, op: Op, total: Region, rest: tuple[Region, ...], *, first: bool) -> None:
        """The first part is the total, each other one is added to it."""
        old = op.results[0]
        assert isinstance(old, Region)
        narrow = old.dtype if "dtype" not in op.kwargs else total.dtype
        if first and narrow == total.dtype:
            self.ops.append(replace(op, results=(total, *rest)))
            return
        more = replace(total, dtype=narrow, buffer=self._new(total.numel * narrow.itemsize), offset=0)
        self.ops.append(replace(op, results=(more, *rest)))
        if first:
            self._then(op, aten._to_copy.default, (more,), {"dtype": total.dtype}, total)
        else:
            self._then(op, aten.add_.Tensor, (total, more), {}, total, in_place=True)

    def _add_product(self, position: int, op: Op, *, first: bool) -> None:
        """Onto float32 that is accumulated inside of the product, where there is such a kernel."""
        left, right = op.args
        assert isinstance(left, Region)
        result = op.results[0]
        assert isinstance(result, Region)
        total = self._total(position, 0, result, False)
        batched = name_of(op) == "bmm"
        if total.dtype == result.dtype:
            if first:
                self.ops.append(replace(op, results=(total,)))
            else:
                onto = aten.baddbmm_.default if batched else aten.addmm_.default
                self._then(op, onto, (total, left, right), {}, total, in_place=True)
        elif self.program.device_type == "cuda":
            # These kernels exist for CUDA alone (checked on 2.11 and 2.13).
            if first:
                onto = aten.bmm.dtype_out if batched else aten.mm.dtype_out
                self._then(op, onto, (left, right, total.dtype), {"out": total}, total, in_place=True)
            else:
                onto = aten.baddbmm.dtype_out if batched else aten.addmm.dtype_out
                self._then(op, onto, (total, left, right, total.dtype), {"out": total}, total, in_place=True)
        else:
            self._add(op, total, (), first=first)

    def _total(self, position: int, place: int, result: Region, divided: bool) -> Region:
        """Where the parts of a result are added up: in its own bytes if nothing is left to do then."""
        if (position, place) not in self.sums:
            wide = torch.float32 if result.dtype in _NARROW else result.dtype
            total = result
            if wide != result.dtype:
                widened = self._widened(result)
                total = widened or replace(
                    result, dtype=wide, buffer=self._new(_reach(result) * wide.itemsize), offset=0
                )
            elif divided:
                total = replace(result, buffer=self._new(_reach(result) * wide.itemsize), offset=0)
            self.sums[position, place] = total
        return self.sums[position, place]

    def _widened(self, result: Region) -> Region | None:
        """The float32 copy of a narrow result, if that is all that anybody reads of it: then it is added up there, and
        never rounded."""
        if result.buffer in self.kept or any(r.buffer == result.buffer for _, r in self.program.named_regions()):
            return None
        readers = [i for i, op in enumerate(self.program.ops) if any(r.buffer == result.buffer for r in op.inputs)]
        if len(readers) != 1 or readers[0] in self.loop.before:
            return None
        op = self.program.ops[readers[0]]
        copy = op.results[0] if op.results else None
        same = op.target is aten._to_copy.default and op.args[0] == result and isinstance(copy, Region)
        if not same or not isinstance(copy, Region) or copy.dtype != torch.float32 or copy.shape != result.shape:
            return None
        if copy.stride != result.stride or any(copy.buffer in o.mutates for o in self.program.ops[: readers[0]]):
            return None
        self.dropped.add(readers[0])
        return copy

    def _finish(self, position: int, place: int, how: Run | Folded) -> None:
        op, total = self.program.ops[position], self.sums[position, place]
        result = op.results[place]
        assert isinstance(result, Region)
        if how is Folded.MEAN:
            if name_of(op) == "mean":
                source = op.args[0]
                assert isinstance(source, Region)
                divisor: Argument = source.numel // max(1, result.numel)
                divide: OpOverload = aten.div.Scalar
            else:
                divisor, divide = op.results[1], aten.div.Tensor
            quotient = result
            if total.dtype != result.dtype:
                quotient = replace(total, buffer=self._new(self.buffers[total.buffer].size_bytes))
            self._then(op, divide, (total, divisor), {}, quotient)
            total = quotient
        if total.dtype != result.dtype and result.buffer not in self._unread():
            self._then(op, aten._to_copy.default, (total,), {"dtype": result.dtype}, result)

    def _unread(self) -> set[BufferId]:
        """Narrow results whose only reader was dropped."""
        return {r.buffer for i in self.dropped for r in self.program.ops[i].inputs}

    # -- before ----------------------------------------------------------------------------------------------------

    def _weigh(self, op: Op) -> None:
        """How much the targets weigh that are not ignored: each 1, or what the class weighs."""
        target, weight, ignored = op.args[1], op.args[2], op.args[4]
        result = op.results[1]
        assert isinstance(target, Region)
        assert isinstance(result, Region)
        skipped = self._flat(target, torch.bool)
        self._then(op, aten.eq.Scalar, (target, ignored), {}, skipped)
        if not isinstance(weight, Region):
            counted = self._flat(target, torch.bool)
            count = Region(self._new(8), torch.int64, (), (), 0)
            self._then(op, aten.bitwise_not.default, (skipped,), {}, counted)
            self._then(op, aten.sum.default, (counted,), {}, count)
            self._then(op, aten._to_copy.default, (count,), {"dtype": result.dtype}, result)
            return
        known = self._flat(target, target.dtype)
        each, counts = self._flat(target, weight.dtype), self._flat(target, weight.dtype)
        flat = replace(known, shape=(known.numel,), stride=(1,))
        looked_up = replace(each, shape=flat.shape, stride=(1,))
        self._then(op, aten.masked_fill.Scalar, (target, skipped, 0), {}, known)
        self._then(op, aten.index_select.default, (weight, 0, flat), {}, looked_up)
        self._then(op, aten.masked_fill.Scalar, (each, skipped, 0), {}, counts)
        self._then(op, aten.sum.default, (counts,), {"dtype": result.dtype}, result)

    # -- small things ----------------------------------------------------------------------------------------------

    def _flat(self, like: Region, dtype: torch.dtype) -> Region:
        """A new value of that shape, dense."""
        stride = [1] * len(like.shape)
        for dim in range(len(stride) - 2, -1, -1):
            stride[dim] = stride[dim + 1] * like.shape[dim + 1]
        return Region(self._new(like.numel * dtype.itemsize), dtype, like.shape, tuple(stride), 0)

    def _then(
        self,
        of: Op,
        target: OpOverload,
        args: tuple[Argument, ...],
        kwargs: Mapping[str, Argument],
        result: Region,
        *,
        in_place: bool = False,
    ) -> None:
        mutates = (result.buffer,) if in_place else ()
        self.ops.append(Op(target, args, kwargs, (result,), mutates, of.phase, of.grad_mode, of.site))

    def _new(self, size_bytes: int) -> BufferId:
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, size_bytes, Role.INTERNAL)
        return ident


def parts_of(groups: int, count: int, multiple: int = 1) -> Iterator[RowPart]:
    """About `count` parts of as many groups each, the last one smaller; each but the last is so many times `multiple`,
    if it can be."""
    size = -(-groups // count)
    if multiple < size:
        size = -(-size // multiple) * multiple
    for start in range(0, groups, size):
        yield RowPart(start, min(size, groups - start), groups)


def _reach(region: Region) -> int:
    """Elements from the first one to the last."""
    return 1 + sum((extent - 1) * step for extent, step in zip(region.shape, region.stride, strict=True))
