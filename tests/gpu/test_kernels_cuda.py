"""Generated kernels on a GPU: compiled by many workers at once, found by the next process, and one for many lengths."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.run import inductor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(512, 256), nn.LayerNorm(256)
        self.attend = nn.MultiheadAttention(256, 4, batch_first=True)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 512)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return self.down(F.gelu(self.up(x)))


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batch(length: int) -> Tensor:
    return torch.randint(0, 512, (16, length), generator=torch.Generator().manual_seed(length)).cuda()


def trained(lengths: tuple[int, ...], **options: int) -> tb.CompiledStep:
    """Beside eager."""
    model = Tagger().cuda()
    twin = copy.deepcopy(model)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), mode="fast", **options)
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    for length in lengths:
        loss = loss_fn(twin, batch(length))
        torch.testing.assert_close(step(batch(length)), loss.detach(), rtol=1e-3, atol=1e-3)
        loss.backward()
        plain.step()
        plain.zero_grad()
    return step


def notes(step: tb.CompiledStep) -> list[list[str]]:
    programs = [(plan.executor.kernels, plan.executor.program) for plan in step._plans]
    return [[k.note for k in kernels.in_program(program) if k.note is not None] for kernels, program in programs]


def found_again() -> None:
    """In a process that has compiled nothing."""
    with mock.patch.object(inductor, "trace_cluster", side_effect=AssertionError("it is traced")):
        assert notes(trained((64,) * 4)) == [[]]


def test_kernels_are_generated_and_found_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert notes(trained((64,) * 4)) == [[]]
    child = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    child += "import test_kernels_cuda; test_kernels_cuda.found_again()"
    out = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


@pytest.mark.usefixtures("kernels_for_all_lengths", "whole_head")
def test_one_kernel_serves_lengths_that_had_no_part_in_it() -> None:
    step = trained((128, 64, 96, 64, 96, 64, 96, 80, 80, 80, 112, 112, 112, 128, 128), max_plans=8)
    assert len(step._plans) == 5
    assert notes(step) == [[]] * 5
