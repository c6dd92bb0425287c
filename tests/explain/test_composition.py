"""The parts of the peak are named by module, and add up to it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reports import MIB, fixed_report, zoo_report
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.explain.composition import GAPS, MOST_PARTS, composition
from takeback.compiler.explain.ledger import ACTIVATION, BACKWARD, LOSS, Entry, Fate


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_parts_add_up_to_the_peak(name: str) -> None:
    report = zoo_report(name)
    parts = composition(report)
    assert sum(part.size_bytes for part in parts) == report.peak_bytes
    assert len(parts) <= MOST_PARTS + 6
    assert [p.kind for p in parts][:2] == [
        "parameters",
        "buffers of the model" if name == "resnet" else "optimizer state",
    ]
    gaps = sum(part.size_bytes for part in parts if part.kind == GAPS)
    assert gaps < 0.02 * report.peak_bytes


def test_copies_of_a_layer_are_one_part_and_a_line_outside_of_modules_is_named() -> None:
    names = {part.name for part in composition(zoo_report("gpt"))}
    assert "blocks.*.attention.qkv" in names
    assert any(name.startswith("gpt.py:") for name in names)
    assert not any(".0." in name or ".1." in name for name in names)


class Scored(nn.Module):
    """Has a value of its own before its last layer, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x) * 2.0) * 3.0
        return out


def test_loss_is_what_is_made_behind_the_last_layer_and_what_it_gives_to_the_backward() -> None:
    model = Scored()
    step = tb.compile_step(
        model, lambda m, x: m(x).exp().mean(), torch.optim.SGD(model.parameters(), lr=0.1), memory="keep"
    )
    step(torch.randn(3, 4))
    entries = [e for e in step.report().ledger if e.part in (ACTIVATION, BACKWARD, LOSS)]
    parts = {(e.op, e.module): e.part for e in entries}
    assert parts["addmm", "head"] == ACTIVATION
    assert parts["exp", ""] == parts["mean", ""] == LOSS
    made = [e.part for e in entries if e.op == "mul.Tensor"]
    # Before the last layer and behind it; then the gradients of exp, of what is behind it, and of what is before it.
    assert made == [ACTIVATION, LOSS, LOSS, LOSS, BACKWARD]


def test_what_is_small_goes_together_by_kind() -> None:
    entries = tuple(
        Entry(f"%{i}", MIB >> i, Fate.PLACED, "mm", "", "", i * MIB, 0, 3, f"%{i}", f"layer{i}.x", "activation")
        for i in range(MOST_PARTS + 5)
    )
    report = dataclasses.replace(
        fixed_report(), ledger=entries, peak_bytes=4 * MIB + sum(e.size_bytes for e in entries)
    )
    parts = composition(report)
    assert sum(p.size_bytes for p in parts) == report.peak_bytes
    assert parts[-1].label == "activations: elsewhere"
    assert parts[-1].count == 7


class Twice(nn.Module):
    """Calls a module twice, one inside of another, and computes by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.inner(x)) * 2.0
        out: Tensor = self.head(x)
        return out


def test_every_op_knows_its_module_in_forward_and_backward() -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), optimizer, memory="keep")
    step(torch.randn(3, 4))
    assert step._last is not None
    found = [(op.phase.name, op.name, op.site.module) for op in step._last.recorded.ops if op.site is not None]
    assert found.count(("FORWARD", "addmm", "inner.0")) == 2
    assert found.count(("FORWARD", "tanh", "inner.1")) == 2
    assert found.count(("BACKWARD", "tanh_backward", "inner.1")) == 2
    assert ("FORWARD", "addmm", "head") in found
    assert ("FORWARD", "mul.Tensor", "") in found, "the model's own line"
    assert ("FORWARD", "mean", "") in found, "loss_fn's"
