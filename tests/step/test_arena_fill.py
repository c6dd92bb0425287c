"""Steps while torch fills the memory that kernels allocate, as its deterministic algorithms do."""

from __future__ import annotations

import torch
from torch import nn

from harness import Case, train_both


def test_memory_that_torch_fills_ruins_no_operand() -> None:
    """A norm's backward allocates its result, which the arena would put onto its operand: deterministic algorithms fill
    it with NaN first."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory

        def build() -> nn.Module:
            norms = (nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))
            return nn.Sequential(*norms)

        case = Case(build, lambda m, x: m(x).square().mean(), lambda i: (torch.randn(256, 8),))
        step = train_both(case, steps=3, memory="keep")
        assert any("use_deterministic_algorithms" in r.reason for r in step.report().refusals)
    finally:
        torch.use_deterministic_algorithms(False)
