"""What only torch's internals can say: what becomes of a gradient, whether a function transform is running, the stream.

`Tensor.backward` adds a leaf's gradient into `.grad`, `torch.autograd.grad` hands it to the caller, and either may not
want it at all. torch has no public way to ask, and a gradient written straight into `.grad` would be silently wrong in
the last two. Under torch.func or forward mode a Function of ours has no rule. Checked on 2.11 and 2.13.
"""

from __future__ import annotations

import enum

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node


class Fate(enum.Enum):
    """What happens to the gradient of a leaf in the running backward."""

    ACCUMULATED = enum.auto()  #: it is added into `.grad`
    RETURNED = enum.auto()  #: torch.autograd.grad gives it to its caller
    UNUSED = enum.auto()  #: nobody asked for it


def fate_of(accumulate: Node) -> Fate:
    """The fate of what reaches an AccumulateGrad node."""
    try:
        runs = torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # it refuses leaves under torch.autograd.grad
        return Fate.RETURNED
    return Fate.ACCUMULATED if runs else Fate.UNUSED


def transformed() -> bool:
    """Whether torch.func's grad, vmap, jvp, ... or forward-mode differentiation is running."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def cuda_stream(device: int) -> int:
    """The current stream, in a fraction of the time that `torch.cuda.current_stream` takes: it is asked for every
    gradient."""
    return int(torch._C._cuda_getCurrentRawStream(device))
