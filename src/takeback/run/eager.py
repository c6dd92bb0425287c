"""The eager recipe that a compiled step must equal, bit for bit: `verify_every`, demo and tests compare to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from takeback.capture.batch import microbatch
from takeback.capture.session import split_loss


def eager_gradients(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    accumulate: int = 1,
) -> torch.Tensor:
    """zero_grad, then forward and backward per microbatch. Returns the detached loss; gradients are in `.grad`."""
    kwargs = dict(kwargs or {})
    model.zero_grad(set_to_none=True)
    total: torch.Tensor | None = None
    for index in range(accumulate):
        part = (args, kwargs) if accumulate == 1 else microbatch((args, kwargs), index, accumulate)
        loss, _, _ = split_loss(loss_fn(model, *part[0], **part[1]), loss_fn)
        if accumulate > 1:
            loss = loss / accumulate
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
        del loss
    assert total is not None
    return total


def eager_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
) -> torch.Tensor:
    """A whole step: gradients, clip, update. Returns the detached loss and leaves `.grad`."""
    loss = eager_gradients(model, loss_fn, args, kwargs, accumulate=accumulate)
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return loss
