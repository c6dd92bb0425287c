"""A layout in; out what every op of it does to the arena's bytes, for the borrow check.

Nothing that was decided is taken on trust: that a result may be written onto an operand is looked up among the facts,
lifetimes must hold what is read and written, and what the caller gets is read once more after the last op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from takeback.compiler.ownership import borrow
from takeback.compiler.ownership.facts import EMPTY, may_write_onto
from takeback.compiler.ownership.kinds import Kind
from takeback.compiler.passes.draft import Overwrites
from takeback.compiler.program import BufferId, Op, Program, Special, regions, show_op
from takeback.errors import BorrowError
from takeback.flat import ALIGNMENT_BYTES, rounded_up

if TYPE_CHECKING:
    from takeback.compiler.layout import ArenaPlan, Layout, Request


@dataclass(frozen=True, slots=True)
class _Label:
    """An op in words, which are made when they are asked for."""

    op: Op
    program: Program
    before: str = ""

    def __str__(self) -> str:
        return f"{self.before}{show_op(self.op, self.program.buffers)[:200]}"


def effects(layout: Layout) -> Iterator[borrow.Effect]:
    """What every op does to the arena's bytes: a new value for every write, its reads by the value they mean."""
    program, arena = layout.program, layout.placed
    version: dict[BufferId, int] = {}
    empty = {r.buffer for op in program.ops if op.target in EMPTY for r in op.outputs}
    count = 0

    def access(buffer: BufferId, position: int) -> borrow.Access:
        start = arena.offsets[buffer]
        end = start + program.buffers[buffer].size_bytes
        name = program.buffers[buffer].name or f"%{buffer}"
        if end > arena.size_bytes:
            raise BorrowError(f"{name} reaches beyond the arena of {arena.size_bytes} bytes, to {end}")
        life = layout.alive[buffer]
        if not life.start <= position < life.end:
            raise BorrowError(f"{name} is in use at op {position}, outside of its lifetime [{life.start}, {life.end})")
        return borrow.Access(version[buffer], borrow.Span(start, end), name)

    for position, (op, kind) in enumerate(zip(program.ops, layout.kinds, strict=True)):
        if kind is Kind.NOTHING:
            continue
        if op.target is Special.REDUCE:
            _check_bucket(op, arena)
        mutated = set(op.mutates)
        placed = [r.buffer for r in op.inputs if r.buffer in arena.offsets]
        # A buffer's first write may be an op that fills it in place, and what torch.empty gave holds anything.
        early = [b for b in placed if b not in version and b not in mutated and b not in empty]
        if early:
            raise BorrowError(f"{show_op(op, program.buffers)[:200]} reads %{early[0]} before anything has written it")
        read = dict.fromkeys(b for b in placed if b in version)
        reads = {b: access(b, position) for b in read}
        written = dict.fromkeys(r.buffer for r in op.outputs if r.buffer in arena.offsets)
        written.update(dict.fromkeys(b for b in mutated if b in arena.offsets))
        allowed: set[tuple[int, int]] = set()
        writes: list[borrow.Access] = []
        for b in written:
            before = version.get(b)
            count += 1
            version[b] = count
            writes.append(access(b, position))
            if b in mutated and before is not None:
                allowed.add((count, before))
            placement = layout.draft.placements.get(b)
            if isinstance(placement, Overwrites) and placement.op == position:
                onto = reads.get(placement.buffer)
                if onto is not None and may_write_onto(op, b, placement.buffer, program.buffers):
                    allowed.add((count, onto.value))
        scratch = tuple(_scratch_spans(arena.requests[position], program))
        label = _Label(op, program)
        operands = tuple(reads.values())
        if scratch:
            # Scratch that is released before a result is asked for may lie where the result will: the operands must
            # survive it, the results come after it. What overlaps in time as well is the validator's to find.
            yield borrow.Effect(position, _Label(op, program, "scratch of "), operands, (), scratch=scratch)
        yield borrow.Effect(position, label, operands, tuple(writes), frozenset(allowed))
    end = len(program.ops)
    last = [
        b for b in dict.fromkeys((*(r.buffer for r in program.returned), *sorted(layout.draft.kept))) if b in version
    ]
    survivors = tuple(access(b, end - 1) for b in last)
    yield borrow.Effect(end, "the caller, after the step", survivors, ())


def _scratch_spans(requests: tuple[Request, ...], program: Program) -> Iterator[borrow.Span]:
    """What an op takes for itself: its scratch, and what it takes for a result beyond the result's own bytes."""
    for e in requests:
        if e.offset_bytes >= 0:  # else the ordinary allocator answers
            own = program.buffers[e.result].size_bytes if e.result is not None else 0
            if e.size_bytes > own:
                yield borrow.Span(e.offset_bytes + own, e.offset_bytes + e.size_bytes)


def _check_bucket(op: Op, arena: ArenaPlan) -> None:
    """A group averages a bucket in one piece: its slices must lie in the order of the flat tensor, as on every rank."""
    _, numel, members = op.args
    held = tuple(regions(members))
    start = at = arena.offsets[held[0].buffer]
    end = start
    for region in held:
        size = region.numel * region.dtype.itemsize
        if arena.offsets[region.buffer] != at:
            raise BorrowError(
                f"slice %{region.buffer} is at {arena.offsets[region.buffer]}, and its bucket has it at {at}"
            )
        end, at = at + size, at + rounded_up(size, ALIGNMENT_BYTES)
    if end - start != numel * held[0].dtype.itemsize:
        raise BorrowError(f"a bucket has {end - start} bytes, and the group expects {numel} elements")
