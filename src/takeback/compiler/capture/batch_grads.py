"""Gradients of batch tensors: a loss_fn may call `x.requires_grad_()`, for a derivative by x (a residual, a penalty).
It is for the step alone: a batch tensor is after each run as it was before.

In eager x would keep the gradient that the whole loss has left in its `.grad`, and need one from the beginning when it
comes again. A step that would see the difference is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch._C import DisableTorchFunction

from takeback.errors import CaptureError


@contextlib.contextmanager
def as_before(batch: Sequence[torch.Tensor], but: Collection[int] = ()) -> Iterator[None]:
    """Afterwards the tensors that needed no gradient need none again, and have none. Those with the ids in `but` are
    left as they are, unless an error comes out."""
    plain = [(t, t.grad) for t in batch if t.is_leaf and not t.requires_grad]
    try:
        yield
    except BaseException:
        but = ()
        raise
    finally:
        with DisableTorchFunction():
            for tensor, grad in plain:
                if tensor.requires_grad and tensor.is_leaf and id(tensor) not in but:
                    tensor.requires_grad_(False)
                    tensor.grad = grad


def drop_(batch: Sequence[torch.Tensor], grads_read: Collection[int], read_before: Collection[int]) -> None:
    """Called after a backward, which may have left gradients that nobody is to read. Raises for tensors, given by their
    ids, whose `.grad` the step has read, and for those that an op has read while they needed no gradient."""
    with DisableTorchFunction():
        for i, tensor in enumerate(batch):
            if not tensor.requires_grad or not tensor.is_leaf or tensor.grad is None:
                continue
            if id(tensor) in grads_read:
                what = "its .grad is in use besides, which takeback leaves empty and eager adds to"
            elif id(tensor) in read_before:
                what = "has been read before that, by ops that eager would differentiate when the tensor comes again"
            else:
                tensor.grad = None
                continue
            raise CaptureError(
                f"tensor {i} of the batch gets a gradient in the step (requires_grad_()), and {what}. Take a copy in "
                f"loss_fn: x = x.detach().clone().requires_grad_()."
            )
