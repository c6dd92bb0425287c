"""The eager recipe that a compiled step must equal, bit for bit: `verify_every`, demo and tests compare to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from takeback.compiler.capture.batch import microbatch
from takeback.compiler.capture.loss import split_loss


class Scaler(Protocol):
    """What multiplies a loss before its backward."""

    def scale(self, loss: torch.Tensor, /) -> torch.Tensor: ...


def eager_gradients(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    accumulate: int = 1,
    scaler: Scaler | None = None,
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
        (loss if scaler is None else scaler.scale(loss)).backward()
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
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """A whole step: gradients, clip, update. Returns the detached loss and leaves `.grad`."""
    loss = eager_gradients(model, loss_fn, args, kwargs, accumulate=accumulate, scaler=scaler)
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return loss
