"""The ledger: one entry for every value of a plan, with what became of its bytes, where, and why."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from takeback.compiler.explain.loss_values import loss_values
from takeback.compiler.layout import PASS, Layout
from takeback.compiler.ownership.kinds import Kind
from takeback.compiler.passes.draft import Overwrites, Packed
from takeback.compiler.program import BufferId, Cluster, Op, Phase, Region, Role, Special


class Fate(enum.StrEnum):
    """What became of a value's bytes."""

    MOVED = "moved"
    OVERWRITTEN = "overwritten"
    PACKED = "packed"
    PLACED = "placed"
    RECOMPUTED = "recomputed"
    COPIED = "copied"
    SCRATCH = "scratch"
    PASSED = "passed"


ACTIVATION, GRADIENT, BACKWARD, UPDATE, SCRATCH = "activation", "gradient", "backward", "update", "scratch"
LOSS = "loss"
PARTS = (GRADIENT, ACTIVATION, LOSS, BACKWARD, UPDATE, SCRATCH)
"""What a value of the step can be of: the gradient of a parameter, something that the forward made, the loss and what
it gives to the backward of the model, something else that the backward made, something of the update, bytes that an op
took for itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: its size, its fate, the op that made it, the user's line, the reason, its place and lifetime."""

    value: str
    size_bytes: int
    fate: Fate
    op: str
    line: str
    reason: str
    offset_bytes: int | None = None  #: in the arena, if there is one
    start: int | None = None
    end: int | None = None
    owner: str = ""  #: whose bytes these are in the end: what has the same owner takes the same bytes
    module: str = ""  #: the path of the module that made it: `layers.3.mlp.up_proj`; "" outside of submodules
    part: str = ""  #: of what it is: one of `PARTS`


def ledger(layout: Layout) -> tuple[Entry, ...]:
    """Every value of the plan, in program order."""
    return (*_moved(layout), *_made(layout), *_returned(layout))


def _line(op: Op) -> str:
    return str(op.site) if op.site else ""


def _module(op: Op) -> str:
    return op.site.module if op.site else ""


_PART = {Phase.FORWARD: ACTIVATION, Phase.BACKWARD: BACKWARD, Phase.UPDATE: UPDATE}


def _moved(layout: Layout) -> Iterator[Entry]:
    for m in layout.draft.moves:
        reason = f"eager copies %{m.source} here; nobody reads it afterwards, so its bytes are handed on"
        yield Entry(f"%{m.copy}", m.size_bytes, Fate.MOVED, m.op, str(m.site or ""), reason)


def _made(layout: Layout) -> Iterator[Entry]:
    program = layout.draft.program
    refused: dict[BufferId, str] = {r.buffer: r.reason for r in layout.draft.refusals if r.decision == "move"}
    grads = {r.buffer for r in (program.slices or program.grads).values()}
    of_loss = loss_values(program)
    bucket_of = {b: op.args[0] for op in program.ops if op.target is Special.REDUCE for b in op.mutates}
    seen: set[BufferId] = set()
    for position, (op, kind) in enumerate(zip(program.ops, layout.kinds, strict=True)):
        for region in op.outputs:
            buffer = region.buffer
            if buffer in seen or buffer not in layout.alive:
                continue
            seen.add(buffer)
            life = layout.alive[buffer]
            placement = layout.draft.placements.get(buffer)
            size = program.buffers[buffer].size_bytes
            if buffer in layout.draft.rebuilt:
                fate, reason = Fate.RECOMPUTED, "dropped over the peak and rebuilt here from what is alive anyway"
            elif isinstance(slice_ := layout.draft.placements.get(layout.owners[buffer]), Packed) and buffer in grads:
                fate = Fate.PACKED
                reason = f"a gradient: {slice_.offset_bytes:,} bytes into the flat {slice_.buffer} gradients"
                if buffer in bucket_of:
                    reason += f", averaged over the group in bucket {bucket_of[buffer]}"
                if isinstance(placement, Overwrites):
                    reason += f", written onto %{placement.buffer}, which dies here"
            elif isinstance(placement, Overwrites):
                fate = Fate.OVERWRITTEN
                reason = f"written onto %{placement.buffer}, which dies here"
                if op.phase is Phase.BACKWARD and op.name.startswith("add"):
                    reason = f"a sum of gradients: added onto its first contribution %{placement.buffer}"
            elif kind is Kind.COPY:
                fate, reason = Fate.COPIED, _copy_reason(op, refused.get(buffer))
            else:
                fate, reason = Fate.PLACED, "its bytes are its own from first write to last use"
            yield Entry(
                f"%{buffer}",
                size,
                fate,
                op.name,
                _line(op),
                reason,
                layout.arena.offsets[buffer] if layout.arena is not None else None,
                life.start,
                life.end,
                f"%{layout.owners[buffer]}",
                _module(op),
                GRADIENT if buffer in grads else LOSS if buffer in of_loss else _PART[op.phase],
            )
        yield from _scratch(layout, position)


def _scratch(layout: Layout, position: int) -> Iterator[Entry]:
    """What an op takes for itself, and at which offset, if there is an arena."""
    op = layout.program.ops[position]
    taken: list[tuple[int, int | None]]
    if layout.arena is None:
        taken = [(s.size_bytes, None) for s in op.scratch if s.result is None and s.end is not None]
    else:
        taken = [(r.size_bytes, r.offset_bytes) for r in layout.arena.requests[position] if r.result is None]
    for number, (size, offset) in enumerate(taken):
        if offset == PASS:
            inside = "its kernels" if isinstance(op.target, Cluster) else "its op inside torch"
            reason = f"outlives {inside}, so the ordinary allocator serves it"
            yield Entry("scratch", size, Fate.PASSED, op.name, _line(op), reason)
        else:
            where = f"scratch {number} of op {position}"
            reason = "taken inside the op"
            place = (offset, position, position + 1, where)
            yield Entry("scratch", size, Fate.SCRATCH, op.name, _line(op), reason, *place, _module(op), SCRATCH)


def _copy_reason(op: Op, refused: str | None) -> str:
    source, result = op.args[0], op.results[0]
    assert isinstance(source, Region)
    assert isinstance(result, Region)
    if source.dtype != result.dtype:
        return f"the program converts {source.dtype} to {result.dtype}"
    return f"the program copies it, and {refused}" if refused else "the program copies it"


def _returned(layout: Layout) -> Iterator[Entry]:
    program = layout.draft.program
    named: list[tuple[Region, str]] = [(program.loss, "loss"), *((r, "aux") for r in program.aux)]
    if program.grad_norm is not None:
        named.append((program.grad_norm, "grad_norm"))
    for region, name in named:
        size = region.numel * region.dtype.itemsize
        yield Entry(name, size, Fate.COPIED, "clone", "", "returned to the caller, so it must outlive the arena")
    written = dict.fromkeys(
        b for op in program.ops if op.phase is not Phase.UPDATE for b in op.mutates if program.buffers[b].role.borrowed
    )
    for b in written:
        buffer = program.buffers[b]
        what = (
            "the caller's batch, which the step writes," if buffer.role is Role.BATCH else "written before the update,"
        )
        reason = f"{what} saved so that an interrupted step can be taken back"
        yield Entry(buffer.name, buffer.size_bytes, Fate.COPIED, "copy_", "", reason)
