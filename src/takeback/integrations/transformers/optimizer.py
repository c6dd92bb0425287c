"""The optimizer as the Trainer holds it: all is the wrapped optimizer's, but `step()` is the compiled step's update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from takeback.errors import CaptureError


class StepOptimizer(AcceleratedOptimizer):
    """`update` makes the update, or finds that it has been made, and says whether a scaler left it out."""

    def __init__(self, optimizer: torch.optim.Optimizer, update: Callable[[], bool]) -> None:
        super().__init__(optimizer)
        self._is_accelerate_prepared = True  # Accelerate leaves it as it is
        self._update = update

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise CaptureError("optimizer.step() of a TakebackTrainer takes no closure: its step is compiled already.")
        self._is_overflow = self._update()


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What Accelerate has wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
