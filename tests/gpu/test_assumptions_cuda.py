"""On a GPU the backward runs on a thread of autograd's: what Python reads there is assumed too."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from gpu_twins import exact_step
from torch import Tensor, nn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


class Scaled(torch.autograd.Function):
    config = types.SimpleNamespace(gain=2.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Scaled.config.gain


def train(compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    Scaled.config.gain = 2.0
    model = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return Scaled.apply(model(x)).square().mean()

    step = exact_step(model, loss_fn, optimizer, memory="keep", verify_every=0) if compiled else None
    seen = []
    for i in range(7):
        if i == 4:
            Scaled.config.gain = 3.0
        x = torch.full((4, 8), 0.1 * i, device="cuda")
        if step is not None:
            step(x)
        else:
            optimizer.zero_grad()
            loss_fn(model, x).backward()
            optimizer.step()
        seen.append(model.weight.detach().clone())
    return seen


def test_what_a_backward_reads_is_assumed() -> None:
    for i, (ours, eager) in enumerate(zip(train(compiled=True), train(compiled=False), strict=True)):
        assert torch.equal(ours, eager), f"step {i}"


def test_a_trainer_whose_counters_tick_has_one_plan() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(8, 8, device="cuda")
            self.steps, self.scale = 0, 2.0
            optimizer = torch.optim.AdamW(self.model.parameters())
            self.step = exact_step(self.model, self.loss, optimizer, memory="keep")

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return model(x).square().mean() * self.scale

    trainer = Trainer()
    for _ in range(4):
        trainer.step(torch.ones(4, 8, device="cuda"))
        trainer.steps += 1
    assert len(trainer.step._plans) == 1
    for i in range(4):
        trainer.scale = 3.0 + i
        x = torch.ones(4, 8, device="cuda")
        expected = trainer.loss(trainer.model, x).detach()
        assert torch.equal(trainer.step(x), expected)
    assert len(trainer.step._plans) == 1
