"""A part of benchmarks/op_samples.py: PyTorch's own samples of operators and of modules, in both modes."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from pairwise import quick_ones
from takeback.compiler.run import kernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOME = {
    "quick": (
        *("add", "exp", "where", "cat", "gather", "sum", "logsumexp", "softmax", "mm", "linalg.vector_norm"),
        *("nn.functional.layer_norm", "nn.functional.instance_norm", "nn.functional.cross_entropy"),
    ),
    "more": (
        *(
            "mul",
            "tanh",
            "clamp",
            "stack",
            "flip",
            "roll",
            "index_select",
            "tril",
            "mean",
            "amax",
            "var",
            "log_softmax",
        ),
        *("nn.functional.batch_norm", "nn.functional.group_norm", "nn.functional.gelu", "nn.functional.embedding"),
    ),
}


@pytest.mark.usefixtures("one_thread", "short_search")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("some", quick_ones(SOME, ("quick",)))
def test_samples_of_operators_are_near_eager(monkeypatch: pytest.MonkeyPatch, some: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    op_samples = importlib.import_module("op_samples")
    monkeypatch.setattr(kernels, "compile_cluster", op_samples.not_compiled)
    known = {op.name: op for op in op_samples.differentiable()}
    how = op_samples.How("fast", "min", "early", poison=True)
    rows = [
        op_samples.outcome(subject, how) for name in SOME[some] for subject in op_samples.subjects_of_op(known[name], 1)
    ]
    assert len(rows) == len(SOME[some])
    assert [row for row in rows if row.outcome not in ("equal", "near")] == []
    assert sum(row.outcome == "equal" for row in rows) > len(rows) // 2
    assert all(row.replays >= 2 for row in rows)


@pytest.mark.usefixtures("one_thread", "short_search")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory", ["auto", "min"])
def test_samples_of_operators_are_equal_to_eager(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    op_samples = importlib.import_module("op_samples")
    names = ("cumsum", "index_put", "var", "matmul", "nn.functional.dropout", "nn.functional.conv2d")
    known = {op.name: op for op in op_samples.differentiable()}
    how = op_samples.How("exact", memory, "end" if memory == "auto" else "early", poison=memory == "min")
    rows = [op_samples.outcome(subject, how) for name in names for subject in op_samples.subjects_of_op(known[name], 1)]
    assert len(rows) == len(names)
    assert [row for row in rows if row.outcome != "equal"] == []
    assert all(row.replays >= 2 for row in rows)


MODULES = {
    "quick": ("nn.BatchNorm1d", "nn.GRU", "nn.LazyConv1d"),
    "more": ("nn.MultiheadAttention", "nn.TransformerEncoderLayer", "nn.Embedding", "nn.BCELoss", "nn.RReLU"),
}


@pytest.mark.usefixtures("one_thread", "short_search")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("some", quick_ones(MODULES, ("quick",)))
def test_samples_of_modules_are_equal_to_eager(monkeypatch: pytest.MonkeyPatch, some: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    op_samples = importlib.import_module("op_samples")
    infos = [info for info in op_samples.modules() if info.name in MODULES[some]]
    how = op_samples.How("exact", "min", "early", poison=True)
    subjects = [subject for info in infos for subject in op_samples.subjects_of_module(info, 2)]
    rows = [op_samples.outcome(subject, how) for subject in subjects]
    assert len(rows) >= len(infos) >= 3
    assert [row for row in rows if row.outcome != "equal"] == []
    assert all(row.replays >= 2 for row in rows)


@pytest.mark.usefixtures("one_thread", "short_search")
@pytest.mark.filterwarnings("ignore")
def test_samples_of_modules_are_near_eager_in_mode_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    op_samples = importlib.import_module("op_samples")
    monkeypatch.setattr(kernels, "compile_cluster", op_samples.not_compiled)
    names = ("nn.BatchNorm1d", "nn.LayerNorm", "nn.Softplus", "nn.LSTMCell", "nn.CrossEntropyLoss")
    infos = [info for info in op_samples.modules() if info.name in names]
    how = op_samples.How("fast", "min", "early", poison=True)
    rows = [op_samples.outcome(subject, how) for info in infos for subject in op_samples.subjects_of_module(info, 1)]
    assert len(rows) >= len(infos) == len(names)
    assert [row for row in rows if row.outcome not in ("equal", "near")] == []
    assert all(row.replays >= 2 for row in rows)


def test_samples_vary_in_whole_numbers_and_every_floating_point_operand_has_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    op_samples = importlib.import_module("op_samples")
    known = {op.name: op for op in op_samples.differentiable()}

    def subject(name: str, number: int = 0) -> Any:
        return list(op_samples.subjects_of_op(known[name], number + 1))[number]

    gather = next(s for s in op_samples.subjects_of_op(known["gather"], 3) if s.turned)
    [(place, _)] = gather.turned.items()
    values = [gather.batch(i)[place] for i in range(4)]
    assert not torch.equal(values[0], values[1])
    assert all(torch.equal(values[0].flatten().sort().values, other.flatten().sort().values) for other in values)
    assert len(subject("mm").build().weights) == 2
    assert len(subject("nn.functional.layer_norm").build().weights) == 3
    norm = subject("nn.functional.batch_norm")
    floats = sum(t.is_floating_point() for t in norm.tensors)
    assert 1 <= len(norm.build().weights) < floats, "running statistics take no gradient"


@pytest.mark.usefixtures("one_thread", "short_search")
@pytest.mark.filterwarnings("ignore")
def test_index_that_is_frozen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the samples are for: a replay that takes the recorded values of an index."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    op_samples, sample_steps = map(importlib.import_module, ("op_samples", "sample_steps"))
    known = {op.name: op for op in op_samples.differentiable()}
    gather = next(s for s in op_samples.subjects_of_op(known["gather"], 3) if s.turned)
    how = op_samples.How("exact", "auto")
    assert op_samples.outcome(gather, how).outcome == "equal"
    real = sample_steps.compiled

    def frozen(subject: Any, how: Any) -> Any:
        return real(dataclasses.replace(subject, turned={}), how)

    monkeypatch.setattr(sample_steps, "compiled", frozen)
    assert op_samples.outcome(gather, how).outcome == "wrong"
    monkeypatch.setattr(sample_steps, "compiled", real)
    monkeypatch.setattr(sample_steps, "LEAST_REPLAYS", 9)
    row = op_samples.outcome(gather, how)
    assert (row.outcome, row.reason) == ("refused", sample_steps.FEW_REPLAYS)


def test_parts_of_several_processes_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    op_samples = importlib.import_module("op_samples")

    assert "nn.functional.pad.constant" in map(op_samples.named, op_samples.differentiable())
    assert all("variant" not in op_samples.named(module) for module in op_samples.modules())

    def part(op: str, sample: int, **other: Any) -> dict[str, Any]:
        row = {"op": op, "sample": sample, "outcome": "refused", "reason": "because"}
        found = {
            "how": {"mode": "fast"},
            "subjects": 2,
            "counts": {"equal": 3, "refused": 1},
            "operands": {"floating-point operands": 5},
            "least replays": 3,
            "kernels": {"generated": 4, "given up": 0},
            "rows": [row],
        }
        return found | other

    found = op_samples.merged([part("b", 1), part("a", 0, **{"least replays": 2})], ["a", "b"])
    assert found == {
        "how": {"mode": "fast"},
        "subjects": 4,
        "counts": {"equal": 6, "refused": 2},
        "operands": {"floating-point operands": 10},
        "kernels": {"generated": 8, "given up": 0},
        "least replays": 2,
        "rows": [
            {"op": "a", "sample": 0, "outcome": "refused", "reason": "because"},
            {"op": "b", "sample": 1, "outcome": "refused", "reason": "because"},
        ],
    }
