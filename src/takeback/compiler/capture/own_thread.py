"""Tells what the recording thread does to global random generators from what other threads do to them meanwhile: a
thread that loads data may draw while a step is recorded, and the step is not to blame.

Python's `random` and torch's generators are watched by a profile function, which Python calls for this thread alone;
numpy's global generator by its lock, which every draw takes. Where that cannot be done (another profiler is on, the
backward runs on a thread of autograd's), `exact` is False, and whoever asks must take every change for the step's own.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from takeback.progress import threads_at_work

_PYTHONS = random.random.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_LOOKS = str(Path(__file__).parent / "randomness.py")  #: asks where generators stand, and draws nothing
_SETS = frozenset(("set_state", "manual_seed", "seed", "set_offset", "graphsafe_set_state"))


class OwnThread:
    """What the thread that made it has done since."""

    def __init__(self) -> None:
        self.exact = False
        self.exact_numpy = False
        self.drew_python = False
        self.drew_numpy = False
        self._set: set[int] = set()
        self._thread = threading.get_ident()

    def has_set_(self, generator: int) -> bool:
        """Whether this thread may have set the state of a torch generator since this was asked last."""
        was_set = generator in self._set
        self._set.discard(generator)
        return was_set or not self.exact

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename == random.__file__:  # gauss() keeps a number for the next call
            self.drew_python |= frame.f_locals.get("self") is _PYTHONS and frame.f_code.co_name != "getstate"
        if event != "c_call":
            return
        owner: Any = getattr(arg, "__self__", None)
        if owner is _PYTHONS:
            self.drew_python |= arg.__name__ != "getstate"
        elif type(owner) is torch.Generator and arg.__name__ in _SETS:
            self._set.add(int(owner._cdata))

    def took_numpy_lock(self) -> None:
        asks = sys._getframe(2).f_code.co_filename  # behind the lock's own frame; numpy's are not Python's
        self.drew_numpy |= threading.get_ident() == self._thread and asks != _LOOKS


@contextlib.contextmanager
def watching(device: torch.device) -> Iterator[OwnThread]:
    """Watches this thread. With no other there is nothing to tell apart, and nothing is done."""
    own = OwnThread()
    if threads_at_work() == 1 or device.type != "cpu" or sys.getprofile() is not None:
        yield own
        return
    with contextlib.ExitStack() as stack:
        stack.callback(_watch_numpy_(own))
        sys.setprofile(own.profile)
        stack.callback(sys.setprofile, None)
        own.exact = True
        yield own


def _watch_numpy_(own: OwnThread) -> Callable[[], None]:
    """Puts a lock that tells on its takers around numpy's; returns what takes it away again."""
    numpy = sys.modules.get("numpy")
    known = getattr(getattr(numpy, "random", None), "get_bit_generator", None)  # numpy 1.24
    found: Any = known() if known is not None else None
    real = getattr(found, "watched", found)  # Ctrl-C on the way in may have left a spy there
    if numpy is None or type(real) is not numpy.random.MT19937:
        return lambda: None
    exchange = numpy.random

    def put_(generator: Any) -> None:
        drew = own.drew_numpy
        with real.lock:  # which may be taken again by the thread that has it
            state = exchange.get_state(legacy=False)
            exchange.set_bit_generator(generator)
            exchange.set_state(state)  # with the half of a pair of normal numbers that is kept for the next draw
        own.drew_numpy = drew

    put_(_spy_on(real, own.took_numpy_lock))
    own.exact_numpy = True
    return lambda: put_(real)


class _TellingLock:
    """The same lock; whoever takes it is noted."""

    def __init__(self, lock: Any, note: Callable[[], None]) -> None:
        self._lock, self._note = lock, note

    def __enter__(self) -> None:
        self._lock.acquire()
        self._note()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _spy_on(real: Any, note: Callable[[], None]) -> Any:
    """A bit generator that is `real` in all but its lock. numpy asks for attributes by name (checked on 2.4)."""
    telling = _TellingLock(real.lock, note)

    class Spy(type(real)):  # type: ignore[misc]  # numpy looks whether it is a MT19937
        watched = real
        capsule = property(lambda self: real.capsule)
        lock = property(lambda self: telling)
        state = property(lambda self: real.state, lambda self, state: setattr(real, "state", state))

        def _legacy_seeding(self, seed: Any) -> None:
            real._legacy_seeding(seed)

    return Spy()
