"""Lets the recorder see what ops ask of the allocator: one native recording, or the statistics of CUDA's allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from takeback.compiler.capture.scratch import AllocatorEvent
from takeback.compiler.run.allocator import ALLOC, Cell, Native, Recording
from takeback.compiler.run.meter import Meter, MeterLog


class Requests:
    """What ops asked of the allocator in one recording: the recorder writes to `cell`, and `events` come out."""

    def __init__(self, cell: Cell, recording: Recording) -> None:
        self.cell = cell.view
        self._recording = recording

    @property
    def events(self) -> list[AllocatorEvent]:
        return [
            AllocatorEvent(
                bool(e["kind"] == ALLOC), int(e["op"]), int(e["size_bytes"]), int(e["id"]), int(e["address"])
            )
            for e in self._recording.events
        ]


def recorder(
    native: Native | None, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Requests | MeterLog]] | None:
    """A context for one recorded step, or None where there is nothing to read requests from."""
    if device.type == "cuda":
        return lambda: contextlib.nullcontext(MeterLog(Meter(device)))
    if native is None:
        return None

    @contextlib.contextmanager
    def context() -> Iterator[Requests]:
        cell = Cell()
        with native.record(cell) as recording:
            yield Requests(cell, recording)

    return context
