"""Finds, after a recorded step, what a replay would get wrong in silence: a tensor of the step that somebody still
holds, be it returned or not, and one that came into it behind torch's back."""

from __future__ import annotations

import collections
import gc
from collections.abc import Sequence

import torch

from takeback.compiler.capture.buffers import BufferTable
from takeback.compiler.program import BufferId, Op, Role
from takeback.engine import holders


def escaped(table: BufferTable, ops: Sequence[Op], allowed: Sequence[torch.Tensor]) -> Op | None:
    """The op whose result somebody still holds, though it is none of the allowed tensors; or None."""
    keep = {table.region(t).buffer for t in allowed}
    if any(b not in keep for b in table.still_alive()):
        gc.collect()
    return _maker(next((b for b in table.still_alive() if b not in keep), None), ops)


def held_besides(
    table: BufferTable, ops: Sequence[Op], returned: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Op | None:
    """The op whose result is returned and held besides, by others than the given tensors, which nobody else has seen;
    or None."""
    found = _held_besides(table, returned, given)
    if found is not None:
        gc.collect()
        found = _held_besides(table, returned, given)
    return _maker(found, ops)


def _held_besides(
    table: BufferTable, returned: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> BufferId | None:
    times = collections.Counter(table.region(t).buffer for t in {id(t): t for t in given}.values())
    made = set(table.still_alive())
    storages = {table.region(t).buffer: t.untyped_storage() for t in returned}
    return next((b for b, s in storages.items() if b in made and holders(s) > times[b] + 1), None)


def _maker(buffer: BufferId | None, ops: Sequence[Op]) -> Op | None:
    return next((op for op in ops if any(r.buffer == buffer for r in op.outputs)), None)


def orphan(table: BufferTable, ops: Sequence[Op]) -> Op | None:
    """The op that reads a tensor made inside the step behind torch's back (numpy, a C++ extension); or None."""
    for ident, tensor in table.externals.items():
        # Checked on 2.11 and 2.13: one use is our own alias of it, so nobody else holds these bytes.
        storage = tensor.untyped_storage()
        if table.buffers[ident].role is Role.CLOSURE and torch._C._storage_Use_Count(storage._cdata) <= 2:
            return next(op for op in ops if any(r.buffer == ident for r in op.inputs))
    return None
