"""A model on a GPU is refused plainly: mode "exact" runs on the CPU in this version; nothing is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import takeback as tb
from takeback.errors import CaptureError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_model_on_the_gpu_is_refused_with_the_reason() -> None:
    model = nn.Linear(4, 4).cuda()
    with pytest.raises(CaptureError, match="runs on the CPU in this version; the model is on cuda:0"):
        tb.compile_step(model, _loss, torch.optim.SGD(model.parameters()))


def test_model_on_cpu_and_gpu_is_refused_by_name_of_the_devices() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).cuda())
    with pytest.raises(CaptureError, match=r"more than one device \(cpu, cuda:0\)"):
        tb.compile_step(model, _loss, torch.optim.SGD(model.parameters()))


def test_batch_on_the_gpu_is_refused_and_the_model_is_unchanged() -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    step = tb.compile_step(model, _loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match="tensor 0 of the batch is on cuda:0, the model on cpu"):
        step(torch.randn(2, 4, device="cuda"))
    assert torch.equal(model.weight, before)
