"""Adds the averaging of gradients over a group to the program: each bucket is handed over when its last slice is
complete, and all are awaited before the update.

    dw9 .. dw8 .. REDUCE 0 (dw8, dw9) .. dw7 .. dw6 .. REDUCE 1 (dw6, dw7) .. WAIT (all)  update

Every trainable parameter has a slice, in every plan: the buckets must be the same on every rank, whatever its step did.
One without a gradient gives zeros, and a flag for each parameter says whether it has one. Between REDUCE and WAIT the
slices belong to the group: both ops write them, so nothing else gets their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import Buffer, BufferId, Op, Phase, Program, Region, Role, Special
from takeback.flat import Bucket

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Slice:
    """A trainable parameter's gradient: the parameter's position in the model, and the geometry."""

    parameter: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """What every rank of the group has agreed on. `buckets` are in the order in which they are handed over; of their
    members 0 stands for the flags, i + 1 for slice i."""

    slices: tuple[Slice, ...]
    buckets: tuple[Bucket, ...]

    @property
    def flag_dtype(self) -> torch.dtype:
        return self.slices[0].dtype


def reduce(draft: Draft, *, sharing: Sharing) -> Draft:
    """The draft with the reductions, a slice for every trainable parameter, and the flags."""
    program = draft.program
    first_update = next((i for i, op in enumerate(program.ops) if op.phase is Phase.UPDATE), len(program.ops))
    backward, update = program.ops[:first_update], program.ops[first_update:]
    written: dict[BufferId, int] = {}
    barrier = -1  # up to the last value that is read into Python, the step may turn out to need another plan
    for position, op in enumerate(backward):
        if op.may_send_back:
            barrier = position
        written.update(dict.fromkeys([*(r.buffer for r in op.outputs), *op.mutates], position))
    made = _Made(program)
    flags, mark = made.flags(sharing)
    regions, complete = [flags], [-1]
    prepare: list[Op | None] = [mark]
    copied: dict[Region, Region] = {}
    taken: set[BufferId] = set()
    for s in sharing.slices:
        grad = program.grads.get(s.parameter)
        fill: Op | None = None
        if grad is None:
            region, fill = made.zeros(s)
        elif made.is_whole(grad) and grad.buffer not in taken:
            region = grad
        else:
            region, fill = made.copy(grad)
            copied[grad] = region
        taken.add(region.buffer)
        regions.append(region)
        prepare.append(fill)
        complete.append(-1 if grad is None else written.get(grad.buffer, -1))
    after: dict[int, list[Op]] = {}
    where = barrier
    for number, bucket in enumerate(sharing.buckets):
        where = max([where, *(complete[m] for m in bucket.members)])
        members = tuple(_flat(regions[m]) for m in bucket.members)
        handover = Op(Special.REDUCE, (number, bucket.numel, members), {}, (), _buffers(members), Phase.BACKWARD)
        after.setdefault(where, []).extend([*filter(None, (prepare[m] for m in bucket.members)), handover])
    ops = list(after.get(-1, ()))
    for position, op in enumerate(backward):
        ops += [op, *after.get(position, ())]
    everything = tuple(map(_flat, regions))
    ops.append(Op(Special.WAIT, (everything,), {}, (), _buffers(everything), Phase.BACKWARD))
    ops += [_reading(op, copied) for op in update]
    slices = {s.parameter: region for s, region in zip(sharing.slices, regions[1:], strict=True)}
    extra = {flags.buffer, *(r.buffer for i, r in slices.items() if i not in program.grads)}
    moved = {old.buffer: {new.buffer for o, new in copied.items() if o.buffer == old.buffer} for old in copied}
    kept = frozenset(b for old in draft.kept for b in moved.get(old, {old})) | extra
    done = replace(
        program,
        ops=tuple(ops),
        buffers=made.buffers,
        externals=made.externals,
        grads={i: slices.get(i, r) for i, r in program.grads.items()},
        slices=slices,
        flags=flags,
    )
    return replace(draft, program=done, kept=kept)


class _Made:
    """The buffers that are added, and what fills them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers: dict[BufferId, Buffer] = dict(program.buffers)
        self.externals = dict(program.externals)

    def is_whole(self, region: Region) -> bool:
        buffer = self.buffers[region.buffer]
        return not buffer.role.borrowed and region.packed and region.span_bytes == (0, buffer.size_bytes)

    def flags(self, sharing: Sharing) -> tuple[Region, Op]:
        """1 for every parameter that has a gradient in this plan, else 0. The group leaves 0 where no rank has one."""
        used = [float(s.parameter in self.program.grads) for s in sharing.slices]
        constant = torch.tensor(used, dtype=sharing.flag_dtype, device=self.program.device)
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, constant.untyped_storage().nbytes(), Role.CONSTANT, "used")
        self.externals[ident] = constant
        source = Region(ident, constant.dtype, tuple(constant.shape), constant.stride(), 0)
        region = self._like(source)
        return region, Op(aten.clone.default, (source,), {}, (region,), phase=Phase.BACKWARD)

    def zeros(self, s: Slice) -> tuple[Region, Op]:
        region = self._like(Region(BufferId(-1), s.dtype, s.shape, s.stride, 0))
        kwargs = {"dtype": s.dtype, "device": self.program.device}
        flat = _flat(region)
        return region, Op(aten.zeros.default, (flat.shape,), kwargs, (flat,), phase=Phase.BACKWARD)

    def copy(self, source: Region) -> tuple[Region, Op]:
        assert source.packed, "a gradient has its parameter's strides, or is contiguous"
        region = self._like(source)
        return region, Op(aten.clone.default, (source,), {}, (region,), phase=Phase.BACKWARD)

    def _like(self, region: Region) -> Region:
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, region.numel * region.dtype.itemsize, Role.INTERNAL)
        return replace(region, buffer=ident, offset=0)


def _flat(region: Region) -> Region:
    return replace(region, shape=(region.numel,), stride=(1,))


def _buffers(regions: tuple[Region, ...]) -> tuple[BufferId, ...]:
    return tuple(dict.fromkeys(r.buffer for r in regions))


def _reading(op: Op, copied: Mapping[Region, Region]) -> Op:
    """An op of the update, on the slices in place of the gradients that were copied there."""

    def change(region: Region) -> Region:
        begin, end = region.span_bytes
        for old, new in copied.items():
            if region.buffer == old.buffer and old.span_bytes[0] <= begin and end <= old.span_bytes[1]:
                return replace(region, buffer=new.buffer, offset=region.offset - old.offset)
        return region

    return op.map(reads=change, writes=change)
