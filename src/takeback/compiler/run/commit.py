"""Decides when Ctrl-C may strike: at once while a step only computes, after the commit once it writes for good.

A `Gate` is shut unless it is opened. While it is open an interrupt is raised as always, and the gate shuts with it, so
that what takes the step back is not interrupted in turn. While it is shut the interrupt is kept, and raised on leaving.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Gate:
    """A context manager. Only the main thread receives signals, so elsewhere it does nothing."""

    __slots__ = ("_pending", "_previous", "open")

    def __init__(self) -> None:
        self.open = False
        self._pending = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None

    def __enter__(self) -> Gate:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # else it is ignored, or not Python's: leave it alone
                self._previous = previous
                signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.open:
            self._pending = True
            return
        self.open = False
        assert callable(self._previous)
        self._previous(number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open = False
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if self._pending:
            signal.raise_signal(signal.SIGINT)
