"""What ops take from CUDA's caching allocator, read from its host-side statistics: no synchronisation.

Reading the most bytes inside one op needs the peak statistics to be reset before it, so torch.cuda.max_memory_allocated
starts anew whenever a step is recorded or rehearsed; a steady step leaves the statistics alone.
"""

from __future__ import annotations

import torch

from takeback.compiler.capture.scratch import AllocatorEvent

_SPARE = 1.03  #: of what a plan needs: blocks of other sizes, which it could use


class Meter:
    """Bytes taken inside an op above what outlives it: `begin()`, run the op, `end()`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> int:
        """A workspace that comes once and stays (cuBLAS) outlives the op, so it is not counted."""
        # Requested bytes: what tensors need, without the allocator's rounding.
        requested = torch.cuda.memory_stats_as_nested_dict(self._device)["requested_bytes"]["all"]
        return max(int(requested["peak"]) - int(requested["current"]), 0)

    def requests(self) -> int:
        """How often the allocator was asked so far."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocation"]["all"]["allocated"])

    def trim(self, needed_bytes: int) -> None:
        """Gives back what the recording, which is eager's step, and comparisons left in the allocator's cache, if that
        is more than the plan will need. Never in a steady step: it waits for the device."""
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if cached > _SPARE * needed_bytes:
            torch.cuda.empty_cache()

    def give_back(self) -> None:
        """Gives back all of the cache: what comes next takes blocks of other sizes, and would take them besides."""
        torch.cuda.empty_cache()


class NoMeter:
    """Where the allocator keeps no statistics."""

    def begin(self) -> None:
        pass

    def end(self) -> int:
        return 0

    def requests(self) -> int:
        return 0

    def trim(self, needed_bytes: int) -> None:
        pass

    def give_back(self) -> None:
        pass


def meter_for(device: torch.device) -> Meter | NoMeter:
    return Meter(device) if device.type == "cuda" else NoMeter()


class MeterCell:
    """Told by the recorder which op runs (`cell[0] = 57`, then -1), it measures that op."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._op = -1
        self.taken: list[tuple[int, int]] = []

    def __setitem__(self, index: int, op: int) -> None:
        if op >= 0:
            self._meter.begin()
        elif self._op >= 0:
            inside = self._meter.end()
            if inside:
                self.taken.append((self._op, inside))
        self._op = op


class MeterLog:
    """A recording by statistics: all that an op took inside and gave back is one request and one release."""

    def __init__(self, meter: Meter) -> None:
        self.cell = MeterCell(meter)

    @property
    def events(self) -> list[AllocatorEvent]:
        return [
            AllocatorEvent(is_alloc, op, size, block, -1)
            for block, (op, size) in enumerate(self.cell.taken)
            for is_alloc in (True, False)
        ]
