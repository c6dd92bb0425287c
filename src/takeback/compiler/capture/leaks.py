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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # checked on 2.11 and 2.13

from takeback.compiler.capture.own_thread import OwnThread
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
_recording: list[int] = []  # threads that are recording; the traps are set while there is one
_torch_seeds = (torch.manual_seed, torch.seed)
_torch_dlpack = torch.Tensor.__dlpack__


def _is_recording() -> bool:
    """On a GPU the backward runs on a thread of autograd's, which takes the recorder along."""
    if threading.get_ident() in _recording:
        return True
    return bool(_recording) and any(getattr(mode, "records", False) for mode in _get_current_dispatch_mode_stack())


def _numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _refuse_leaving("Tensor.numpy()")
    return torch._C.TensorBase.numpy(self, *args, **kwargs)


def _dlpack(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _refuse_leaving("Tensor.__dlpack__()")
    return _torch_dlpack(self, *args, **kwargs)


def _refuse_leaving(name: str) -> None:
    line = _user_line() if _is_recording() else None
    if line is not None:
        raise CaptureError(
            f"{name} at {line} takes the data out of torch, where no replay can follow. Stay in torch inside the step, "
            f"or return the tensor as aux and convert it there."
        )


def _tolist(self: torch.Tensor) -> Any:
    if not _is_recording():
        return torch._C.TensorBase.tolist(self)
    if self.numel() > _MOST_GUARDED_ELEMENTS:
        raise CaptureError(
            f"Tensor.tolist() of {self.numel()} elements at {_user_line()} reads data into Python, and takeback "
            f"guards at most {_MOST_GUARDED_ELEMENTS} values. Pass the list as part of the batch, or stay in torch."
        )
    return self.item() if self.dim() == 0 else [_tolist(row) for row in self.unbind(0)]


def _seed(*args: Any, **kwargs: Any) -> Any:
    if _is_recording():
        raise CaptureError(
            f"torch.manual_seed() or torch.seed() at {_user_line()} sets the random state inside the step. A replay "
            f"runs no Python, so it would draw other numbers than eager. Seed before the step."
        )
    manual_seed, seed = _torch_seeds
    return manual_seed(*args, **kwargs) if args or kwargs else seed()


@contextlib.contextmanager
def tripwires(own: OwnThread) -> Iterator[None]:
    """Refuses what leaves torch without a trace: a tensor turned into numpy or a list, and Python's random numbers.
    Where `own` can tell, what other threads draw does not count."""
    python_random = random.getstate()
    numpy_random = _numpy_state(own)
    with _traps():
        yield
    drawn = None
    if own.drew_python if own.exact else random.getstate() != python_random:
        drawn = "Python's random module"
    elif own.drew_numpy or _numpy_state(own) != numpy_random:
        drawn = "numpy.random"
    if drawn is not None:
        raise CaptureError(
            f"the step draws from {drawn}; a replay would use the first draw for ever. Draw before the step and pass "
            f"the result in as a tensor, or draw with torch."
        )


def _numpy_state(own: OwnThread) -> str:
    """The state of numpy's global generator, where that must be compared."""
    numpy = sys.modules.get("numpy")
    return "" if numpy is None or own.exact_numpy else repr(numpy.random.get_state(legacy=False))


@contextlib.contextmanager
def _traps() -> Iterator[None]:
    """Sets the traps for this thread."""
    with _lock:
        _recording.append(threading.get_ident())
        # Checked on 2.11 and 2.13: numpy and tolist are inherited from TensorBase, so deleting ours restores torch's.
        torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__dlpack__ = _numpy, _tolist, _dlpack
        torch.manual_seed = torch.seed = _seed
    try:
        yield
    finally:
        with _lock:
            _recording.remove(threading.get_ident())
            if not _recording:
                del torch.Tensor.numpy, torch.Tensor.tolist
                torch.Tensor.__dlpack__ = _torch_dlpack
                torch.manual_seed, torch.seed = _torch_seeds
