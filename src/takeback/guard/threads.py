"""Whether other threads ran meanwhile: what they wrote is not the doing of the node that ran here."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from types import FrameType


def clocks(but: Collection[int]) -> dict[int, object]:
    """For each thread that is inside Python code, other than these, a value that changes when it runs."""
    return {thread: _clock(thread, frame) for thread, frame in sys._current_frames().items() if thread not in but}


def running() -> set[int]:
    """The threads that are inside Python code, or inside what it called."""
    return set(sys._current_frames())


def _clock(thread: int, frame: FrameType | None) -> object:
    """The processor time it has used; where that cannot be asked, the place where it is."""
    if hasattr(time, "pthread_getcpuclockid"):  # its thread is alive: it has a frame, and we have the GIL
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    place = []
    while frame is not None:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return place
