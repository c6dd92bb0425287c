"""Bundles on a GPU: torch's kernels for lists have the bits of eager's casts, in few launches, in a graph as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.ownership.lists import list_form_of
from takeback.compiler.program import Cluster, Op
from takeback.compiler.run.cuda_graph import CAPTURED
from takeback.compiler.run.kernels import Kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HALF = torch.bfloat16


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(norm(layer(x)))
        return x


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", HALF):
        return model(x).float().square().mean()


def batch(i: int) -> Tensor:
    return torch.randn(4096, 64, generator=torch.Generator().manual_seed(i)).cuda()


def bundles(step: tb.CompiledStep) -> list[Op]:
    assert step._last is not None
    ops = step._last.executor.program.ops
    return [op for op in ops if isinstance(op.target, Cluster) and list_form_of(op.target) is not None]


@pytest.mark.parametrize(("given", "made"), [(torch.float32, HALF), (HALF, torch.float32)])
def test_lists_are_cast_with_eagers_bits(given: torch.dtype, made: torch.dtype) -> None:
    """More than one launch takes, of several geometries."""
    torch.manual_seed(0)
    hard = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, 1e-40, 1.00390625])
    tensors = [torch.randn(3 + i, 5, device="cuda") for i in range(150)]
    tensors += [torch.randn(5, 70000, device="cuda").t(), hard.cuda()]
    tensors.append(torch.randn(2, 8, 9, 9, device="cuda").to(memory_format=torch.channels_last))
    tensors = [t.to(given) for t in tensors]
    results = [torch.empty_like(t, dtype=made) for t in tensors]
    torch._foreach_copy_(results, tensors)
    whole = torch.int32 if made.itemsize == 4 else torch.int16
    for ours, plain in zip(results, tensors, strict=True):
        assert torch.equal(ours.view(whole), plain.to(made).view(whole))


@pytest.mark.parametrize("settings", [{}, {"graphs": "always"}, {"memory": "keep", "poison": True}])
def test_a_step_with_bundles_follows_eager(settings: dict[str, Any]) -> None:
    model = Chain().cuda()
    twin = copy.deepcopy(model)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.01), mode="fast", **settings)
    plain = torch.optim.SGD(twin.parameters(), 0.01)
    for i in range(12):
        loss = loss_fn(twin, batch(i))
        torch.testing.assert_close(step(batch(i)), loss.detach(), rtol=2e-2, atol=2e-2)
        loss.backward()
        plain.step()
        plain.zero_grad()
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [12] * 8  # type: ignore[arg-type]
    forms = {str(list_form_of(op.target)) for op in bundles(step) if isinstance(op.target, Cluster)}
    assert "+= 1" in forms
    assert "float32 to bfloat16" in forms
    assert step._last is not None
    if settings.get("graphs"):
        assert step._last.executor.graph == CAPTURED
    assert sum(kernel.is_for_lists for kernel in step.report().kernels) == len({op.target.key for op in bundles(step)})


def test_with_eagers_kernels_for_the_rest_the_bits_are_those_without_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    from takeback.compiler.passes import bundle as module

    monkeypatch.setattr(Kernels, "compile_", lambda self, program, tell: None)

    def trained(least: int) -> list[Tensor]:
        monkeypatch.setattr(module, "LEAST", least)
        model = Chain().cuda()
        step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.01), mode="fast", memory="keep")
        for i in range(4):
            step(batch(i))
        assert bool(bundles(step)) is (least < 1000)
        return list(model.state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(trained(4), trained(1000), strict=True))
