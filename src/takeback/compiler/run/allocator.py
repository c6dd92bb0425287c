"""Records which memory an op requests on the CPU, or answers those requests from one arena, as a script says.

In: a cell with the current op, and per op the size and arena offset of each request. Out: events, counters
and misses. Guaranteed: only the thread inside a recording or replay, and OpenMP workers, are affected; every
block can be freed at any time on any thread; arena bytes stay mapped while a tensor over them lives.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from takeback.errors import PlanError
from takeback.native import load as load_native
from takeback.options import open_cache

_SOURCE = Path(__file__).parent / "native" / "allocator.cpp"
_TORCH = Path(torch.__file__).parent

ALLOC, FREE = 0, 1
"""The two values of an event's `kind`."""

PASS = -1
"""The offset of an entry that is expected to go to the original allocator."""

EVENT = np.dtype([(name, np.int64) for name in ("kind", "op", "size_bytes", "id", "address", "entry")])
"""One request or free: `id` is shared by a block's two events; `entry` is the script's, or -1."""

MISS = np.dtype([("op", np.int64), ("size_bytes", np.int64)])
"""One request that the script did not expect."""


class RequestCounts(ctypes.Structure):
    """What happened between enter and leave; worker counts are of the whole process, filled in by leave."""

    _fields_ = [
        ("served", ctypes.c_int64),
        ("passed", ctypes.c_int64),
        ("misses", ctypes.c_int64),
        ("missed_bytes", ctypes.c_int64),
        ("worker_requests", ctypes.c_int64),
        ("worker_new", ctypes.c_int64),
        ("worker_passed", ctypes.c_int64),
    ]

    served: int  # answered from the arena
    passed: int  # answered by the original allocator, as expected
    misses: int  # answered by the original allocator, unexpectedly
    missed_bytes: int
    worker_requests: int  # made inside OpenMP parallel regions
    worker_new: int  # of those, carved afresh because no free block was at hand
    worker_passed: int  # of those, too large for the free lists: answered by the original allocator


class Cell:
    """The current op's index, set by `cell.view[0] = 57` without a call; -1 between ops."""

    __slots__ = ("_words", "address", "view")

    def __init__(self) -> None:
        self._words = array.array("q", [-1])
        self.address: int = self._words.buffer_info()[0]
        self.view = memoryview(self._words)


_DONT_NEED = 4  # MADV_DONTNEED


class Arena:
    """One mapping, aligned at 2 MiB, with a uint8 tensor over it.

    It is unmapped when this object, every script and tensor over it, and every block served from it are gone.
    """

    __slots__ = ("_handle", "address", "size_bytes", "tensor")

    def __init__(self, library: ctypes.PyDLL, size_bytes: int) -> None:
        assert size_bytes >= 0
        handle = library.tb_arena_new(size_bytes)
        if not handle:
            raise MemoryError(f"cannot map an arena of {size_bytes} bytes; use a smaller batch")
        self._handle: int = handle
        self.size_bytes = size_bytes
        self.address: int = library.tb_arena_base(handle)
        # The tensor's storage owns `memory`: the mapping goes with the last tensor over it, not with us.
        memory = (ctypes.c_uint8 * max(size_bytes, 1)).from_address(self.address)
        weakref.finalize(memory, library.tb_arena_release, handle).atexit = False
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]

    def give_back_(self) -> None:
        """Gives the pages back to the system until they are written again; what is in them is lost."""
        if sys.platform == "linux":
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size_bytes), _DONT_NEED)


class Session:
    """One recording or one script: entered on at most one thread at a time, and left on that thread."""

    def __init__(self, library: ctypes.PyDLL, handle: int, cell: Cell) -> None:
        self.cell = cell
        self._library = library
        self._handle = handle
        self._enter = library.tb_enter
        self._leave = library.tb_leave
        weakref.finalize(self, library.tb_session_delete, handle).atexit = False
        self.counters = RequestCounts.from_address(library.tb_counters(handle))
        """Live, and reset by the next enter."""

    def enter(self, *, log: bool = False) -> None:
        """Turn the mode on for this thread; pair it with `leave` in a `finally`, or use `with`."""
        try:
            code = self._enter(self._handle, log)
        except BaseException:  # Ctrl-C between the native call and here
            self._leave(self._handle)
            raise
        if code == 1:
            raise RuntimeError("this thread is already inside a recording or a replay; leave that one first")
        if code == 2:
            raise RuntimeError("this script is being replayed on another thread; a script belongs to one thread")

    def leave(self) -> None:
        """Turn the mode off; does nothing where this thread is not inside."""
        self._leave(self._handle)

    @property
    def events(self) -> npt.NDArray[np.void]:
        """What was logged since the last enter, as an array of `EVENT`: a copy."""
        return self._copy(self._library.tb_events, EVENT)

    @property
    def misses(self) -> npt.NDArray[np.void]:
        """The first 1024 misses since the last enter, as an array of `MISS`: a copy."""
        return self._copy(self._library.tb_misses, MISS)

    def _copy(self, function: ctypes._NamedFuncPointer, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        start = ctypes.c_void_p()
        count = function(self._handle, ctypes.byref(start))
        copied = np.empty(count, dtype)
        if count:
            ctypes.memmove(copied.ctypes.data, start, copied.nbytes)
        return copied


class Recording(Session):
    """Logs this thread's requests and frees; the original allocator answers. `with native.record(cell)`."""

    def __enter__(self) -> Recording:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self._handle)


class Script(Session):
    """Which arena offset answers each request of each op. `with script.replay(): ...`, once per step."""

    def __init__(self, library: ctypes.PyDLL, handle: int, cell: Cell, arena: Arena) -> None:
        super().__init__(library, handle, cell)
        self.arena = arena

    def replay(self, *, log: bool = False) -> EnteredScript:
        """A context in which this thread is answered from the arena; with `log`, events are kept as well."""
        return EnteredScript(self, log)


class EnteredScript:
    """The context manager of `Script.replay`; gives the script."""

    __slots__ = ("_log", "_script")

    def __init__(self, script: Script, log: bool) -> None:
        self._script = script
        self._log = log

    def __enter__(self) -> Script:
        self._script.enter(log=self._log)
        return self._script

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._script.leave()


class Native:
    """The installed allocator. Made by `load`, once per process."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library

    def arena(self, size_bytes: int) -> Arena:
        """Map an arena; its pages are taken when first written."""
        return Arena(self._library, size_bytes)

    def record(self, cell: Cell) -> Recording:
        """A context that logs every request and free of this thread."""
        return Recording(self._library, self._library.tb_session_new(cell.address, None, None, 0, None, None, 0), cell)

    def script(
        self, first: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], arena: Arena, cell: Cell
    ) -> Script:
        """Entries `first[op]` to `first[op + 1]` answer op's requests, in order, each by exactly that size.

        An offset of `PASS`: the original allocator answers. Raises `PlanError` if an entry leaves the arena.
        """
        firsts, wanted, placed = (np.ascontiguousarray(x, dtype=np.int64) for x in (first, sizes, offsets))
        _check(firsts, wanted, placed, arena.size_bytes)
        handle = self._library.tb_session_new(
            cell.address,
            arena._handle,
            firsts.ctypes.data,
            len(firsts) - 1,
            wanted.ctypes.data,
            placed.ctypes.data,
            len(wanted),
        )
        return Script(self._library, handle, cell, arena)

    @property
    def inside(self) -> bool:
        """Whether this thread is inside a recording or a replay."""
        return bool(self._library.tb_current())

    def off(self) -> None:
        """Leave whatever this thread is inside of: for recovery after an interrupt that skipped `leave`."""
        session = self._library.tb_current()
        if session:
            self._library.tb_leave(session)


def _check(
    first: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    arena_bytes: int,
) -> None:
    if len(sizes) != len(offsets):
        raise PlanError(f"a script has {len(sizes)} sizes but {len(offsets)} offsets")
    if not len(first) or first[0] != 0 or first[-1] != len(sizes) or (np.diff(first) < 0).any():
        raise PlanError(f"a script's op ranges must rise from 0 to its {len(sizes)} entries")
    bad = np.flatnonzero((sizes <= 0) | (offsets < PASS) | ((offsets >= 0) & (offsets > arena_bytes - sizes)))
    if len(bad):
        entry = int(bad[0])
        op = int(np.searchsorted(first, entry, side="right")) - 1
        raise PlanError(
            f"op {op}'s request of {sizes[entry]} bytes is placed at offset {offsets[entry]}, "
            f"outside the arena of {arena_bytes} bytes"
        )


def load(cache_dir: Path | None = None, compiler: str = "g++") -> Native | None:
    """Compile (or find in the cache) and install the allocator; None, after one warning, where that fails."""
    with _load_lock:
        return _load(cache_dir, compiler)


_load_lock = threading.Lock()


@functools.lru_cache
def _load(cache_dir: Path | None, compiler: str) -> Native | None:
    try:
        # What torch's headers include is a third shorter in C++17. Where a torch does without that, it says so at once.
        with contextlib.suppress(RuntimeError):
            return _built("c++17", cache_dir, compiler)
        return _built("c++20", cache_dir, compiler)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _warn(
            f"the native CPU allocator is not available: {error}. Everything works, but on CPU the memory "
            "that ops take for themselves is not placed in the arena. Install a C++20 compiler "
            f"({compiler!r} was tried), make sure that the temporary folder has room, and start again."
        )
        return None


def _built(standard: str, cache_dir: Path | None, compiler: str) -> Native:
    built_from = (torch.__version__, str(torch.version.git_version))
    cache = open_cache(cache_dir)
    return load_native(_SOURCE, _flags(standard), _open, cache=cache, compiler=compiler, built_from=built_from)


def _flags(standard: str) -> list[str]:
    # torch.compiled_with_cxx11_abi and the include/ and lib/ folders of the wheel: checked on torch 2.13.
    return [
        *("-O2", f"-std={standard}", "-shared", "-fPIC", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(_TORCH / "include")),
        *(f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}", "-lc10", "-ldl"),
    ]


_native: list[Native] = []
"""The one allocator of this process: a second copy of the library would wrap the first."""


def _open(path: Path) -> Native:
    if _native:
        return _native[0]
    library = ctypes.PyDLL(str(path))  # keeps the GIL: no call here blocks
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, tuple[type[ctypes._SimpleCData[int]] | type[ctypes.c_void_p] | None, list[object]]] = {
        "tb_install": (ctypes.c_int, []),
        "tb_arena_new": (pointer, [int64]),
        "tb_arena_base": (pointer, [pointer]),
        "tb_arena_release": (None, [pointer]),
        "tb_arena_count": (int64, []),
        "tb_logged_count": (int64, []),
        "tb_session_new": (pointer, [pointer, pointer, pointer, int64, pointer, pointer, int64]),
        "tb_session_delete": (None, [pointer]),
        "tb_enter": (ctypes.c_int, [pointer, ctypes.c_int]),
        "tb_leave": (ctypes.c_int, [pointer]),
        "tb_current": (pointer, []),
        "tb_counters": (pointer, [pointer]),
        "tb_events": (int64, [pointer, pointer]),
        "tb_misses": (int64, [pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    code = library.tb_install()
    if code:
        raise RuntimeError(
            "the CPU allocator in use has no raw deleter"
            if code == 1
            else "the CPU allocator in use cannot be replaced"
        )
    _native.append(Native(library))
    return _native[0]


def _warn(text: str) -> None:
    warnings.warn(f"takeback: {text}", RuntimeWarning, stacklevel=4)
