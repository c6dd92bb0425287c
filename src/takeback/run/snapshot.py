"""Parameters and optimizer state as they were, so that a step that turns out to be impossible can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Snapshot:
    """Copies of the parameters and of the optimizer's state."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._state: dict[torch.Tensor, dict[str, Any]] = {
            p: {k: (v, v.detach().clone()) if isinstance(v, torch.Tensor) else (v, v) for k, v in table.items()}
            for p, table in optimizer.state.items()
        }

    def restore_(self) -> None:
        """Puts everything back, into the very tensors that held it."""
        for parameter, before in self._parameters:
            parameter.detach().copy_(before)
        state = self._optimizer.state
        for p in [p for p in state if p not in self._state]:
            del state[p]
        for p, table in self._state.items():
            state[p].clear()
            for key, (live, before) in table.items():
                if isinstance(live, torch.Tensor):
                    live.detach().copy_(before)
                state[p][key] = live
