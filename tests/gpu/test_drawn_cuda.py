"""Functions that draw from numpy's global generator, in steps on a GPU: their masks are made on the host and copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def mask_of(shape: tuple[int, int], part: float) -> np.ndarray[Any, Any]:
    return np.random.rand(*shape) < part


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.row = nn.Linear(16, 16), nn.Linear(16, 4), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[torch.tensor(mask_of((x.shape[0], x.shape[1]), 0.3), device=x.device, dtype=torch.bool)] = self.row
        return self.last(x.tanh()).mean(1)


def trained(compiled: bool, **settings: Any) -> tuple[list[float], float]:
    torch.manual_seed(0)
    model = Masked().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y)

    step = tb.compile_step(model, loss_fn, optimizer, **settings) if compiled else None
    np.random.seed(7)
    losses = []
    for i in range(8):
        g = torch.Generator().manual_seed(i)
        x, y = torch.randn(6, 5, 16, generator=g).cuda(), torch.randint(4, (6,), generator=g).cuda()
        if step is not None:
            losses.append(float(step(x, y)))
        else:
            optimizer.zero_grad()
            loss = loss_fn(model, x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if step is not None:
        assert len(step._plans) == 1
    return losses, float(np.random.rand())


@pytest.mark.parametrize("settings", [{"mode": "fast"}, {"mode": "fast", "graphs": "auto"}], ids=["", "graphs"])
def test_masks_on_a_gpu_are_eagers_from_one_plan(settings: dict[str, Any]) -> None:
    (ours, after), (eagers, stands) = trained(True, **settings), trained(False)
    assert ours == pytest.approx(eagers, rel=1e-3)
    assert after == stands
