"""Optimizers whose update takeback does not write out: their own step() is called, with eager's bits, and the report
says so. And weights of torchao. What is not installed is skipped; bitsandbytes has a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb

pytestmark = [pytest.mark.usefixtures("one_thread", "short_search"), pytest.mark.filterwarnings("ignore")]


def of(module: str, name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(pytest.importorskip(module), name)(parameters, lr=1e-2, **options)

    return make


MAKES = {
    "Adafactor": of("transformers.optimization", "Adafactor", scale_parameter=False, relative_step=False),
    "AdamWScheduleFree": of("schedulefree", "AdamWScheduleFree", warmup_steps=2),
    "SGDScheduleFree": of("schedulefree", "SGDScheduleFree"),
    "AdamW8bit": of("torchao.optim", "AdamW8bit", block_size=64),
}
COMPILES = "AdamW8bit"  #: by torch.compile, which takes seconds


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == COMPILES else ()) for n in MAKES])
def test_its_own_step_is_called(name: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        return model, MAKES[name](model.parameters())

    (eager, theirs), (model, ours) = make(), make()
    step = tb.compile_step(model, cross_entropy, ours, memory="keep")
    torch.manual_seed(1)
    for i in range(5):
        for optimizer in (theirs, ours):  # a schedule-free one has other weights in an evaluation
            if i == 3 and hasattr(optimizer, "eval"):
                optimizer.eval()
            if hasattr(optimizer, "train"):
                optimizer.train()
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        theirs.zero_grad()
        loss = cross_entropy(eager, x, y)
        loss.backward()
        theirs.step()
        assert torch.equal(step(x, y), loss)
    assert all(map(torch.equal, eager.parameters(), model.parameters()))
    assert step.counts.planned == 5
    assert f"{name}'s own step() is called after the backward" in step.report().notes[0]


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_frozen_weights_that_torchao_has_quantised_have_eagers_bits(config: str) -> None:
    """Its tensors hand torch the ops of what they are made of."""
    quantization = pytest.importorskip("torchao.quantization")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4))
        quantization.quantize_(model, getattr(quantization, config)(), lambda module, path: path == "1")
        return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    (eager, theirs), (model, ours) = make(), make()
    assert type(model[1].weight) is not nn.Parameter
    step = tb.compile_step(model, cross_entropy, ours, memory="keep")
    for _ in range(4):
        x, y = torch.randn(8, 16), torch.randint(4, (8,))
        theirs.zero_grad()
        loss = cross_entropy(eager, x, y)
        loss.backward()
        theirs.step()
        assert torch.equal(step(x, y), loss)
    assert torch.equal(eager[0].weight, model[0].weight)
