"""One call into the autograd engine, watched: before and after each node that is not torch's own, the bytes that others
can read are fingerprinted, and a node that changed them is reported.

A window is the time in which one node runs. Between windows everything may change: the engine adds gradients up in
place, hooks run, leaves are updated. A `Function` is watched by an `apply` on its node, since a hook after it would
make the engine hold its gradients once more, and a node that counts references must see what it sees without the guard.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from takeback.errors import OverwriteError
from takeback.guard import engine
from takeback.guard.fingerprint import Fingerprint, fingerprints, same
from takeback.guard.graph import Known, NodeKind, tensors_in
from takeback.guard.judge import Judge, Own
from takeback.guard.readers import Around, EngineCall, Readers
from takeback.guard.region import Key, StorageRegion
from takeback.guard.sites import NodeSites
from takeback.guard.threads import clocks

_work = threading.RLock()


@dataclass
class GuardCounts:
    """What a guard has done."""

    backwards: int = 0
    nodes: int = 0  #: that ran
    checked: int = 0  #: of these, watched by fingerprints
    fingerprinted_bytes: int = 0
    seconds: float = 0.0  #: spent in the guard during backwards
    skipped: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around the guard's own work, which one thread does at a time: what one of them holds while it looks around
        must not look like somebody's reference to another."""
        with _work:
            start = time.perf_counter()
            try:
                yield
            finally:
                self.seconds += time.perf_counter() - start


@dataclass(eq=False)
class Window:
    """A node that is running, and the bytes as they were before it."""

    watch: WatchedBackward
    known: Known
    own: Own
    regions: list[StorageRegion]
    clocks: dict[int, object]  #: of other threads, from before the bytes were read
    before: list[Fingerprint | None]
    thread: int = field(default_factory=threading.get_ident)
    parallel: bool = False  #: another thread ran a node of the same backward meanwhile


class WatchedBackward:
    """The hooks on one graph, and the windows they open and close."""

    def __init__(
        self,
        call: EngineCall,
        *,
        callers: set[int],
        sites: NodeSites,
        counts: GuardCounts,
        report: Callable[[OverwriteError], None],
        exact: bool,
        every_node: bool,
        outer: Sequence[Window] = (),
    ) -> None:
        self._readers: Readers = Readers(
            call, counts.skipped, [Around(window.watch._readers, window.known) for window in outer]
        )
        self._sites, self._counts, self._report, self._exact = sites, counts, report, exact
        self._every_node = every_node
        self.callers = callers  #: the threads that wait for this backward
        self._handles: list[RemovableHandle] = []
        self._wrapped: list[tuple[Known, str]] = []
        self._hooked: set[Known] = set()  #: leaves on whose node other code hangs too
        self._undo: dict[type, Callable[[], None]] = {}
        self._open_by_hook: dict[Known, Window] = {}
        self._judge = Judge(self._readers, sites, threading.get_ident())

    def begin(self) -> None:
        """Hooks the graph, if it has a node to watch."""
        self._counts.backwards += 1
        self._counts.nodes += len(self._readers.run)
        if not any(self._is_foreign(known) for known in self._readers.run) and not self._readers.grads_share_bytes():
            return
        self._readers.fill()
        for known in self._readers.run:
            self._attach(known)

    def _is_foreign(self, known: Known) -> bool:
        if known.kind is NodeKind.LEAF:
            return known.leaf is not None and engine.has_hooks(known.leaf)
        return self._every_node or known.kind is not NodeKind.TORCH

    def _attach(self, known: Known) -> None:
        node = known.node
        if known.kind is NodeKind.PYTHON:
            for name in ("apply", "apply_boxed"):
                if hasattr(node, name):
                    setattr(node, name, functools.partial(self._applied, known, getattr(node, name)))
                    self._wrapped.append((known, name))
            if type(node) not in self._undo and engine.is_packed(node):
                self._undo[type(node)] = engine.tell_unpacked(type(node), self._unpacked)
            return
        if known.kind is not NodeKind.TORCH or self._every_node:
            self._handles.append(node.register_prehook(functools.partial(self._before, known)))
        handle = node.register_hook(functools.partial(self._after, known))
        self._handles.append(handle)
        if len(handle.hooks_dict_ref() or ()) > 1:
            self._hooked.add(known)

    def end(self) -> None:
        """Takes all hooks away."""
        for known, name in self._wrapped:
            vars(known.node).pop(name, None)
        for handle in self._handles:
            handle.remove()
        for undo in self._undo.values():
            undo()
        self._undo.clear()
        self._wrapped.clear()
        self._handles.clear()
        _open.forget(self)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _applied(self, known: Known, original: Callable[..., Any], *gradients: Any) -> Any:
        """A Function's backward, with a window around it."""
        window = self._open(known, tensors_in(gradients, 2))
        if window is None:
            result = original(*gradients)
            self._readers.ran(known, result if isinstance(result, tuple | list) else (result,))
            return result
        try:
            with _untraced(known):
                result = original(*gradients)
        except BaseException:
            _open.remove(window)
            raise
        self._close(window, result if isinstance(result, tuple | list) else (result,))
        return result

    def _unpacked(self, node: Any, tensors: tuple[Any, ...]) -> None:
        """What hooks (a checkpoint, an offload) made for a running node is watched from here on."""
        window = next((w for w in reversed(_open.here()) if w.known.node is node), None)
        if window is None:
            return
        with self._counts.timed(), engine.unseen():
            for i, tensor in enumerate(tensors):
                region = self._readers.region(tensor, "saved by a node") if isinstance(tensor, torch.Tensor) else None
                if region is not None and region.key not in window.own.tensors:
                    window.own.tensors[region.key] = (f"its saved_tensors[{i}]", region)
                    window.regions.append(region)
                    window.before += self._fingerprints([region])

    def _before(self, known: Known, gradients: Iterable[Any]) -> None:
        """A leaf, or a node without a Python `apply`."""
        if known.leaf is None or self._leaf_is_suspect(known, known.leaf):
            window = self._open(known, tensors_in(tuple(gradients)))
            if window is not None:
                self._open_by_hook[known] = window

    def _after(self, known: Known, results: tuple[Any, ...], gradients: tuple[Any, ...]) -> None:
        _open.disturb(self)
        window = self._open_by_hook.pop(known, None)
        try:
            if window is not None:
                self._close(window, results)
            else:
                self._readers.ran(known, results)
        finally:
            if known.leaf is not None:
                self._readers.see_grad(known.leaf)

    def _leaf_is_suspect(self, known: Known, leaf: torch.Tensor) -> bool:
        """Whether more than adding into its own `.grad` can happen here."""
        if known in self._hooked or engine.has_hooks(leaf):
            return True
        region = self._readers.region(leaf.grad, "a .grad") if leaf.grad is not None else None
        return region is not None and any(region.overlaps(other) for other in self._readers.readable(known))

    # -- windows -------------------------------------------------------------------------------------------------------

    def _open(self, known: Known, gradients: Iterable[torch.Tensor]) -> Window | None:
        try:
            return self._opened(known, gradients)
        except Exception as error:  # the program that is watched must not fail because of the guard
            self._counts.skipped[f"a node that cannot be read ({type(error).__name__}: {error})"] += 1
            return None

    def _opened(self, known: Known, gradients: Iterable[torch.Tensor]) -> Window:
        self._sites.trace_this_thread()
        with self._counts.timed(), engine.unseen():
            own = self._judge.own(known, gradients)
            watched: dict[Key, StorageRegion] = {region.key: region for region in self._readers.readable(known)}
            if known.kind is not NodeKind.LEAF:  # the hooks of a leaf are the user's own code
                watched |= self._readers.held | {key: region for key, (_, region) in own.tensors.items()}
                free = list(self._readers.destinations(known))
                watched = {k: r for k, r in watched.items() if not any(r.overlaps(place) for place in free)}
            regions = list(watched.values())
            window = Window(self, known, own, regions, self._clocks(), self._fingerprints(regions))
        known.ran = True  # what it reads of its own, it reads now
        self._counts.checked += 1
        _open.add(window)
        return window

    def _close(self, window: Window, results: Iterable[Any]) -> None:
        results = list(results)
        _open.remove(window)
        error = self._error(window, results)
        self._readers.ran(window.known, results)
        if error is not None:
            self._report(error)

    def judge_now(self, window: Window) -> None:
        """Judges an open window before code inside it enters the engine again."""
        error = self._error(window, [])
        if error is not None:
            self._report(error)

    def rebase(self, window: Window) -> None:
        """Begins an open window anew after the engine ran inside it."""
        with self._counts.timed(), engine.unseen():
            window.clocks = self._clocks()
            window.before = self._fingerprints(window.regions)

    def _error(self, window: Window, results: list[Any]) -> OverwriteError | None:
        with self._counts.timed(), engine.unseen():
            after = self._fingerprints(window.regions)
            pairs = zip(window.regions, window.before, after, strict=True)
            changed = [r for r, a, b in pairs if a is not None and b is not None and not same(a, b)]
            if not changed:
                return None
            if window.parallel:
                self._counts.skipped["a change while another thread ran a node too"] += 1
                return None
            try:
                if self._clocks() != window.clocks:
                    certain = self._judge.out_of_reach(window.own, changed, window.regions, results)
                    if len(certain) < len(changed):
                        self._counts.skipped["a change of what another thread, which ran too, may have written"] += 1
                    changed = certain
                return self._judge.error(window.known, window.own, changed, window.regions, results)
            except Exception as error:  # the program that is watched must not fail because of the guard
                self._counts.skipped[f"a node that cannot be read ({type(error).__name__}: {error})"] += 1
                return None

    def _clocks(self) -> dict[int, object]:
        return clocks(self.callers | {threading.get_ident()})

    def _fingerprints(self, regions: list[StorageRegion]) -> list[Fingerprint | None]:
        self._counts.fingerprinted_bytes += sum(region.size_bytes for region in regions)
        return fingerprints(regions, exact=self._exact)


@contextlib.contextmanager
def _untraced(known: Known) -> Iterator[None]:
    """A trace function copies the variables of the frames it sees (before Python 3.13). Functions of takeback count
    references, so they are not traced."""
    trace = sys.gettrace()
    if trace is None or not type(known.node).__module__.startswith("takeback."):
        yield
        return
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


class _OpenWindows:
    """The windows of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: list[Window] = []

    def add(self, window: Window) -> None:
        with self._lock:
            for other in self._windows:
                if other.thread != window.thread and other.watch.callers & window.watch.callers:
                    other.parallel = window.parallel = True
            self._windows.append(window)

    def remove(self, window: Window) -> None:
        with self._lock:
            if window in self._windows:
                self._windows.remove(window)

    def disturb(self, watch: WatchedBackward) -> None:
        """A node ran in this thread."""
        with self._lock:
            for window in self._windows:
                elsewhere = window.thread != threading.get_ident()
                window.parallel |= elsewhere and bool(window.watch.callers & watch.callers)

    def forget(self, watch: WatchedBackward) -> None:
        with self._lock:
            self._windows = [window for window in self._windows if window.watch is not watch]

    def here(self) -> list[Window]:
        """This thread's, the innermost last."""
        with self._lock:
            return [window for window in self._windows if window.thread == threading.get_ident()]


_open = _OpenWindows()
open_here = _open.here
