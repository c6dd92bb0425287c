"""The form of a program, checked after every pass: a broken pass is found at its own door, not by what it breaks.

In: a program, and the buffers that must last to the end of the step. Out: nothing, or a `FormError` that names the op.
One walk over the ops, and no question about lifetimes or places: those are the borrow check's.

- every buffer that anything names is in the table, under its own id
- every region lies inside its buffer; only a batch leaf's place in its storage is not known
- every read of what the step makes has a writer before it; what `torch.empty` gave counts as written
- an op declares what its schema writes, and mutates nothing but its operands and results
- scratch that is called a result is a result of its op
- everything that a field names, or that is kept, is written or borrowed
- once the update has begun, nothing can send the step back: no value is read into Python, no random state or group used
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from takeback.compiler.program import (
    Buffer,
    BufferId,
    Op,
    OpOverload,
    Phase,
    Program,
    Region,
    Role,
    Special,
    regions,
    show_op,
)
from takeback.compiler.schema import once_for_each, schema_of


class FormError(AssertionError):
    """A pass, or the recorder, left a program that is none: a bug of takeback's, never the user's."""


def check_form(program: Program, kept: frozenset[BufferId] = frozenset()) -> None:
    """Raises `FormError` at the first op, buffer or field that breaks a rule."""
    buffers = program.buffers
    _check_table(program, kept)
    written = {b for b, buffer in buffers.items() if buffer.role.borrowed}
    updating = False
    for position, op in enumerate(program.ops):
        wrong = _wrong(op, buffers, written)
        updating = updating or op.phase is Phase.UPDATE
        if wrong is None and updating and (op.may_send_back or isinstance(op.target, Special)):
            wrong = "comes after the update has begun, when nothing can send the step back any more"
        if wrong is not None:
            raise FormError(f"op {position}, {_show(op, buffers)}: {wrong}")
    for field, region in program.named_regions():
        if (outside := _outside(region, buffers)) is not None:
            raise FormError(f"{field} {outside}")
        if region.buffer not in written:
            raise FormError(f"{field} names %{region.buffer}, which nothing writes")
    unwritten = sorted(kept - written)
    if unwritten:
        raise FormError(f"%{unwritten[0]} is kept, and nothing writes it")


def _check_table(program: Program, kept: frozenset[BufferId]) -> None:
    buffers = program.buffers
    for key, buffer in buffers.items():
        if key != buffer.id:
            raise FormError(f"buffer %{buffer.id} is in the table as %{key}")
    tables = {"externals": program.externals, "leaves": program.leaves, "eager_death": program.eager_death}
    for name, ids in {**tables, "kept": kept}.items():
        for ident in ids:
            if ident not in buffers:
                raise FormError(f"{name} names %{ident}, which is not in the table of buffers")


def _wrong(op: Op, buffers: Mapping[BufferId, Buffer], written: set[BufferId]) -> str | None:
    """The first rule that an op breaks, in words, or None; what it writes is added to `written`."""
    inputs, outputs = op.inputs, op.outputs
    filled: tuple[BufferId, ...] = ()
    if op.mutates:
        touched = [r.buffer for r in inputs + outputs]
        for ident in op.mutates:
            if ident not in touched:
                return f"mutates %{ident}, which is none of its operands or results"
    for position, name, is_out in _writes(op.target):
        argument = op.args[position] if position < len(op.args) else op.kwargs.get(name)
        for region in regions(argument):
            if region.buffer not in op.mutates:
                return f"writes %{region.buffer} as {name}, and does not say that it mutates it"
            if is_out:
                filled += (region.buffer,)
    for region in inputs:
        if (wrong := _outside(region, buffers)) is not None:
            return wrong
        if region.buffer not in written and region.buffer not in filled:
            return f"reads %{region.buffer}, which nothing has written before it"
    for region in outputs:
        if (wrong := _outside(region, buffers)) is not None:
            return wrong
        written.add(region.buffer)
    for scratch in op.scratch:
        if scratch.result is not None and all(scratch.result != r.buffer for r in outputs):
            return f"takes scratch as its result %{scratch.result}, which is none of its results"
    written.update(op.mutates)
    return None


def _outside(region: Region, buffers: Mapping[BufferId, Buffer]) -> str | None:
    """In words, where a region lies outside of every buffer, or of its own; None if it does not."""
    buffer = buffers.get(region.buffer)
    if buffer is None:
        return f"names %{region.buffer}, which is not in the table of buffers"
    begin, size = region.offset, _spanned(region.shape, region.stride)
    if begin >= 0 and (begin + size) * region.dtype.itemsize <= buffer.size_bytes:
        return None
    # A batch leaf's regions count from its first element, and it is a view of a storage of any size.
    if size == 0 or buffer.role is Role.BATCH:
        return None
    first, last = region.span_bytes
    return f"looks at bytes [{first}, {last}) of the {buffer.size_bytes} bytes of %{buffer.id}"


@functools.lru_cache(maxsize=4096)  # a program has few geometries
def _spanned(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first one that is touched to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))


@once_for_each
def _writes(target: OpOverload | Special) -> tuple[tuple[int, str, bool], ...]:
    """Position, name and whether it is an `out=` argument, of what the schema writes."""
    if isinstance(target, Special):
        return ()
    return tuple((i, p.name, p.is_out) for i, p in enumerate(schema_of(target).parameters) if p.is_written)


def _show(op: Op, buffers: Mapping[BufferId, Buffer]) -> str:
    try:
        shown = show_op(op, buffers)
    except KeyError:  # it names a buffer that is not there
        shown = op.name
    where = f" at {op.site.describe()}" if op.site else ""
    return shown[:200] + where
