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
        self._tensors = [(t, t.detach().clone()) for t in (*parameters, *others)]
        self._states: list[tuple[torch.optim.Optimizer, dict[torch.Tensor, dict[str, Any]]]] = [
            (member, {p: {k: (v, _copy(v)) for k, v in table.items()} for p, table in member.state.items()})
            for member in optimizers.members
        ]

    def restore_(self) -> None:
        """Puts everything back, into the very tensors that held it."""
        for tensor, before in self._tensors:
            tensor.detach().copy_(before)
        for member, tables in self._states:
            state = member.state
            for p in [p for p in state if p not in tables]:
                del state[p]
            for p, table in tables.items():
                state[p].clear()
                for key, (live, before) in table.items():
                    if isinstance(live, torch.Tensor):
                        live.detach().copy_(before)
                    state[p][key] = live


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
