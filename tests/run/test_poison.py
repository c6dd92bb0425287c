"""With poison, bytes are filled once they are dead: else a test with poison would show nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import takeback as tb


@pytest.mark.parametrize("poison", [True, False])
def test_dead_bytes_are_filled_after_a_step_with_poison_alone(poison: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), optimizer, memory="keep", poison=poison)
    for _ in range(4):
        step(torch.randn(16, 32))
    filled = (step._maker.arena.tensor == 255).float().mean().item()
    assert filled > 0.99 if poison else filled < 0.1
