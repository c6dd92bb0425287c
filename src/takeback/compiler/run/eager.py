"""The eager step that a compiled one must equal, written down once: comparisons, the demo, benchmarks and tests run it.

A `Recipe` says what a step is made of; its methods are the parts of that step, each as a user would write it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from takeback.compiler.capture.batch import cut
from takeback.compiler.capture.loss import split_loss
from takeback.compiler.capture.optimizers import Optimizers, optimizers_of
from takeback.compiler.capture.uncompiled import uncompiled


class Scaler(Protocol):
    """What multiplies a loss before its backward."""

    def scale(self, loss: torch.Tensor, /) -> torch.Tensor: ...


Batch = tuple[tuple[Any, ...], dict[str, Any]]  #: what loss_fn is called with besides the model


@dataclass(frozen=True)
class Gave:
    """What forward and backward gave, besides gradients."""

    loss: torch.Tensor  #: detached
    aux: Any  #: as loss_fn returned it; of microbatches, a tuple of theirs
    has_aux: bool


@dataclass(frozen=True)
class Recipe:
    """The user's objects, and how a step is put together from them."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizers
    accumulate: int = 1
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    updates: bool = True  #: False: a microbatch, whose gradients are neither unscaled nor clipped

    @functools.cached_property
    def optimizers(self) -> Optimizers:
        return optimizers_of(self.optimizer, self.scaler)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.model.parameters())

    def backward_(self, batch: Batch, scaler: Scaler | None = None) -> torch.Tensor:
        """`forward_backward_`, of which the detached loss is returned."""
        return self.forward_backward_(batch, scaler).loss

    def forward_backward_(self, batch: Batch, scaler: Scaler | None = None) -> Gave:
        """zero_grad, then forward and backward for each microbatch, whose loss `scaler` multiplies. Gradients are in
        `.grad`, neither unscaled nor clipped."""
        self.model.zero_grad(set_to_none=True)
        return self.add_backward_(batch, scaler)

    def add_backward_(
        self, batch: Batch, scaler: Scaler | None = None, begin_: Callable[[], None] | None = None
    ) -> Gave:
        """The same without zero_grad: gradients are added to what is in `.grad`. `begin_` is called before they are."""
        parted = cut(batch, self.accumulate)
        total: torch.Tensor | None = None
        parts: list[Any] = []
        has_aux = False
        for index in range(parted.count):
            loss, aux, has_aux = self._loss(parted.part(batch, index))
            parts.append(aux)
            loss = parted.weigh(loss, index)
            if begin_ is not None:
                begin_()
            (loss if scaler is None else scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
            del loss
        assert total is not None
        return Gave(total, parts[0] if self.accumulate == 1 else tuple(parts), has_aux)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss alone, as `backward_` gives it."""
        parted = cut(batch, self.accumulate)
        total: torch.Tensor | None = None
        for index in range(parted.count):
            loss, _, _ = self._loss(parted.part(batch, index))
            part = parted.weigh(loss.detach(), index)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, Any, bool]:
        args, kwargs = batch
        with uncompiled():
            return split_loss(self.loss_fn(self.model, *args, **kwargs), self.loss_fn)

    def update_(self) -> torch.Tensor | None:
        """What comes after `backward_(batch, self.scaler)`: clips, takes the optimizers' step, updates the scale. The
        norm before clipping, where that was asked for."""
        norm: torch.Tensor | None = None
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizers.only)
            norm = clip_(self.parameters, self.clip_norm)
        if self.scaler is None:
            self.optimizers.step_()
        else:
            self.scaler.step(self.optimizers.only)
            self.scaler.update()
        return norm

    def drop_grads_(self) -> None:
        for p in self.model.parameters():
            p.grad = None


def eager_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """A whole step: gradients, clip, update. Returns the detached loss and leaves `.grad`."""
    recipe = Recipe(model, loss_fn, optimizer, accumulate=accumulate, clip_norm=clip_norm, scaler=scaler)
    loss = recipe.backward_((args, dict(kwargs or {})), scaler)
    recipe.update_()
    return loss


def clip_(parameters: Sequence[torch.nn.Parameter], clip_norm: float | None) -> torch.Tensor | None:
    """Clips what is in `.grad`, if that was asked for, and returns the norm before."""
    if clip_norm is None:
        return None
    return torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], clip_norm)
