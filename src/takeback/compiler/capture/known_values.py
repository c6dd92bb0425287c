"""The values of a fake tensor that depends on no data: made of `arange`, `ones`, constants and what comes of them.

In: the ops recorded so far. Out: the tensor, computed on the CPU by running the few ops behind it; None where a
parameter, the batch or a random number is among them. Models read such values into Python (transformers asks whether
position ids are consecutive), and a prediction need not give up there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from takeback.compiler.capture.modes import WithoutDispatchModes
from takeback.compiler.capture.op_facts import facts_of
from takeback.compiler.program import Argument, Buffer, BufferId, Op, Region, Role, Special

_MOST_BYTES = 1 << 28  #: of all that would be computed: masks and positions, not activations


def known_value(
    ops: Sequence[Op],
    buffers: Mapping[BufferId, Buffer],
    externals: Mapping[BufferId, torch.Tensor],
    region: Region,
) -> torch.Tensor | None:
    """What `region` holds after `ops`."""
    needed, behind = {region.buffer}, list[Op]()
    for op in reversed(ops):
        if needed.isdisjoint(r.buffer for r in op.outputs) and needed.isdisjoint(op.mutates):
            continue
        if isinstance(op.target, Special) or facts_of(op.target).random:
            return None
        behind.append(op)
        needed.update(r.buffer for r in op.inputs)
    roles = {buffers[b].role for b in needed}
    if not roles <= {Role.INTERNAL, Role.CONSTANT} or sum(buffers[b].size_bytes for b in needed) > _MOST_BYTES:
        return None
    with WithoutDispatchModes(), torch.no_grad():
        held = {b: _bytes(buffers[b], externals.get(b)) for b in needed}
        for op in reversed(behind):
            _run_(op, held)
        return _look(region, held).clone()


def _bytes(buffer: Buffer, constant: torch.Tensor | None) -> torch.UntypedStorage:
    if constant is not None:
        return constant.clone().untyped_storage()
    return torch.zeros(buffer.size_bytes, dtype=torch.uint8).untyped_storage()


def _look(region: Region, held: Mapping[BufferId, torch.UntypedStorage]) -> torch.Tensor:
    made = torch.empty(0, dtype=region.dtype)
    return made.set_(held[region.buffer], region.offset, region.shape, region.stride)


def _run_(op: Op, held: Mapping[BufferId, torch.UntypedStorage]) -> None:
    def given(argument: Argument) -> Any:
        if isinstance(argument, Region):
            return _look(argument, held)
        if isinstance(argument, tuple):
            return [given(a) for a in argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    target: Any = op.target
    made = target(*map(given, op.args), **{name: given(value) for name, value in op.kwargs.items()})
    for result, region in zip(made if isinstance(made, tuple | list) else (made,), op.results, strict=True):
        if isinstance(region, Region) and region.buffer not in op.mutates:
            _look(region, held).copy_(result)
