"""The random trail reads generator states while the traps for the user's code are set, under any function mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import takeback as tb


@pytest.fixture
def default_device() -> Iterator[None]:
    """Puts a mode on that sees every torch function."""
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_dropout_is_recorded_under_a_default_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        step(torch.ones(2, 4))
    assert len(step._plans) == 1
