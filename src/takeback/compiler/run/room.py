"""How much memory there is for a step, and whether an error means that there was not enough.

Linux kills a process that has used up the machine's memory, or its control group's, instead of refusing a request. So a
recording on the CPU is watched: `Vigil` raises before that happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

_LOOK_EVERY = 1 << 26  #: bytes that a recording makes between two looks at what is left
_LEFT = 0.01  #: of all there is: less is as good as nothing
_ASKED = re.compile(r".*?Tried to allocate [0-9.]+ [A-Za-z]+")
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc", "cannot allocate memory")


@dataclass(frozen=True)
class Room:
    """What a process can still take, and what limits it."""

    size_bytes: int
    limit: str
    kills: bool = False  #: whoever goes beyond it is not told so


class OutOfRoom(MemoryError):
    """A recording was about to use up the machine's memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether somebody was refused memory: torch's allocators, Python, or a library that torch calls."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def what_it_said(error: BaseException) -> str:
    """The first line of an error, without the account of the whole GPU that torch adds when it has no memory."""
    line = str(error).strip().partition("\n")[0]
    asked = _ASKED.match(line)
    return asked[0] if asked is not None else line


def room_on(device: torch.device) -> Room | None:
    """What is left there; None where nothing says so."""
    if device.type == "cuda":
        return _on_cuda(device)
    return min((*_by_limits(), *_by_system()), key=lambda room: room.size_bytes, default=None)


def _on_cuda(device: torch.device) -> Room:
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_allocated(device)
    left = Room(free + torch.cuda.memory_reserved(device) - taken, "the GPU's memory")
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    own = Room(int(share * total) - taken, "torch.cuda.set_per_process_memory_fraction")
    return min(left, own, key=lambda room: room.size_bytes)


def _by_limits() -> Iterator[Room]:
    """What setrlimit leaves: beyond it, requests are refused."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return
    used = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if name in _USED
    }
    for kind, name, limit in (
        (resource.RLIMIT_AS, "VmSize", "RLIMIT_AS"),
        (resource.RLIMIT_DATA, "VmData", "RLIMIT_DATA"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and name in used:
            yield Room(max(0, soft - used[name]), limit)


_USED = ("VmSize", "VmData")


def _by_system() -> Iterator[Room]:
    """What the machine and the control group have left: beyond it, processes are killed."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        # Eager may go on in swap: what it would run is not to be refused.
        left = [int(line.split()[1]) for line in lines if line.startswith(("MemAvailable:", "SwapFree:"))]
        if left:
            yield Room(sum(left) * 1024, "the machine's memory", kills=True)
    except (OSError, ValueError):
        pass
    for most, now, stat in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    ):
        try:
            limit, used = int(Path(most).read_text()), int(Path(now).read_text())
            files = dict(line.split() for line in Path(stat).read_text().splitlines())
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        cached = int(files.get("inactive_file", files.get("total_inactive_file", 0)))
        yield Room(max(0, limit - used + cached), "the control group's memory", kills=True)


def let_go_(device: torch.device) -> None:
    """Gives back what allocators keep of an attempt that failed: the traceback of its error held a step's tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)


@dataclass
class Vigil:
    """Told of every op's results, raises `OutOfRoom` when there is no room for another one as large as the largest."""

    _since: int = _LOOK_EVERY
    _largest: int = 0
    _first: int | None = field(default=None)

    def took_(self, size_bytes: int) -> None:
        self._largest = max(self._largest, size_bytes)
        self._since += size_bytes
        if self._since < _LOOK_EVERY:
            return
        self._since = 0
        room = min(_by_system(), key=lambda room: room.size_bytes, default=None)
        if room is None:
            return
        self._first = self._first if self._first is not None else room.size_bytes
        if room.size_bytes < self._largest + _LEFT * self._first:
            raise OutOfRoom(
                f"the step's next tensors would use up {room.limit}: {room.size_bytes / 2**20:,.0f} MiB are left"
            )
