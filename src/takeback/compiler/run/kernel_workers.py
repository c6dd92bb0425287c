"""Lets the compilers of many generated kernels work at the same time: none is waited for until the last one has begun.

Inductor writes a module for each graph, hands its kernels to worker processes (Triton) or threads (g++), and waits for
them at the module's end. Inside of `at_once` that wait is put off, and becomes a function that is called afterwards.

Private torch throughout: checked on 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch


class Afterwards:
    """What is still to be waited for, since it was last taken."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def put_off_(self, wait: Callable[[], None]) -> None:
        self._waits.append(wait)

    def taken_(self) -> Callable[[], None]:
        """A function that waits for all that was put off so far, and is not put off any more."""
        taken, self._waits = self._waits, []

        def wait() -> None:
            for each in taken:
                each()

        return wait


_current: ContextVar[Afterwards | None] = ContextVar("afterwards", default=None)
_alone = threading.Lock()  #: what `compilers_go_on` replaces is of the process


@contextlib.contextmanager
def at_once() -> Iterator[Afterwards]:
    """Compilers that are started inside, on this thread, are not waited for."""
    afterwards = Afterwards()
    token = _current.set(afterwards)
    try:
        yield afterwards
    finally:
        _current.reset(token)


def put_off(wait: Callable[[], None]) -> None:
    """Until afterwards, inside of `at_once`; else it is called here."""
    afterwards = _current.get()
    if afterwards is None:
        wait()
    else:
        afterwards.put_off_(wait)


@contextlib.contextmanager
def compilers_go_on() -> Iterator[None]:
    """Around a call of Inductor: it does not wait for the compilers that it starts, if this is inside of `at_once`."""
    afterwards = _current.get()
    if afterwards is None:
        yield
        return
    from torch._inductor.async_compile import AsyncCompile

    with _alone:
        mine, wait, is_ready = threading.get_ident(), AsyncCompile.wait, AsyncCompile.use_process_pool
        before = {name: vars(AsyncCompile)[name] for name in ("wait", "use_process_pool")}

        def put_off(self: AsyncCompile, scope: dict[str, Any]) -> None:
            if threading.get_ident() == mine:
                afterwards.put_off_(functools.partial(wait, self, scope))
            else:
                wait(self, scope)

        def is_there(cls: type[AsyncCompile]) -> bool:
            # Until its workers are there Inductor compiles by itself, one kernel after the other; here there is more to
            # write in the meantime, and kernels may wait for them.
            return bool(is_ready()) or (threading.get_ident() == mine and AsyncCompile._ready_future is not None)

        instead = {"wait": put_off, "use_process_pool": classmethod(is_there)}
        try:
            for name, function in instead.items():
                setattr(AsyncCompile, name, function)
            yield
        finally:
            for name, function in before.items():
                setattr(AsyncCompile, name, function)


def warm_up_(device: torch.device) -> None:
    """Starts the worker processes that compile for a GPU, which takes them seconds: beside what comes first, which is
    to record the step. Where they cannot be started, whoever compiles finds out."""
    if device.type != "cuda":
        return
    with contextlib.suppress(Exception):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
