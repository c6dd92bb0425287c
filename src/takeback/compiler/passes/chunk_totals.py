"""What every part of a `RowLoop` adds to: the sums over rows, each in one buffer.

A product adds to its sum inside (`addmm_`), in float32 where its operands are narrower; of other ops the result for a
part is added. A mean is divided, and a narrow result rounded, when all parts are done.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from takeback.compiler.passes.op_writer import OpWriter
from takeback.compiler.passes.row_loop import RowLoop
from takeback.compiler.passes.rowwise import PRODUCTS, Folded, name_of
from takeback.compiler.program import Argument, BufferId, Op, OpOverload, Region

aten = torch.ops.aten

_NARROW = frozenset((torch.bfloat16, torch.float16))
_SUM = 2  # torch's number for `reduction="sum"`


class Totals:
    """The sums of a loop. `dropped` are ops behind it that have nothing to do now."""

    def __init__(self, writer: OpWriter, kept: frozenset[BufferId], loop: RowLoop) -> None:
        self._writer, self._kept, self._loop = writer, kept, loop
        self._ops = writer.program.ops
        self._sums: dict[int, Region] = {}  # by op
        self._waiting: list[tuple[Op, Region, Region]] = []  # a result of an op, to be added to a total
        self.dropped: set[int] = set()

    def add(self, position: int, op: Op, *, first: bool) -> None:
        """The op on a part of the rows; the first part is the total, each other one is added to it."""
        name, result = name_of(op), op.results[0]
        assert isinstance(result, Region)
        total = self._total(position, result)
        if name in PRODUCTS:
            self._add_product(op, total, first=first)
        elif name in ("sum", "mean"):
            target = aten.sum.default if op.target in (aten.sum.default, aten.mean.default) else aten.sum.dim_IntList
            summed = replace(op, target=target, kwargs={**op.kwargs, "dtype": total.dtype})
            self._add_result(summed, total.dtype, total, first=first)
        else:
            summed = replace(op, args=(*op.args[:3], _SUM, *op.args[4:]))
            self._add_result(summed, result.dtype, total, first=first)

    def finish(self, position: int) -> None:
        """What is left to do when all parts are there."""
        op, total, writer = self._ops[position], self._sums[position], self._writer
        result = op.results[0]
        assert isinstance(result, Region)
        if Folded.MEAN in self._loop.cuts[position].results:
            divisor, divide = self._divisor(op, result)
            quotient = result
            if total.dtype != result.dtype:
                quotient = replace(total, buffer=writer.new(writer.buffers[total.buffer].size_bytes))
            writer.write(op, divide, (total, divisor), {}, quotient)
            total = quotient
        read = {r.buffer for i in self.dropped for r in self._ops[i].inputs}
        if total.dtype != result.dtype and result.buffer not in read:
            writer.write(op, aten._to_copy.default, (total,), {"dtype": result.dtype}, result)

    def _divisor(self, op: Op, result: Region) -> tuple[Argument, OpOverload]:
        if name_of(op) != "mean":
            return op.results[1], aten.div.Tensor  # a loss: what its targets weigh
        source = op.args[0]
        assert isinstance(source, Region)
        return source.numel // max(1, result.numel), aten.div.Scalar

    def _add_result(self, op: Op, dtype: torch.dtype, total: Region, *, first: bool) -> None:
        """An op that gives its first result in `dtype`, and that result to the total."""
        rest = tuple(
            replace(r, buffer=self._writer.new(r.numel * r.dtype.itemsize))
            for r in op.results[1:]
            if isinstance(r, Region)
        )
        if first and dtype == total.dtype:
            self._writer.ops.append(replace(op, results=(total, *rest)))
            return
        part = replace(total, dtype=dtype, buffer=self._writer.new(_reach(total) * dtype.itemsize), offset=0)
        self._writer.ops.append(replace(op, results=(part, *rest)))
        if first:
            self._writer.write(op, aten._to_copy.default, (part,), {"dtype": total.dtype}, total)
        else:
            self._waiting.append((op, total, part))

    def flush(self) -> None:
        """What waits for the end of a part: added up before, it would stand between ops that can be one."""
        for op, total, part in self._waiting:
            self._writer.write(op, aten.add_.Tensor, (total, part), {}, total, in_place=True)
        self._waiting = []

    def _add_product(self, op: Op, total: Region, *, first: bool) -> None:
        left, right = op.args
        result = op.results[0]
        assert isinstance(result, Region)
        batched, write = name_of(op) == "bmm", self._writer.write
        if total.dtype == result.dtype:
            if first:
                self._writer.ops.append(replace(op, results=(total,)))
            else:
                onto = aten.baddbmm_.default if batched else aten.addmm_.default
                write(op, onto, (total, left, right), {}, total, in_place=True)
        elif self._writer.program.device_type == "cuda":
            # Kernels with narrow operands and a wide result exist for CUDA alone (2.11, 2.13).
            if first:
                onto = aten.bmm.dtype_out if batched else aten.mm.dtype_out
                write(op, onto, (left, right, total.dtype), {"out": total}, total, in_place=True)
            else:
                onto = aten.baddbmm.dtype_out if batched else aten.addmm.dtype_out
                write(op, onto, (total, left, right, total.dtype), {"out": total}, total, in_place=True)
        else:
            self._add_result(op, result.dtype, total, first=first)

    def _total(self, position: int, result: Region) -> Region:
        """Where the parts of a result are added up: in its own bytes if nothing is left to do then."""
        if position not in self._sums:
            wide = torch.float32 if result.dtype in _NARROW else result.dtype
            divided = Folded.MEAN in self._loop.cuts[position].results
            total = result
            if wide != result.dtype:
                total = self._widened(position, result) or self._fresh(result, wide)
            elif divided:
                total = self._fresh(result, wide)
            self._sums[position] = total
        return self._sums[position]

    def _fresh(self, result: Region, dtype: torch.dtype) -> Region:
        return replace(result, dtype=dtype, buffer=self._writer.new(_reach(result) * dtype.itemsize), offset=0)

    def _widened(self, position: int, result: Region) -> Region | None:
        """The float32 copy of a narrow result, if that is all that anybody reads of it: then it is added up there, and
        never rounded."""
        program = self._writer.program
        divided = Folded.MEAN in self._loop.cuts[position].results
        named = any(r.buffer == result.buffer for _, r in program.named_regions())
        if divided or named or result.buffer in self._kept:
            return None
        readers = [i for i, op in enumerate(self._ops) if any(r.buffer == result.buffer for r in op.inputs)]
        if len(readers) != 1:
            return None
        op = self._ops[readers[0]]
        copy = op.results[0] if op.results else None
        if op.target is not aten._to_copy.default or op.args[0] != result or not isinstance(copy, Region):
            return None
        if copy.dtype != torch.float32 or copy.shape != result.shape or copy.stride != result.stride:
            return None
        self.dropped.add(readers[0])
        return copy


def _reach(region: Region) -> int:
    """Elements from the first one to the last."""
    return 1 + sum((extent - 1) * step for extent, step in zip(region.shape, region.stride, strict=True))
