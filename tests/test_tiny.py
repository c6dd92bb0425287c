"""Read this first: a small network, compiled, trains exactly as it does in eager, in one allocation per step."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_compiled_step_trains_like_eager_with_one_allocation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    twin = copy.deepcopy(model)  # the same network, trained in plain eager below
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)

    step = tb.compile_step(model, loss_fn, optimizer)

    for _ in range(5):
        x, y = torch.randn(16, 32), torch.randint(10, (16,))
        loss = step(x, y)  # forward, backward, update

        expected = loss_fn(twin, x, y)
        expected.backward()
        twin_optimizer.step()
        twin_optimizer.zero_grad()

        assert torch.equal(loss, expected.detach())

    for ours, eagers in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, eagers)
        assert ours.grad is None  # gradients live inside the step; keep_grads=True leaves them here

    report = step.report()
    assert report.peak_bytes <= report.eager_peak_bytes
    if report.placed:  # there is a C++ compiler, so takeback has its allocator
        assert report.allocations_per_step == 1  # the loss, which is the caller's to keep
