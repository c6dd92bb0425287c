"""Where nodes were made: the line of the user's code and the module, for every autograd node made under a guard.

Nothing of torch is hooked or patched for it. A trace function (sys.settrace) sees the user's lines go by; the numbers
that torch gave to nodes meanwhile belong to the line that has just run. Where a debugger or a coverage tool traces
already, it is left alone, and lines are unknown.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from takeback.guard.engine import MODULE_CALL, never_compiled, sequence_number

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ZOO = os.path.join(_OURS, "zoo") + os.sep
_KEPT = 1 << 20
"""Of how many nodes the line is remembered."""


@dataclass(frozen=True)
class NodeSite:
    """A line of the user's, and the module whose call it ran in."""

    file: str
    line: int
    function: str
    module: str  #: its path in the outermost module that was called; "" outside of any
    kind: str  #: the module's class

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        where = f"{os.path.basename(self.file)}:{self.line}"
        if not self.kind:
            return f"{where} in {self.function}()" if self.function != "<module>" else where
        return f"{where} in {self.module} ({self.kind})" if self.module else f"{where} in {self.kind}"


_users: dict[str, bool] = {}


def belongs_to_user(frame: FrameType) -> bool:
    """False for torch's frames and for takeback's own, the zoo's models excepted."""
    file = frame.f_code.co_filename
    known = _users.get(file)
    if known is None:
        ours = file.startswith(_OURS) and not file.startswith(_ZOO)
        generated = file.startswith("<") and file != "<stdin>"
        known = _users[file] = not (ours or generated or file.startswith(_TORCH))
    return known


class NodeSites:
    """Remembers the site of every node made between `start` and `stop`, in all threads."""

    def __init__(self) -> None:
        self._by_number: dict[tuple[int, int], NodeSite] = {}
        self._threads: list[int] = []
        self._last = threading.local()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self.active = False

    def start(self, frame: FrameType | None) -> bool:
        """Begins, in the callers of `frame` too. False where somebody else traces already."""
        if sys.gettrace() is not None:
            return False
        self.active = True
        threading.settrace(self._called)
        self.trace_this_thread()
        while frame is not None:
            if belongs_to_user(frame) and frame.f_trace is None:
                frame.f_trace = _Lines(self, frame.f_lineno)
            frame = frame.f_back
        return True

    def trace_this_thread(self) -> None:
        """The engine's threads run the user's code too, where a checkpoint is computed again."""
        if self.active and sys.gettrace() is None:
            self._last.number = sequence_number()
            if threading.get_ident() not in self._threads:
                self._threads.append(threading.get_ident())
            sys.settrace(self._called)

    def stop(self, frame: FrameType | None) -> None:
        if not self.active:
            return
        self.active = False
        threading.settrace(None)
        if sys.gettrace() == self._called:
            sys.settrace(None)
        while frame is not None:
            if isinstance(frame.f_trace, _Lines):
                frame.f_trace = None
            frame = frame.f_back

    def of(self, number: int | None, thread: int) -> NodeSite | None:
        """The site of the node with this number; threads count for themselves, so `thread` is asked first."""
        if number is None:
            return None
        for one in (thread, *self._threads):
            found = self._by_number.get((one, number))
            if found is not None:
                return found
        return None

    @never_compiled
    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self.active:
            sys.settrace(None)
            return None
        caller = frame.f_back
        while caller is not None and not belongs_to_user(caller):
            caller = caller.f_back
        if caller is not None:
            self.note(caller, caller.f_lineno)
        if frame.f_code is MODULE_CALL:
            frame.f_trace_lines = False
            return self._returned
        return _Lines(self, frame.f_lineno) if belongs_to_user(frame) else None

    @never_compiled
    def _returned(self, frame: FrameType, event: str, argument: Any) -> Any:
        """The end of a module's call: what it made belongs to it, and to the line that called it."""
        caller: FrameType | None = frame
        while caller is not None and not belongs_to_user(caller):
            caller = caller.f_back
        if caller is not None and self.active:
            self.note(caller, caller.f_lineno, inner=frame)
        return self._returned

    def note(self, frame: FrameType, line: int, inner: FrameType | None = None) -> None:
        """Nodes made since the last note were made by this line, in the module of the inner frame."""
        number = sequence_number()
        last = getattr(self._last, "number", None)
        self._last.number = number
        if last is None or number <= last:
            return
        thread = threading.get_ident()
        module, kind = self._module(inner or frame)
        site = NodeSite(frame.f_code.co_filename, line, frame.f_code.co_name, module, kind)
        for made in range(last, number):
            self._by_number[(thread, made)] = site
        if len(self._by_number) > 2 * _KEPT:
            for key in list(self._by_number)[:_KEPT]:
                del self._by_number[key]

    def _module(self, frame: FrameType) -> tuple[str, str]:
        """Path and class of the innermost module whose call this frame is part of."""
        stack: list[torch.nn.Module] = []
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is MODULE_CALL:
                stack.append(at.f_locals["self"])
            at = at.f_back
        if not stack:
            return "", ""
        root, inner = stack[-1], stack[0]
        names = self._names.get(root)
        if names is None or id(inner) not in names:
            names = self._names[root] = {id(module): name for name, module in root.named_modules()}
        return names.get(id(inner), ""), type(inner).__name__


class _Lines:
    """The trace function of one frame; it holds the line that is running, not the frame."""

    __slots__ = ("_line", "_sites")

    def __init__(self, sites: NodeSites, line: int) -> None:
        self._sites = sites
        self._line = line

    @never_compiled
    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Lines | None:
        if not self._sites.active:
            return None
        self._sites.note(frame, self._line)
        self._line = frame.f_lineno
        return self
