"""Mixed precision, averages and optimizers as people put them together by hand: each has eager's bits.

Autocast with and without a scaler are in test_scaler.py and test_whole_autocast.py, pure half precision in
test_equivalence.py, the frameworks' own scalers in tests/integrations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import mlp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train_twice import Training, assert_equal_trainings, batch, simple

import takeback as tb

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


class MasterWeights(torch.optim.Optimizer):
    """Float32 copies of bfloat16 parameters: updated by an optimizer of their own, and rounded back."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.masters = {p: p.detach().float().clone() for group in self.param_groups for p in group["params"]}
        self.inner = torch.optim.AdamW(list(self.masters.values()), lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, master in self.masters.items():
            master.grad = p.grad.float() if p.grad is not None else None
            self.state[p]["master"] = master
        self.inner.step()
        for p, master in self.masters.items():
            p.copy_(master)


class EightBit(torch.optim.Optimizer):
    """Momentum in int8, with one scale for each row of 16: as 8-bit optimizers keep their state."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, rows = self.state[p], -(-p.numel() // 16)
                if not state:
                    state["codes"], state["scales"] = torch.zeros(rows, 16, dtype=torch.int8), torch.zeros(rows, 1)
                flat = state["codes"].float() * state["scales"]
                momentum = flat.flatten()[: p.numel()].view_as(p).mul_(0.9).add_(p.grad)
                p.add_(momentum, alpha=-group["lr"])
                flat.flatten()[: p.numel()].copy_(momentum.flatten())
                state["scales"].copy_(flat.abs().amax(1, keepdim=True) / 127)
                state["codes"].copy_((flat / state["scales"].clamp_min(1e-12)).round())


@pytest.mark.parametrize("kind", [MasterWeights, EightBit])
def test_optimizers_of_ones_own_are_stepped_and_said(kind: Any) -> None:
    def make(compiled: bool) -> Training:
        model = mlp(dropout=0.1)
        if kind is MasterWeights:
            model.bfloat16()
        return simple(model, cross_entropy, kind(model.parameters(), lr=1e-2), compiled, clip_norm=0.5)

    done = assert_equal_trainings(make)
    assert done.optimizers[0].state
    [note] = [n for n in done.compiled[0].report().notes if "not part of the plan" in n]
    assert f"{kind.__name__}'s own step() is called" in note


def test_pure_bfloat16_with_an_average_beside_it() -> None:
    """The average is kept after each step, as an EMA callback keeps it, and used in an evaluation between."""

    def make(compiled: bool) -> Training:
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        training = simple(
            model, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2), compiled, others=[average]
        )
        usual = training.step

        def step(i: int) -> Any:
            loss = usual(i)
            average.update_parameters(model)
            average.eval()
            with torch.no_grad():
                assert cross_entropy(average, *batch(i)).isfinite()
            return loss

        training.step = step
        return training

    assert_equal_trainings(make)


class Adapted(nn.Module):
    """A frozen layer with a low-rank path beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + self.up(self.down(x)))


def test_a_frozen_base_has_no_gradient_memory_and_the_report_says_so() -> None:
    model = nn.Sequential(*(Adapted(256, 4) for _ in range(3)))
    trained = [p for p in model.parameters() if p.requires_grad]
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), torch.optim.AdamW(trained), memory="keep")
    for _ in range(3):
        step(torch.randn(4, 256))
    report = step.report()
    gradients, base = sum(p.nbytes for p in trained), sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    [note] = [n for n in report.notes if "frozen" in n]
    assert note.startswith(f"gradients take {gradients / 2**20:.2f} MiB: 6 of 12 parameters have one")
    assert f"the 6 that are frozen ({base / 2**20:.2f} MiB) have none" in note
    assert max(entry.size_bytes for entry in report.ledger) < 256 * 256 * 4  # a base layer's weight
    assert report.peak_bytes - report.resident_bytes < base / 3
    whole = nn.Sequential(*(Adapted(256, 4).requires_grad_(True) for _ in range(3)))
    other = tb.compile_step(whole, lambda m, x: m(x).square().mean(), torch.optim.AdamW(whole.parameters()))
    other(torch.randn(4, 256))
    assert not [n for n in other.report().notes if "frozen" in n]
    assert other.report().peak_bytes - other.report().resident_bytes > base / 3
