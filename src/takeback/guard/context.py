"""guard(): inside it, every call into the autograd engine is watched.

In: any eager code. Out: an OverwriteError where a backward node overwrites what somebody else can read. The program's
results are those it has without the guard; what cannot be watched is counted in `skipped`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from takeback.engine import transformed
from takeback.errors import OptionError, OverwriteError
from takeback.guard import engine
from takeback.guard.readers import EngineCall, edge_of
from takeback.guard.sites import NodeSites
from takeback.guard.threads import running
from takeback.guard.watch import GuardCounts, WatchedBackward, Window, open_here

OnError = Literal["raise", "collect"]


class Guard(contextlib.ContextDecorator):
    """Made by `guard()`; inside another guard it shares that one's work and counts."""

    def __init__(self, *, exact: bool, on_error: OnError, every_node: bool) -> None:
        if on_error not in ("raise", "collect"):
            raise OptionError(f"on_error must be 'raise' or 'collect', got {on_error!r}")
        self.errors: list[OverwriteError] = []
        self._exact, self._on_error, self._every_node = exact, on_error, every_node
        self._counts = GuardCounts()
        self._sites = NodeSites()
        self._undo: Callable[[], None] | None = None

    @property
    def skipped(self) -> Counter[str]:
        """What could not be watched, and how often."""
        return self._counts.skipped

    def report(self) -> dict[str, int | float]:
        """Counts: backwards, nodes that ran, nodes that were watched, bytes that were fingerprinted, the seconds this
        took, errors, and what was skipped."""
        c = self._counts
        return {
            "backwards": c.backwards,
            "nodes": c.nodes,
            "checked": c.checked,
            "fingerprinted_bytes": c.fingerprinted_bytes,
            "seconds": c.seconds,
            "errors": len(self.errors),
            "skipped": sum(c.skipped.values()),
        }

    def __enter__(self) -> Guard:
        with _lock:
            if self in _active:
                raise OptionError("this guard is already active: make another one")
            if _active:
                self._counts, self._sites = _active[0]._counts, _active[0]._sites
            else:
                if not self._sites.start(sys._getframe(1)):
                    self.skipped["forward lines: a debugger or a coverage tool traces this thread"] += 1
                self._undo = engine.intercept(_run)
            _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _active.remove(self)
            if self._undo is not None:
                self._undo()
                self._undo = None
                _trainers.clear()
                self._sites.stop(sys._getframe(1))

    def _take(self, error: OverwriteError) -> None:
        self.errors.append(error)
        if self._on_error == "raise":
            raise error

    def _watch(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], outer: list[Window]
    ) -> WatchedBackward | None:
        """The watch of one call into the engine, from inside the outer windows; None where the graph cannot be read."""
        if transformed():
            self.skipped["a backward inside torch.func or forward mode"] += 1
            return None
        watch: WatchedBackward | None = None
        try:
            with self._counts.timed(), engine.unseen():
                callers = {threading.get_ident(), *(caller for each in outer for caller in each.watch.callers)}
                watch = WatchedBackward(
                    _call(*arguments, alone=not (_trainers - callers) & running(), **keywords),
                    callers=callers,
                    sites=self._sites,
                    counts=self._counts,
                    report=_report,
                    exact=self._exact,
                    every_node=self._every_node,
                    outer=outer,
                )
                watch.begin()
        except Exception as error:  # the program that is watched must not fail because of the guard
            self.skipped[f"a backward whose graph cannot be read ({type(error).__name__}: {error})"] += 1
            if watch is not None:
                watch.end()
            return None
        return watch


def guard(*, exact: bool = False, on_error: OnError = "raise", every_node: bool = False) -> Guard:
    """A context (or decorator) in which a backward node that overwrites bytes somebody else can still read raises
    OverwriteError.

        with takeback.guard():
            loss.backward()

    exact       compare copies of the bytes instead of fingerprints: no chance of a miss, twice the memory
    on_error    "raise", or "collect": go on, and gather all errors in `.errors`
    every_node  watch torch's own nodes too, which are trusted otherwise: very slow
    """
    return Guard(exact=exact, on_error=on_error, every_node=every_node)


_active: list[Guard] = []
_trainers: set[int] = set()
"""Threads that have been in the engine."""
_lock = threading.RLock()


def _report(error: OverwriteError) -> None:
    """To the innermost guard."""
    if _active:
        _active[-1]._take(error)


def _run(original: engine.Run, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """In place of the engine's entry."""
    outer = open_here()
    _trainers.add(threading.get_ident())
    for window in outer[-1:]:
        window.watch.judge_now(window)
    watch = _active[0]._watch(arguments, keywords, outer) if _active else None
    try:
        return original(*arguments, **keywords)
    finally:
        if watch is not None:
            watch.end()
        _rebase(outer)


def _rebase(windows: list[Window]) -> None:
    for window in windows:
        window.watch.rebase(window)


def _call(
    roots: tuple[Any, ...],
    gradients: Any = None,
    keeps: bool = False,
    creates: bool = False,
    inputs: Any = (),
    *rest: Any,
    alone: bool,
    accumulate_grad: bool = True,
    **others: Any,
) -> EngineCall:
    edges = tuple(edge_of(one) for one in roots), tuple(edge_of(one) for one in inputs or ())
    return EngineCall(edges[0], bool(keeps), bool(creates), edges[1], accumulate_grad, alone)
