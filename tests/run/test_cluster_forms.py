"""How a cluster is traced for Inductor: the same numbers as its ops, without what is as large as the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import takeback as tb
from takeback.compiler.program import Cluster
from takeback.compiler.run.cluster_forms import forms, read_inside, traced
from takeback.compiler.run.cluster_ops import plainly, run_ops

ROWS, CLASSES = 6, 5
WEIGHT = torch.linspace(0.5, 1.5, CLASSES)
LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "each row by itself": {"reduction": "none"},
    "weighted": {"weight": WEIGHT},
    "weighted sum": {"weight": WEIGHT, "reduction": "sum"},
    "ignored": {"ignore_index": 2},
}


def cluster_of(kwargs: dict[str, Any]) -> Cluster:
    model = nn.Linear(4, CLASSES)

    def loss_fn(m: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return (F.cross_entropy(m(x), target, **kwargs) * 3).mean()

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), mode="fast", memory="keep")
    for _ in range(3):
        step(torch.randn(ROWS, 4), torch.arange(ROWS) % CLASSES)
    assert step._last is not None
    clusters = [op.target for op in step._last.executor.program.ops if isinstance(op.target, Cluster)]
    [found] = [c for c in clusters if any(op.name == "_log_softmax_backward_data" for op in c.ops)]
    return found


@pytest.mark.usefixtures("eagers_kernels", "whole_head")
@pytest.mark.parametrize("kind", LOSSES)
def test_cross_entropys_gradient_is_eagers_without_a_sum_over_rows(kind: str) -> None:
    cluster = cluster_of(LOSSES[kind])
    torch.manual_seed(0)
    operands = []
    for r in cluster.inputs:
        target = r.dtype == torch.long
        operands.append(torch.arange(ROWS) % CLASSES if target else torch.rand(r.shape) + 0.5)
    expected = run_ops(cluster, [t.clone() for t in operands], plainly)
    found = run_ops(cluster, [t.clone() for t in operands], forms(cluster))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

    def compute(*given: Tensor) -> list[Tensor]:
        return run_ops(cluster, given, forms(cluster))

    traced = make_fx(compute)(*operands)
    names = [str(node.target) for node in traced.graph.nodes]
    assert not any("scatter" in name or "_log_softmax_backward_data" in name for name in names)
    assert "aten._log_softmax.default" in names, "what is not told of keeps its own form"


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return x


@pytest.mark.usefixtures("eagers_kernels")
def test_activation_that_a_norms_backward_gives_and_reads_is_traced_twice() -> None:
    """Else Inductor writes it first, and reads it twice."""
    model = Norms()
    step = tb.compile_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), mode="fast"
    )
    for _ in range(3):
        step(torch.randn(4, 4, 8, 8))
    assert step._last is not None
    clusters = [op.target for op in step._last.executor.program.ops if isinstance(op.target, Cluster)]
    found = [cluster for cluster in clusters if read_inside(cluster)]
    assert found
    for cluster in found:
        operands = [torch.rand(r.shape) + 0.5 for r in cluster.inputs]

        def compute(*given: Tensor, cluster: Cluster = cluster) -> list[Tensor]:
            return traced(cluster, given)

        for ours, theirs in zip(compute(*operands), run_ops(cluster, operands, plainly), strict=True):
            torch.testing.assert_close(ours, theirs)
        output = make_fx(compute)(*operands).graph.output_node()
        for number in read_inside(cluster):
            assert list(output.args[0][number].users) == [output]  # type: ignore[index, union-attr]
