"""A part of benchmarks/op_samples.py: PyTorch's own samples of operators and of modules, in both modes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

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
