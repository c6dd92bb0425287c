"""Workspace: scratch for eager code that is allocated once and used again in every step.

In: shapes, dtypes and devices, asked for inside `with ws.step():`. Out: uninitialised tensors. Guaranteed: bytes are
handed out again only when nobody holds them any more, be it a variable, a view or a graph; never to another thread or
CUDA stream than before; and without a lock.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from takeback.engine import cuda_stream
from takeback.errors import WorkspaceError
from takeback.workspace import debug as debugging
from takeback.workspace.internals import traced
from takeback.workspace.pool import Pool


@dataclass(frozen=True)
class Stats:
    """What a workspace has done and holds, over all threads. Bytes are capacities, read off the buffers."""

    takes: int
    hits: int  #: takes that found a free buffer
    misses: int  #: takes that allocated one
    generations: int  #: steps that are over
    threads: int  #: that have pools now
    buffers: int
    held_bytes: int  #: of all buffers
    in_use_bytes: int  #: of those that somebody holds
    kept_buffers: int  #: of a step that is over, and not free because somebody still holds them
    kept_bytes: int
    peak_bytes: int  #: the most that held_bytes was, as far as stats() and trim() have seen


class Workspace:
    """Reusable scratch.

        ws = takeback.Workspace()
        with ws.step():
            scores = ws.take((512, 512))
            torch.mm(q, k.T, out=scores)

    debug   a use of scratch after its step raises `WorkspaceError`, and scratch is full of NaN until it is written

    Capacities are powers of two; memory is allocated when it is first asked for, and given back by `trim()`. A copy of
    a workspace, pickled or not, is an empty workspace. While torch.compile, fake tensors or compile_step trace, `take`
    is torch.empty: who traces also places.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.debug = debug
        self._numbers = itertools.count(1)
        self._local = threading.local()
        self._threads: dict[int, weakref.ref[_Thread]] = {}  #: those alive
        self._counts: list[_TakeCounts] = []  #: of every thread that ever took: a few numbers each
        self._open: dict[int, _Thread] = {}  #: the threads with an open step
        self._peak_bytes = 0

    def step(self) -> contextlib.AbstractContextManager[Step | None]:
        """A context. What is taken inside must not be used after it. Steps may be nested: what is taken belongs to the
        innermost; a thread without a step of its own joins the one that is open."""
        return contextlib.nullcontext() if traced() else Step(self)

    def take(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        *,
        name: str | None = None,
    ) -> torch.Tensor:
        """An uninitialised contiguous tensor, as torch.empty gives it, in bytes that were used before if there are any.

        name   keeps the same bytes for it from step to step while they are large enough and free. Two tensors of one
               name at a time raise `WorkspaceError`
        """
        if traced():
            return torch.empty(shape, dtype=dtype, device=device)
        # torch fills in default dtype, default device and device index, and makes what set_ below puts in place.
        tensor = torch.empty(0, dtype=dtype, device=device)
        sizes = (shape,) if isinstance(shape, int) else shape
        if sizes and min(sizes) < 0:
            raise WorkspaceError(f"a shape has no negative sizes, got {tuple(sizes)}.")
        thread = self._thread()
        step = thread.steps[-1] if thread.steps else self._joined()
        pool = thread.pool(tensor)
        size_bytes = math.prod(sizes) * tensor.itemsize
        buffer = pool.pop_named(name, size_bytes) if name is not None else None
        if buffer is None:
            buffer = pool.pop(size_bytes)
        counts = thread.counts
        counts.takes += 1
        if buffer is None:
            buffer = pool.allocate(size_bytes)
            counts.misses += 1
        if self.debug:
            debugging.inspect(buffer, pool)
        tensor.set_(buffer.storage, 0, sizes)
        if self.debug:
            tensor = debugging.lend(buffer, pool, tensor, step, name)
        buffer.step = step
        pool.hand_out(buffer, name)
        return tensor

    def trim(self) -> int:
        """Gives back every buffer that nobody holds, of all threads. Returns how many bytes that were."""
        pools = list(self._pools())
        self._peak_bytes = max(self._peak_bytes, sum(b.capacity_bytes for pool in pools for b in pool.buffers()))
        return sum(pool.trim() for pool in pools)

    def stats(self) -> Stats:
        """What was taken, and what is held now."""
        buffers = [buffer for pool in self._pools() for buffer in pool.buffers()]
        kept = [b.capacity_bytes for b in buffers if b.kept_back]
        held_bytes = sum(b.capacity_bytes for b in buffers)
        self._peak_bytes = max(self._peak_bytes, held_bytes)
        counts = tuple(self._counts)
        takes, misses = sum(c.takes for c in counts), sum(c.misses for c in counts)
        return Stats(
            takes=takes,
            hits=takes - misses,
            misses=misses,
            generations=sum(c.generations for c in counts),
            threads=len(self._threads),
            buffers=len(buffers),
            held_bytes=held_bytes,
            in_use_bytes=sum(b.capacity_bytes for b in buffers if b.held),
            kept_buffers=len(kept),
            kept_bytes=sum(kept),
            peak_bytes=self._peak_bytes,
        )

    def __repr__(self) -> str:
        stats = self.stats()
        return f"Workspace({stats.buffers} buffers, {stats.held_bytes:,} bytes, {stats.in_use_bytes:,} in use)"

    def __reduce__(self) -> tuple[object, ...]:
        return _empty, (self.debug,)

    # -- threads -----------------------------------------------------------------------------------------------------

    def _thread(self) -> _Thread:
        """What this thread has; made at its first take or step."""
        try:
            found = self._local.thread
        except AttributeError:
            found = self._local.thread = _Thread()
            threads, key = self._threads, id(found)
            threads[key] = weakref.ref(found, lambda _: threads.pop(key, None))
            self._counts.append(found.counts)
        assert isinstance(found, _Thread)
        return found

    def _joined(self) -> Step:
        """The step of another thread: a backward on a GPU, for one, runs in a thread of autograd's."""
        steps = [thread.steps[-1:] for thread in tuple(self._open.values())]
        found = [step for last in steps for step in last]
        if len(found) == 1:
            return found[0]
        if not found:
            raise WorkspaceError("take() is called outside of a step. Call it inside `with ws.step():`.")
        raise WorkspaceError(
            f"take() is called in thread {threading.current_thread().name!r}, which has no step of its own, while "
            f"{len(found)} other threads have one: whose scratch would it be? Open a step in this thread."
        )

    def _pools(self) -> Iterator[Pool]:
        for reference in tuple(self._threads.values()):
            thread = reference()
            if thread is not None:
                yield from tuple(thread.pools.values())


class Step:
    """One generation of scratch, made by `Workspace.step`. Steps may end in any order, as those of generators do."""

    def __init__(self, workspace: Workspace) -> None:
        self.over = False
        self.number = 0  #: from 1 in each workspace; 0 before it is entered
        self._workspace: Workspace | None = workspace  #: until it is over, as its buffers know their step
        self._thread: _Thread | None = None

    def __enter__(self) -> Step:
        if self.number:
            raise WorkspaceError("a step is entered once. Call ws.step() again for another.")
        workspace = self._workspace
        assert workspace is not None
        self.number = next(workspace._numbers)
        self._thread = workspace._thread()
        self._thread.steps.append(self)
        workspace._open[id(self._thread)] = self._thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, workspace = self._thread, self._workspace
        assert thread is not None
        assert workspace is not None
        self._thread = self._workspace = None
        self.over = True
        thread.steps.remove(self)
        if not thread.steps:
            workspace._open.pop(id(thread), None)
        thread.counts.generations += 1
        if workspace.debug:
            for pool in tuple(workspace._pools()):
                pool.visit(debugging.retire_)
        for pool in tuple(thread.pools.values()):
            pool.sweep()


class _TakeCounts:
    """Written by one thread, read by all."""

    __slots__ = ("generations", "misses", "takes")

    def __init__(self) -> None:
        self.takes = self.misses = self.generations = 0


class _Thread:
    """What a workspace has for one thread: its open steps, and a pool for each device and stream."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.pools: dict[object, Pool] = {}
        self.counts = _TakeCounts()

    def pool(self, tensor: torch.Tensor) -> Pool:
        """The pool for what is computed on the tensor's device now."""
        device = tensor.device
        key: object = (device, cuda_stream(device.index)) if tensor.is_cuda else device
        found = self.pools.get(key)
        return found if found is not None else self.pools.setdefault(key, Pool(device))


def _empty(debug: bool) -> Workspace:
    return Workspace(debug=debug)
