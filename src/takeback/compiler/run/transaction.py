"""A step is done or it is not: one `Transaction` for whatever runs a step (a recording, a replay, a comparison).

In: what puts things back. Guaranteed: if anything is raised before `done`, Ctrl-C included, all of it is put back, and
the grad mode and torch's modes are what they were; Ctrl-C strikes at once while the step only computes, and waits while
it is committed or taken back. What the executor and the recorder save is their own matter; when it is put back is
decided here.
"""

from __future__ import annotations

import functools
import gc
import operator
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import overrides
from torch.utils import _device, _python_dispatch  # checked on 2.11 and 2.13

from takeback.compiler.capture.uncompiled import compiled_


class Gate:
    """Decides when Ctrl-C may strike. While it is open an interrupt is raised as always, and the gate shuts with it, so
    that what takes the step back is not interrupted in turn. While it is shut the interrupt is kept, and raised on
    leaving. Only the main thread receives signals, so elsewhere a gate does nothing."""

    __slots__ = ("_pending", "_previous", "open", "struck")

    def __init__(self) -> None:
        self.open = False
        self.struck: BaseException | None = None  #: what Ctrl-C raised while the gate was open
        self._pending = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None

    def enter_(self) -> None:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # else it is ignored, or not Python's: leave it alone
                self._previous = previous
                signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.open or self._is_being_left(frame) or _is_clean_up(frame):
            self._pending = True
            return
        self.open = False
        assert callable(self._previous)
        try:
            self._previous(number, frame)
        except BaseException as raised:
            self.struck = raised
            raise

    def _is_being_left(self, frame: FrameType | None) -> bool:
        """Whether this is inside of the transaction's `__exit__`: Python looks for signals when it enters a function,
        so one may be found before the first line there has shut the gate."""
        while frame is not None:
            if frame.f_code is _LEAVING and frame.f_locals["self"]._gate is self:
                return True
            frame = frame.f_back
        return False

    def leave_(self) -> None:
        """Call it last: what was kept is raised here."""
        self.open = False
        previous = self._previous
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
        if self._pending:
            # Called, not signalled: a signal is found later, perhaps in a finalizer, which drops what is raised.
            assert callable(previous)
            previous(signal.SIGINT, sys._getframe())


def _is_clean_up(frame: FrameType | None) -> bool:
    """Whether this is Python's own clean-up of an object, or what it calls while it collects garbage: there it drops
    what is raised, and what was to be freed is not."""
    collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code is _FINALIZING or frame.f_code.co_name == "__del__" or frame.f_code in collecting:
            return True
        frame = frame.f_back
    return False


class Modes:
    """The modes that this thread is inside of, and torch.compile's stance: Ctrl-C may strike between any two lines of
    the code that enters or leaves one, or takes it off while it is asked, so that is not left to them."""

    __slots__ = ("_current_device", "_default_device", "_dispatch", "_flags", "_function")

    def __init__(self) -> None:
        self._dispatch = _python_dispatch._get_current_dispatch_mode_stack()
        self._function = overrides._get_current_function_mode_stack()  # checked on 2.11 and 2.13
        self._current_device = _device.CURRENT_DEVICE
        self._default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # checked on 2.11 and 2.13
        self._flags = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}

    def restore_(self, *, aborted: bool) -> None:
        """Leaves the dispatch modes that were entered since. After a step that is aborted all modes are what they were:
        those that were lost are put on again, and what the step has entered, set_default_device too, is left."""
        count = len(self._dispatch)
        while torch._C._len_torch_dispatch_stack() > count:
            _python_dispatch._pop_mode(None)
        if aborted:
            self._put_back_()
        vars(_python_dispatch).update(self._flags)
        ignores = self._flags.get("_is_in_any_mode_without_ignore_compile_internals")
        if ignores is not None:
            _python_dispatch.set_is_in_mode_without_ignore_compile_internals(ignores)
        compiled_()

    def _put_back_(self) -> None:
        if not _are_same(_python_dispatch._get_current_dispatch_mode_stack(), self._dispatch):
            while torch._C._len_torch_dispatch_stack():
                _python_dispatch._pop_mode(None)
            for dispatch_mode in self._dispatch:
                _python_dispatch._push_mode(dispatch_mode)
        if not _are_same(overrides._get_current_function_mode_stack(), self._function):
            while torch._C._len_torch_function_stack():
                overrides._pop_mode()
            for function_mode in self._function:
                overrides._push_mode(function_mode)
        _device.CURRENT_DEVICE = self._current_device
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self._default_device


def _are_same(modes: Sequence[object], others: Sequence[object]) -> bool:
    """Whether they are the same objects, whatever they make of equality."""
    return len(modes) == len(others) and all(map(operator.is_, modes, others))


_MODES_OF_TORCH: frozenset[str | None] = frozenset(m.__file__ for m in (overrides, _device, _python_dispatch))


def _stands_for(error: BaseException | None, interrupt: BaseException | None) -> bool:
    """Whether `error` is only torch's complaint, raised while `interrupt` was on its way out, that a mode to be left is
    gone."""
    if error is None or interrupt is None or error is interrupt or error.__traceback__ is None:
        return False
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    if trace.tb_frame.f_code.co_filename not in _MODES_OF_TORCH:
        return False
    while error is not None and error is not interrupt:
        error = error.__context__
    return error is interrupt


class Transaction:
    """What is done in its context is done whole or not at all.

    with Transaction() as step:
        step.on_abort(put_back)   # before something is written: what takes it back, run if anything is raised
        step.at_end(clean_up)     # run in any case, after that
        step.compute()            # from here on Ctrl-C strikes at once
        ...
        step.commit()             # from here on it waits
        ...
        step.done()               # from here on nothing is taken back
    """

    __slots__ = ("_aborts", "_ends", "_gate", "_grad_mode", "_modes")

    def __init__(self) -> None:
        self._gate = Gate()
        self._aborts: list[Callable[[], object]] = []
        self._ends: list[Callable[[], object]] = []
        self._grad_mode = True
        self._modes: Modes | None = None

    def on_abort(self, undo: Callable[[], object]) -> None:
        """`undo` is run if anything is raised: without gradients, the last one first."""
        self._aborts.append(undo)

    def at_end(self, clean_up: Callable[[], object]) -> None:
        """`clean_up` is run whatever happens, after everything was taken back: the last one first."""
        self._ends.append(clean_up)

    def compute(self) -> None:
        """Nothing is written for good from here on: Ctrl-C strikes at once."""
        self._gate.open = True

    def commit(self) -> None:
        """The user's objects are being written, or put back: Ctrl-C waits."""
        self._gate.open = False

    def done(self) -> None:
        """What was done stays, whatever comes after it."""
        self._aborts.clear()

    def __enter__(self) -> Transaction:
        self._gate.enter_()
        self._grad_mode = torch.is_grad_enabled()
        self._modes = Modes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.open = False
        struck, self._gate.struck = self._gate.struck, None
        failures: list[BaseException] = []
        if self._modes is not None:
            restore_ = functools.partial(self._modes.restore_, aborted=error is not None)
            _run_all([restore_], failures)  # before the others, which compute
        if error is not None:
            torch._C._set_grad_enabled(False)  # checked on 2.11 and 2.13
            _run_all(self._aborts, failures)
        torch._C._set_grad_enabled(self._grad_mode)
        _run_all(self._ends, failures)
        torch._C._set_grad_enabled(self._grad_mode)
        self._aborts.clear()
        self._ends.clear()
        try:
            if failures:
                raise failures[0]
            if struck is not None and _stands_for(error, struck):
                raise struck from None
        finally:
            self._gate.leave_()


_FINALIZING: CodeType = weakref.finalize.__call__.__code__
_LEAVING: CodeType = Transaction.__exit__.__code__


def _run_all(actions: list[Callable[[], object]], failures: list[BaseException]) -> None:
    """Each is run, the last one first, even where another of them fails."""
    for action in reversed(actions):
        try:
            action()
        except BaseException as failure:
            failures.append(failure)
