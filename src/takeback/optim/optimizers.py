"""SGD, Adam and AdamW over a GradBuffer: torch.optim's optimizers with flat state, and one pass for the whole update.

In: a GradBuffer, and optionally groups. Guaranteed: parameters and states have the bits that torch.optim's `fused=True`
would give them; `state_dict` is interchangeable with torch.optim's; schedulers, hooks, closures and GradScaler see the
torch.optim class that each of these is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from takeback.grads import GradBuffer
from takeback.optim.flat import FlatOptimizer, Group
from takeback.optim.fused import AdamSettings, SGDSettings


class SGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD over a GradBuffer, with flat momentum.

    groups      parameters or groups of them, as torch.optim takes; all of the buffer's if None
    clip_norm   clips all gradients of the buffer by their global norm inside the step; see `grad_norm`
    kernel      "auto": our own kernel on a GPU wherever it has torch's bits. "torch": always torch's fused operators
    """

    def __init__(
        self,
        buffer: GradBuffer,
        groups: Iterable[Any] | None = None,
        *,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        clip_norm: float | None = None,
        kernel: str = "auto",
    ) -> None:
        params = self._attach(buffer, groups, kernel, clip_norm)
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            fused=True,
        )

    def _names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _settings(self, group: Group) -> SGDSettings:
        return SGDSettings(
            lr=group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )


class _AdamGroups(FlatOptimizer):
    """What Adam and AdamW read of a group; torch's AdamW is an Adam with decoupled decay."""

    def _names(self, group: Group) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def _settings(self, group: Group) -> AdamSettings:
        beta1, beta2 = group["betas"]
        return AdamSettings(
            lr=group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
            decoupled=bool(group["decoupled_weight_decay"]),
        )


class Adam(_AdamGroups, torch.optim.Adam):
    """torch.optim.Adam over a GradBuffer, with flat state. `groups`, `clip_norm` and `kernel` as for SGD."""

    def __init__(
        self,
        buffer: GradBuffer,
        groups: Iterable[Any] | None = None,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
        clip_norm: float | None = None,
        kernel: str = "auto",
    ) -> None:
        params = self._attach(buffer, groups, kernel, clip_norm)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            fused=True,
        )


class AdamW(_AdamGroups, torch.optim.AdamW):
    """torch.optim.AdamW over a GradBuffer, with flat state. `groups`, `clip_norm` and `kernel` as for SGD."""

    def __init__(
        self,
        buffer: GradBuffer,
        groups: Iterable[Any] | None = None,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        clip_norm: float | None = None,
        kernel: str = "auto",
    ) -> None:
        params = self._attach(buffer, groups, kernel, clip_norm)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            fused=True,
        )
