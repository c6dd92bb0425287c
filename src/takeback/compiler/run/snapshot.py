"""Parameters and the state of optimizer and scaler as they were: a step that turns out impossible can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from takeback.compiler.capture.optimizers import Optimizers


class Snapshot:
    """Copies of the parameters, of the optimizers' state and of `others`."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizers: Optimizers,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        self._optimizers = optimizers
        self._tensors = [(t, t.detach().clone()) for t in (*parameters, *others)]
        self._state: dict[torch.Tensor, dict[str, Any]] = {
            p: {k: (v, v.detach().clone()) if isinstance(v, torch.Tensor) else (v, v) for k, v in table.items()}
            for p, table in optimizers.states
        }

    def restore_(self) -> None:
        """Puts everything back, into the very tensors that held it."""
        for tensor, before in self._tensors:
            tensor.detach().copy_(before)
        for member in self._optimizers.members:
            for p in [p for p in member.state if p not in self._state]:
                del member.state[p]
        for p, live_table in self._optimizers.states:
            live_table.clear()
            for key, (live, before) in self._state[p].items():
                if isinstance(live, torch.Tensor):
                    live.detach().copy_(before)
                live_table[key] = live
