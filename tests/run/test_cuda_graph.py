"""What cannot be a CUDA graph is known beforehand; what can is tried in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.run.cuda_graph import why_not_captured
from takeback.errors import OptionError


def why(model: nn.Module, loss_fn: object, *batch: Tensor) -> str | None:
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    for _ in range(2):
        step(*batch)
    executor = step._plans[0].executor
    return why_not_captured(executor.program, executor.program.ops[: executor._first_update])


def test_an_ordinary_step_can_be_tried() -> None:
    assert why(nn.Linear(3, 2), lambda m, x: m(x).square().mean(), torch.ones(4, 3)) is None


def test_a_value_that_is_read_into_python_is_named() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2.0 if float(x.sum()) > 0 else 1.0)

    assert "reads a value into Python" in (why(nn.Linear(3, 2), loss_fn, torch.ones(4, 3)) or "")


def test_a_random_state_that_is_restored_is_named() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()

    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    assert "random state" in (why(model, loss_fn, torch.ones(4, 3)) or "")


def test_an_unknown_setting_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(OptionError, match="graphs must be one of"):
        tb.compile_step(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), graphs="sometimes")
