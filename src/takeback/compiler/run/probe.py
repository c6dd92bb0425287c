"""Finds out what scratch ops take inside, without running the step: each distinct op is run once, by itself, on zeros.

Fake tensors do not show scratch (a convolution's backward takes twice its outputs), so a prediction asks the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from takeback.compiler.capture.scratch import attach_scratch
from takeback.compiler.ownership.facts import COPY, EMPTY, FILL
from takeback.compiler.program import (
    Argument,
    Buffer,
    BufferId,
    Cluster,
    Op,
    Phase,
    Program,
    Region,
    Scratch,
    Special,
    map_regions,
    regions,
)
from takeback.compiler.run.allocator import Cell, Native
from takeback.compiler.run.recording import Requests
from takeback.errors import CaptureError


def probe_scratch(
    program: Program,
    native: Native,
    progress: Callable[[int, int], None] | None = None,
    *,
    lenient: bool = False,
) -> Program:
    """The program with every op's scratch. `progress(done, total)` is called as distinct ops are tried. `lenient`: an
    op that cannot be tried, for want of memory too, keeps the scratch it has."""
    wanted = [i for i, op in enumerate(program.ops) if _may_take_scratch(op)]
    keys = {i: _signature(program.ops[i], program) for i in wanted}
    first = {key: i for i, key in reversed(keys.items())}
    known: dict[Hashable, tuple[Scratch, ...]] = {}
    failed: set[Hashable] = set()
    for done, (key, i) in enumerate(first.items()):
        try:
            known[key] = _try(program.ops[i], program, native)
        except (CaptureError, RuntimeError, MemoryError):
            if not lenient:
                raise
            failed.add(key)
        if progress is not None:
            progress(done + 1, len(first))
    ops = list(program.ops)
    for i in (i for i in wanted if keys[i] not in failed):
        model = program.ops[first[keys[i]]]
        rename = dict(zip((r.buffer for r in model.outputs), (r.buffer for r in ops[i].outputs), strict=True))
        found = known[keys[i]]
        ops[i] = replace(ops[i], scratch=tuple(s.renamed(rename) for s in found))
    return replace(program, ops=tuple(ops), buffers=_as_large_as_made(program, ops))


def _as_large_as_made(program: Program, ops: Sequence[Op]) -> dict[BufferId, Buffer]:
    """A few kernels make a result in more bytes than it has: mse_loss in those of its operand. Fakes do not."""
    buffers = dict(program.buffers)
    for result, size in ((s.result, s.size_bytes) for op in ops for s in op.scratch):
        if result is not None and size > buffers[result].size_bytes:
            buffers[result] = replace(buffers[result], size_bytes=size)
    return buffers


def _may_take_scratch(op: Op) -> bool:
    target = op.target
    if isinstance(target, Special) or op.phase is Phase.UPDATE or op.expected is not None:
        return False
    if target in EMPTY or target in FILL or target in COPY:
        return False
    return torch.Tag.pointwise not in target.tags


def _signature(op: Op, program: Program) -> Hashable:
    """Ops with equal signatures take equal scratch: buffers are numbered in order of appearance."""
    order: dict[BufferId, int] = {}

    def show(arg: Argument) -> Hashable:
        if isinstance(arg, Region):
            number = order.setdefault(arg.buffer, len(order))
            return (number, program.buffers[arg.buffer].size_bytes, arg.dtype, arg.shape, arg.stride, arg.offset)
        if isinstance(arg, tuple):
            return tuple(show(a) for a in arg)
        return repr(arg)

    inputs = tuple(show(a) for a in op.args) + tuple((k, show(v)) for k, v in op.kwargs.items())
    return (str(op.target), inputs, tuple(show(r) for r in op.results), op.grad_mode)


def _try(op: Op, program: Program, native: Native) -> tuple[Scratch, ...]:
    storages: dict[BufferId, torch.UntypedStorage] = {}

    def build(region: Region) -> Any:
        if region.buffer not in storages:
            size = max(program.buffers[region.buffer].size_bytes, region.span_bytes[1])
            storages[region.buffer] = torch.zeros(size, dtype=torch.uint8, device="cpu").untyped_storage()
        empty = torch.empty(0, dtype=region.dtype, device="cpu")
        return empty.set_(storages[region.buffer], max(region.offset, 0), region.shape, region.stride)

    def lists(arg: Any) -> Any:
        return [lists(a) for a in arg] if isinstance(arg, tuple) else arg

    args = [lists(map_regions(a, build)) for a in op.args]
    kwargs = {k: lists(map_regions(v, build)) for k, v in op.kwargs.items()}
    cell = Cell()
    state = torch.default_generator.get_state()
    mode = torch.is_grad_enabled()
    assert not isinstance(op.target, Special | Cluster)
    try:
        torch._C._set_grad_enabled(op.grad_mode)  # checked on 2.11 and 2.13
        with native.record(cell) as recording:
            cell.view[0] = 0
            out = op.target(*args, **kwargs)
            cell.view[0] = -1
    except RuntimeError as error:  # checked on 2.13: fakes have a batch norm's statistics in bfloat16, kernels do not
        raise CaptureError(
            f"{op.name} cannot be tried by itself, to find the scratch it takes: fake kernels gave operands that the "
            f"real one does not take ({error}). Compile and run the step: what it records is real."
        ) from error
    finally:
        torch._C._set_grad_enabled(mode)
        torch.default_generator.set_state(state)
    outs = out if isinstance(out, tuple | list) else (out,)
    tensors = [t for o in outs for t in (o if isinstance(o, tuple | list) else (o,)) if isinstance(t, torch.Tensor)]
    addresses = {
        r.buffer: t.untyped_storage().data_ptr()
        for r, t in zip(regions(op.results), tensors, strict=True)
        if r.buffer not in op.mutates
    }
    [tried] = attach_scratch([op], addresses, Requests(cell, recording).events)
    return tried.scratch
