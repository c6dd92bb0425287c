"""The buffers of one thread on one device and stream: by capacity, and by name.

A buffer is free when nobody holds its storage, and only then it is handed out again, whatever its step. Nothing here
takes a lock: whoever has popped a buffer owns it, so any thread may sweep a pool while its own thread takes from it.

    free  --pop-->  owned by the taker  --a tensor is made-->  out  --sweep: nobody holds it-->  free
                                                                   \\-sweep: somebody does---->  out
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from takeback.errors import WorkspaceError
from takeback.workspace.internals import holders

if TYPE_CHECKING:
    from takeback.workspace.debug import Lease
    from takeback.workspace.scratch import Step

SMALLEST_CLASS = 9
"""Its buffers have 2^9 bytes: what CUDA's allocator rounds up to, and eight cache lines."""

FEW = 8
"""Buffers, the newest, that every take looks at where none is free."""


def class_for(size_bytes: int) -> int:
    """The smallest class whose every buffer holds that many bytes."""
    return max((size_bytes - 1).bit_length(), SMALLEST_CLASS)


class PoolBuffer:
    """Some bytes. Their number is asked of the storage each time: whoever held it may have resized it."""

    __slots__ = ("_alone", "lease", "step", "storage")

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self.storage = torch.UntypedStorage(capacity_bytes, device=device)
        self._alone = self.holders()
        self.step: Step | None = None  #: that it was taken in last
        self.lease: Lease | None = None  #: in debug mode, what is known of that

    @property
    def capacity_bytes(self) -> int:
        return int(self.storage.nbytes())

    @property
    def held(self) -> bool:
        """Whether anybody besides us has a tensor, a view or a saved tensor in these bytes."""
        ours = self._alone if self.lease is None else self.lease.ours or self._alone
        return holders(self.storage) > ours

    def holders(self) -> int:
        """A number that is larger when there are more."""
        return holders(self.storage)

    @property
    def kept_back(self) -> bool:
        """Whether its step is over, and somebody holds it nevertheless."""
        return self.step is not None and self.step.over and self.held


class Shelf:
    """The buffers of one class."""

    __slots__ = ("due", "free", "out")

    def __init__(self) -> None:
        self.free: list[PoolBuffer] = []  #: held by nobody, the one used last at the end
        self.out: deque[PoolBuffer] = deque()  #: handed out, in that order
        self.due = 0  #: how many must be out before all of them are looked at within a step


class Pool:
    """Buffers that one thread takes, and any may sweep."""

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise WorkspaceError(f"a workspace has scratch on the CPU and on CUDA devices, not on {device}.")
        self.device = device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._shelves: dict[int, Shelf] = {}
        self._named: dict[str, PoolBuffer] = {}

    def pop(self, size_bytes: int) -> PoolBuffer | None:
        """A free buffer that is large enough, or None. It is the caller's until `hand_out`."""
        shelf = self._shelf(class_for(size_bytes))
        try:
            return shelf.free.pop() if shelf.free else self._dropped(shelf, size_bytes)
        except IndexError:  # another thread trims
            return self._dropped(shelf, size_bytes)

    def _dropped(self, shelf: Shelf, size_bytes: int) -> PoolBuffer | None:
        """One that was handed out in this step or before, and dropped since; the newest, as it may still be cached.
        All are looked at only when there are twice as many as were held the last time, so that a take stays cheap
        however many are held."""
        found: PoolBuffer | None = None
        kept: list[PoolBuffer] = []
        while found is None and shelf.out and len(kept) < FEW:
            try:
                buffer = shelf.out.pop()
            except IndexError:  # another thread sweeps
                break
            if buffer.held:
                kept.append(buffer)
            elif buffer.capacity_bytes >= size_bytes:
                found = buffer
            else:
                self.file(buffer)  # it was resized
        shelf.out.extend(reversed(kept))
        if found is None and len(shelf.out) >= shelf.due:
            self._sweep(shelf)
            with contextlib.suppress(IndexError):
                found = shelf.free.pop()
        return found

    def pop_named(self, name: str, size_bytes: int) -> PoolBuffer | None:
        """The buffer of that name if it is large enough and free. Raises if it is held in a step that is not over."""
        buffer = self._named.pop(name, None)
        if buffer is None:
            return None
        if buffer.held:
            assert buffer.step is not None
            if not buffer.step.over:
                self.hand_out(buffer, name)
                raise WorkspaceError(
                    f"scratch {name!r} was taken before in this step{where(buffer)} and is still held: by a variable, "
                    f"a view, or a graph that saved it. Take it under another name, or without one."
                )
            self.hand_out(buffer, None)
            return None
        if buffer.capacity_bytes >= size_bytes:
            return buffer
        self.file(buffer)
        return None

    def allocate(self, size_bytes: int) -> PoolBuffer:
        """A new buffer of the smallest class that holds so many bytes."""
        if self.stream is not None and torch.cuda.is_current_stream_capturing():
            raise WorkspaceError(
                f"{size_bytes:,} bytes are taken while a CUDA graph is captured, and there is no free buffer of that "
                f"size: a new one would be the graph's. Run the step once before you capture it."
            )
        capacity_bytes = 1 << class_for(size_bytes)
        try:
            return PoolBuffer(capacity_bytes, self.device)
        except RuntimeError as error:
            error.add_note(
                f"takeback.Workspace asked for {capacity_bytes:,} bytes (the power of two above {size_bytes:,}) on "
                f"{self.device}. trim() gives back what is free."
            )
            raise

    def hand_out(self, buffer: PoolBuffer, name: str | None) -> None:
        """To be called once somebody holds the buffer: from here on any thread may sweep it."""
        if name is None or self._named.setdefault(name, buffer) is not buffer:
            self._shelf(class_for(buffer.capacity_bytes)).out.append(buffer)

    def file(self, buffer: PoolBuffer) -> None:
        """Puts a buffer that nobody holds where the next take finds it: by what it really holds, rounded down."""
        buffer.step = None
        found = buffer.capacity_bytes.bit_length() - 1
        if found >= SMALLEST_CLASS:
            self._shelf(found).free.append(buffer)

    def sweep(self) -> None:
        """Finds the buffers that were dropped. Those with a name stay with it."""
        for shelf in tuple(self._shelves.values()):
            self._sweep(shelf)

    def _sweep(self, shelf: Shelf) -> None:
        for buffer in _each(shelf.out):
            if buffer.held:
                shelf.out.append(buffer)
            else:
                self.file(buffer)
        shelf.due = 2 * len(shelf.out)

    def visit(self, act: Callable[[PoolBuffer, Pool], None]) -> None:
        """Acts on every buffer that was handed out, as its owner."""
        for shelf in tuple(self._shelves.values()):
            for buffer in _each(shelf.out):
                act(buffer, self)
                shelf.out.append(buffer)
        for name in tuple(self._named):
            named = self._named.pop(name, None)
            if named is not None:
                act(named, self)
                self.hand_out(named, name)

    def trim(self) -> int:
        """Gives back what is free, with a name or without. Returns how many bytes that were."""
        self.sweep()
        freed_bytes = 0
        for shelf in tuple(self._shelves.values()):
            with contextlib.suppress(IndexError):
                while True:
                    freed_bytes += shelf.free.pop().capacity_bytes
        for name in tuple(self._named):
            named = self._named.pop(name, None)
            if named is not None and named.held:
                self.hand_out(named, name)
            elif named is not None:
                freed_bytes += named.capacity_bytes
        return freed_bytes

    def buffers(self) -> Iterator[PoolBuffer]:
        """All that are here now. One that its thread is just taking may be missing."""
        for shelf in tuple(self._shelves.values()):
            yield from tuple(shelf.free)
            yield from tuple(shelf.out)
        yield from tuple(self._named.values())

    def _shelf(self, index: int) -> Shelf:
        shelf = self._shelves.get(index)
        return shelf if shelf is not None else self._shelves.setdefault(index, Shelf())


def _each(buffers: deque[PoolBuffer]) -> Iterator[PoolBuffer]:
    """Pops each that is there now; others may pop too."""
    for _ in range(len(buffers)):
        try:
            buffer = buffers.popleft()
        except IndexError:
            return
        yield buffer


def where(buffer: PoolBuffer) -> str:
    """Where it was taken, as far as that is known."""
    return f" at {buffer.lease.site}" if buffer.lease is not None else ""
