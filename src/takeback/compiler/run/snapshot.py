"""Parameters and the state of optimizer and scaler as they were: a step that turns out impossible can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Snapshot:
    """Copies of the parameters, of the optimizer's state and of `others`."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        self._optimizer = optimizer
        self._tensors = [(t, t.detach().clone()) for t in (*parameters, *others)]
        self._state: dict[torch.Tensor, dict[str, Any]] = {
            p: {k: (v, v.detach().clone()) if isinstance(v, torch.Tensor) else (v, v) for k, v in table.items()}
            for p, table in optimizer.state.items()
        }

    def restore_(self) -> None:
        """Puts everything back, into the very tensors that held it."""
        for tensor, before in self._tensors:
            tensor.detach().copy_(before)
        state = self._optimizer.state
        for p in [p for p in state if p not in self._state]:
            del state[p]
        for p, table in self._state.items():
            state[p].clear()
            for key, (live, before) in table.items():
                if isinstance(live, torch.Tensor):
                    live.detach().copy_(before)
                state[p][key] = live
