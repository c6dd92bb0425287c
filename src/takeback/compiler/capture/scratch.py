"""What ops take from the allocator inside, found by joining its log with the recorded ops: results and scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from takeback.compiler.program import BufferId, Op, Scratch


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One request or release of memory, while the op at position `op` ran."""

    is_alloc: bool
    op: int
    size_bytes: int
    block: int
    address: int


class AllocatorLog(Protocol):
    """A recording of the allocator: complete once its context has been left."""

    cell: Any  #: where to say which op runs

    @property
    def events(self) -> Sequence[AllocatorEvent]: ...


def attach_scratch(ops: Sequence[Op], address_of: Mapping[BufferId, int], events: Sequence[AllocatorEvent]) -> list[Op]:
    """The ops with what each took from the allocator while it ran."""
    per_op: dict[int, list[AllocatorEvent]] = {}
    for event in events:
        per_op.setdefault(event.op, []).append(event)
    attached: list[Op] = []
    for position, op in enumerate(ops):
        inside = per_op.get(position)
        attached.append(replace(op, scratch=_scratch(op, address_of, inside)) if inside else op)
    return attached


def _scratch(op: Op, address_of: Mapping[BufferId, int], events: list[AllocatorEvent]) -> tuple[Scratch, ...]:
    results = {address_of[r.buffer]: r.buffer for r in op.outputs if r.buffer in address_of}
    taken: dict[int, Scratch] = {}
    for time, event in enumerate(events):
        if event.is_alloc:
            taken[event.block] = Scratch(event.size_bytes, time, None, results.get(event.address))
        elif event.block in taken:
            # The address of a result may have been used for scratch before it.
            taken[event.block] = replace(taken[event.block], end=time, result=None)
    return tuple(taken.values())
