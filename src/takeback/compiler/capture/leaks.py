"""While a step is recorded, catches what the dispatcher does not see: `.numpy()`, `.tolist()`, `torch.manual_seed()`,
and draws from Python's or numpy's random numbers.

`.tolist()` of a small tensor is honoured: it becomes one expected value per element. The rest raises. Only the
recording thread is affected, and autograd's thread that runs the backward on a GPU for it; every other thread goes
straight to torch's own method.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # checked on 2.11 and 2.13

from takeback.compiler.capture.own_thread import OwnThread
from takeback.compiler.capture.randomness import DrawsFromNumpy
from takeback.compiler.capture.site import belongs_to_user
from takeback.errors import CaptureError

_MOST_GUARDED_ELEMENTS = 64
_HERE = str(Path(__file__).parent)


def _user_line() -> str | None:
    """The user's line that asked, or None if takeback's own capture did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename.startswith(_HERE):
        return None
    while frame is not None and not belongs_to_user(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "unknown line"


_lock = threading.Lock()
_open: dict[int, Callable[[torch.Tensor], None]] = {}  # by thread, while it runs what a replay runs again
_recording: dict[object, int] = {}  # the thread of each recording; the traps are set while there is one
_SEEDS = ("manual_seed", "seed")
_torch_dlpack = torch.Tensor.__dlpack__


def _is_recording() -> bool:
    """On a GPU the backward runs on a thread of autograd's, which takes the recorder along."""
    if threading.get_ident() in _recording.values():
        return True
    return bool(_recording) and any(getattr(mode, "records", False) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def open_to(check: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """What runs in here is Python in each replay, too: tensors may leave torch, once `check` has seen them."""
    _open[threading.get_ident()] = check
    try:
        yield
    finally:
        del _open[threading.get_ident()]


def what_may_be_read() -> Callable[[torch.Tensor], None] | None:
    """The check of what this thread is inside of."""
    return _open.get(threading.get_ident())


def _numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _refuse_leaving("Tensor.numpy()", self)
    return torch._C.TensorBase.numpy(self, *args, **kwargs)


def _dlpack(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _refuse_leaving("Tensor.__dlpack__()", self)
    return _torch_dlpack(self, *args, **kwargs)


def _refuse_leaving(name: str, tensor: torch.Tensor) -> None:
    check = what_may_be_read()
    if check is not None:
        check(tensor)
        return
    line = _user_line() if _is_recording() else None
    if line is not None:
        raise CaptureError(
            f"{name} at {line} takes the data out of torch, where no replay can follow. Stay in torch inside the step, "
            f"or return the tensor as aux and convert it there."
        )


def _tolist(self: torch.Tensor) -> Any:
    if not _is_recording() or what_may_be_read() is not None:
        return torch._C.TensorBase.tolist(self)
    if self.numel() > _MOST_GUARDED_ELEMENTS:
        raise CaptureError(
            f"Tensor.tolist() of {self.numel()} elements at {_user_line()} reads data into Python, and takeback "
            f"guards at most {_MOST_GUARDED_ELEMENTS} values. Pass the list as part of the batch, or stay in torch."
        )
    return self.item() if self.dim() == 0 else [_tolist(row) for row in self.unbind(0)]


class SeedTrap:
    """Stands in for torch.manual_seed or torch.seed. What it stands for is asked anew each time: torch wraps these two
    when it imports dynamo."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_recording():
            raise CaptureError(
                f"torch.manual_seed() or torch.seed() at {_user_line()} sets the random state inside the step. A "
                f"replay runs no Python, so it would draw other numbers than eager. Seed before the step."
            )
        return self.original(*args, **kwargs)


def _numpy_random() -> object:
    """Where numpy's global generator stands. Not its repr: an array's is another one after Ctrl-C inside of it."""
    numpy = sys.modules.get("numpy")
    return _plain(numpy.random.get_state(legacy=False)) if numpy is not None else None


def _plain(state: Any) -> object:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


@contextlib.contextmanager
def tripwires(own: OwnThread, *, follows_numpy: bool = False) -> Iterator[None]:
    """Refuses what leaves torch without a trace: a tensor turned into numpy or a list, and Python's random numbers.
    Where `own` can tell, what other threads draw does not count. `follows_numpy`: somebody else compares where numpy's
    generator stands."""
    python_random = random.getstate()
    by_state = not (own.exact_numpy or follows_numpy)
    numpy_random = _numpy_random() if by_state else None
    with _traps():
        yield
    if own.drew_python if own.exact else random.getstate() != python_random:
        raise CaptureError(
            "the step draws from Python's random module; a replay would use the first draw for ever. Draw before the "
            "step and pass the result in as a tensor, or draw with torch."
        )
    if own.drew_numpy or (by_state and _numpy_random() != numpy_random):
        raise DrawsFromNumpy


@contextlib.contextmanager
def _traps() -> Iterator[None]:
    """Sets the traps for this thread."""
    mine = object()
    with _lock:
        _recording[mine] = threading.get_ident()
        # Checked on 2.11 and 2.13: numpy and tolist are inherited from TensorBase, so deleting ours restores torch's.
        torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__dlpack__ = _numpy, _tolist, _dlpack
        for name in _SEEDS:
            if not isinstance(getattr(torch, name), SeedTrap):
                setattr(torch, name, SeedTrap(getattr(torch, name)))
    try:
        yield
    finally:
        _take_away_([mine])


def disarm_() -> None:
    """Takes this thread's traps away, if there are any: for a recording that Ctrl-C ended between any two lines."""
    _take_away_([key for key, thread in tuple(_recording.items()) if thread == threading.get_ident()])


def _take_away_(mine: Sequence[object]) -> None:
    with _lock:
        for key in mine:
            _recording.pop(key, None)
        if _recording:
            return
        # Also where there is nothing left to pop: Ctrl-C may have struck between the two.
        for name in ("numpy", "tolist"):
            if name in vars(torch.Tensor):
                delattr(torch.Tensor, name)
        torch.Tensor.__dlpack__ = _torch_dlpack
        for name in _SEEDS:
            if isinstance(getattr(torch, name), SeedTrap):
                setattr(torch, name, getattr(torch, name).original)
