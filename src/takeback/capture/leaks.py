"""While a step is recorded, catches what the dispatcher does not see: `.numpy()`, `.tolist()`, `torch.manual_seed()`.

`.tolist()` of a small tensor is honoured: it becomes one value guard per element. The rest raises. Only the recording
thread is affected; every other thread goes straight to torch's own method.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from takeback.capture.site import belongs_to_user
from takeback.errors import CaptureError

_MOST_GUARDED_ELEMENTS = 64
_HERE = str(Path(__file__).parent)


def _user_line() -> str | None:
    """The user's line that asked, or None if takeback's own capture did."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code.co_filename.startswith(_HERE):
        return None
    while frame is not None and not belongs_to_user(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "unknown line"


@contextlib.contextmanager
def watch_leaks() -> Iterator[None]:
    recording = threading.get_ident()

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        line = _user_line() if threading.get_ident() == recording else None
        if line is not None:
            raise CaptureError(
                f"Tensor.numpy() at {line} takes the data out of torch, where no replay can follow. Stay in torch "
                f"inside the step, or return the tensor as aux and convert it there."
            )
        return torch._C.TensorBase.numpy(self, *args, **kwargs)

    def tolist(self: torch.Tensor) -> Any:
        if threading.get_ident() != recording:
            return torch._C.TensorBase.tolist(self)
        if self.numel() > _MOST_GUARDED_ELEMENTS:
            raise CaptureError(
                f"Tensor.tolist() of {self.numel()} elements at {_user_line()} reads data into Python, and takeback "
                f"guards at most {_MOST_GUARDED_ELEMENTS} values. Pass the list as part of the batch, or stay in torch."
            )
        return self.item() if self.dim() == 0 else [tolist(row) for row in self.unbind(0)]

    def seeded(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == recording:
            raise CaptureError(
                f"torch.manual_seed() or torch.seed() at {_user_line()} sets the random state inside the step. A replay "
                f"runs no Python, so it would draw other numbers than eager. Seed before the step."
            )
        return manual_seed(*args, **kwargs) if args or kwargs else seed()

    manual_seed, seed = torch.manual_seed, torch.seed
    torch.manual_seed = torch.seed = seeded
    # Checked on 2.11 and 2.13: both are inherited from TensorBase, so deleting ours brings torch's back.
    torch.Tensor.numpy = numpy
    torch.Tensor.tolist = tolist
    try:
        yield
    finally:
        torch.manual_seed, torch.seed = manual_seed, seed
        del torch.Tensor.numpy, torch.Tensor.tolist
