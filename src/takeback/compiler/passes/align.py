"""Gives products the sizes that the device's kernels like, in buffers that the plan owns anyway.

A product of half precision with an extent that is no multiple of 8 (a vocabulary of 50257) runs several times slower on
a GPU. Here its operands are padded with zeros, and its result has a few columns or rows more, which nobody reads. The
padding is one more op beside whoever makes the operand, so `fuse` lets that one write it: no pass over memory is added.
The user's own tensors stay as they are.

    w16 = cast(w)             [50257, 768]          w16 = pad(cast(w))          [50264, 768]
    y = mm(x, w16.t())        [rows, 50257]         y = mm(x, w16.t())          [rows, 50264], of which 50257 are read
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from takeback.compiler.passes.cost import operations
from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import Argument, Buffer, BufferId, Op, Phase, Program, Region, Role

aten = torch.ops.aten

_MULTIPLE = 8  #: elements of two bytes: 16 bytes, the widest load
_LEAST_OPERATIONS = 1e9  #: less is not worth a pad
_HALVES = (torch.bfloat16, torch.float16)
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  #: where the two factors begin


def align(draft: Draft) -> Draft:
    """Pads what large products of half precision read and write."""
    work = _Aligning(draft.program, draft.kept)
    program = replace(draft.program, ops=tuple(work.ops()), buffers=work.buffers)
    return replace(draft, program=program) if work.changed else draft


@dataclass(frozen=True)
class _Wider:
    """A result of [rows, old columns] that lies in a buffer of `columns` columns."""

    buffer: BufferId
    old: int
    columns: int

    def look(self, region: Region) -> Region | None:
        """The same elements where they are now; None where they are not on a grid of rows and columns."""
        if self.columns == self.old:  # only rows were added, at the end
            return replace(region, buffer=self.buffer)
        stride: list[int] = []
        inside = region.offset % self.old
        for extent, step in zip(region.shape, region.stride, strict=True):
            if step % self.old == 0:
                stride.append(step // self.old * self.columns)
            else:
                stride.append(step)
                inside += (extent - 1) * step
        if inside >= self.old:
            return None
        offset = region.offset // self.old * self.columns + region.offset % self.old
        return replace(region, buffer=self.buffer, stride=tuple(stride), offset=offset)


class _Aligning:
    """One walk over the ops."""

    def __init__(self, program: Program, kept: frozenset[BufferId]) -> None:
        self._program = program
        self.buffers = dict(program.buffers)
        self.changed = False
        self._wider: dict[BufferId, _Wider] = {}
        self._padded: dict[tuple[Region, tuple[int, int]], Region] = {}
        self._named = {r.buffer for _, r in program.named_regions()} | kept
        self._looks: dict[BufferId, list[Region]] = {}
        self._written = {b for op in program.ops for b in op.mutates}
        for op in program.ops:
            for r in (*op.inputs, *op.outputs):
                self._looks.setdefault(r.buffer, []).append(r)

    def ops(self) -> list[Op]:
        found: list[Op] = []
        for op in self._program.ops:
            found += self._product(op) if self._is_odd(op) else [op.map(reads=self._now, writes=self._now)]
            if op.mutates:  # what was padded is not what is there now
                self._padded = {key: new for key, new in self._padded.items() if key[0].buffer not in op.mutates}
        return found

    def _now(self, region: Region) -> Region:
        wider = self._wider.get(region.buffer)
        if wider is None:
            return region
        moved = wider.look(region)
        assert moved is not None, "every look at a result was tried before it was moved"
        return moved

    def _is_odd(self, op: Op) -> bool:
        if op.target not in _PRODUCTS or op.phase is Phase.UPDATE or op.mutates:
            return False
        result = op.results[0]
        first = _PRODUCTS[op.target]
        factors = op.args[first : first + 2]
        if not isinstance(result, Region) or result.dtype not in _HALVES:
            return False
        if not all(isinstance(f, Region) and _is_plain(f) for f in factors) or not _is_whole(result, self.buffers):
            return False
        extents = {n for f in factors if isinstance(f, Region) for n in f.shape}
        return any(n % _MULTIPLE for n in extents) and operations(op) >= _LEAST_OPERATIONS

    def _product(self, op: Op) -> list[Op]:
        first = _PRODUCTS[op.target]
        a, b = op.args[first], op.args[first + 1]
        result = op.results[0]
        assert isinstance(a, Region)
        assert isinstance(b, Region)
        assert isinstance(result, Region)
        rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
        free = result.buffer not in self._named and result.buffer not in self._written
        free &= not first or _is_row(op.args[0], columns)
        wide = _up(columns) if free and self._can_widen(result, _up(columns)) else columns
        high = _up(rows) if free else rows
        deep = _up(inner)
        if (wide, high, deep) == (columns, rows, inner):
            return [op.map(reads=self._now, writes=self._now)]
        self.changed = True
        made: list[Op] = []
        a, b = self._now(a), self._now(b)
        factors = (self._pad(a, (high, deep), op, made), self._pad(b, (deep, wide), op, made))
        before = op.args[:first]
        if first and isinstance(op.args[0], Region) and wide != columns:
            before = (self._pad_row(self._now(op.args[0]), wide, op, made),)
        elif first:
            before = tuple(self._now(r) if isinstance(r, Region) else r for r in before)
        out = result
        if (high, wide) != (rows, columns):
            out = self._new((high, wide), result.dtype)
            self._wider[result.buffer] = _Wider(out.buffer, columns, wide)
        made.append(replace(op, args=(*before, *factors, *op.args[first + 2 :]), results=(out,), scratch=()))
        return made

    def _can_widen(self, result: Region, columns: int) -> bool:
        wider = _Wider(result.buffer, result.shape[1], columns)
        return all(r.dtype == result.dtype and wider.look(r) is not None for r in self._looks[result.buffer])

    def _pad(self, region: Region, shape: tuple[int, int], op: Op, made: list[Op]) -> Region:
        """A factor with these extents, the new ones full of zeros."""
        if region.shape == shape:
            return region
        turned = region.stride[0] == 1 and region.stride[1] != 1
        lying = _turn(region) if turned else region
        wanted = (shape[1], shape[0]) if turned else shape
        key = (lying, wanted)
        if key not in self._padded:
            new = self._new(wanted, region.dtype)
            amount = (0, wanted[1] - lying.shape[1], 0, wanted[0] - lying.shape[0])
            made.append(_pad_op(op, lying, amount, new))
            self._padded[key] = new
        return _turn(self._padded[key]) if turned else self._padded[key]

    def _pad_row(self, region: Region, columns: int, op: Op, made: list[Op]) -> Region:
        """What is added to each row of a product."""
        shape = (*region.shape[:-1], columns)
        new = self._new(shape, region.dtype)
        made.append(_pad_op(op, region, (0, columns - region.shape[-1]), new))
        return new

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Region:
        ident = BufferId(max(self.buffers) + 1)
        stride: tuple[int, ...] = ()
        count = 1
        for extent in reversed(shape):
            stride = (count, *stride)
            count *= extent
        self.buffers[ident] = Buffer(ident, count * dtype.itemsize, Role.INTERNAL)
        return Region(ident, dtype, shape, stride, 0)


def _pad_op(beside: Op, region: Region, amount: tuple[int, ...], result: Region) -> Op:
    return Op(aten.constant_pad_nd.default, (region, amount, 0.0), {}, (result,), phase=beside.phase, site=beside.site)


def _up(extent: int) -> int:
    return -(-extent // _MULTIPLE) * _MULTIPLE


def _turn(region: Region) -> Region:
    return replace(region, shape=region.shape[::-1], stride=region.stride[::-1])


def _is_plain(region: Region) -> bool:
    return len(region.shape) == 2 and 1 in region.stride and all(n > 1 for n in region.shape)


def _is_row(added: Argument, columns: int) -> bool:
    """Whether what is added to a product is one number for each column: nothing is stretched by the padding."""
    return isinstance(added, Region) and added.shape == (columns,)


def _is_whole(region: Region, buffers: dict[BufferId, Buffer]) -> bool:
    lies = len(region.shape) == 2 and region.stride == (region.shape[1], 1) and region.offset == 0
    return lies and region.numel * region.dtype.itemsize == buffers[region.buffer].size_bytes
