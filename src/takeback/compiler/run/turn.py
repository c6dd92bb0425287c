"""A compiled step runs once at a time: neither inside another step, nor on two threads.

Nothing is remembered that Ctrl-C could leave behind: who is inside is read off the Python stacks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TypeVar

from takeback.errors import CaptureError

T = TypeVar("T")


class Turn:
    """Of one step: calls `work`, or raises `CaptureError` where it is not this caller's turn."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, work: Callable[[], T]) -> T:
        for _ in _turns_of(sys._getframe().f_back):
            raise CaptureError(
                "a compiled step is called inside another compiled step (in its loss_fn, its model or a hook). The "
                "outer one would record the inner one's kernels, and a replay would not train the inner model. Call "
                "one after the other, or compile one step whose loss_fn does both."
            )
        if not self._lock.acquire(blocking=False) and self._is_running():
            raise CaptureError(
                "this step is running on another thread, and its memory holds one step at a time. Call it from one "
                "thread at a time (with a lock of your own), or compile a step for each thread."
            )
        try:
            return work()
        finally:
            if self._lock.locked():
                self._lock.release()

    def _is_running(self) -> bool:
        """Whether the lock is held by somebody who is inside; else Ctrl-C struck just before it was released."""
        mine = threading.get_ident()
        frames = [frame for thread, frame in sys._current_frames().items() if thread != mine]
        return any(turn is self for frame in frames for turn in _turns_of(frame))


_CALLING: CodeType = Turn.__call__.__code__


def _turns_of(frame: FrameType | None) -> Iterator[Turn]:
    """The turns that a stack is inside of."""
    while frame is not None:
        if frame.f_code is _CALLING:
            yield frame.f_locals["self"]
        frame = frame.f_back
