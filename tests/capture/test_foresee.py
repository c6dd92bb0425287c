"""The program that fake tensors show is compared with the recorded one op by op: what it has otherwise is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import takeback as tb
from takeback.compiler.capture.foresee import _first_unlike, _not_siblings
from takeback.compiler.program import Op, Program, Region


@pytest.fixture(scope="module")
def program() -> Program:
    model = nn.Linear(4, 4)
    step = tb.compile_step(
        model, lambda m, x: (m(x) * 3.0).relu().sum(), torch.optim.SGD(model.parameters(), lr=0.1), memory="keep"
    )
    step(torch.randn(8, 4))
    assert step._last is not None
    return step._last.original


def other_number(op: Op) -> Op:
    return replace(op, args=tuple(4.0 if arg == 3.0 else arg for arg in op.args))


def other_rows(op: Op) -> Op:
    def fewer(region: Region) -> Region:
        return replace(region, shape=(7, *region.shape[1:])) if region.shape == (8, 4) else region

    return op.map(reads=fewer, writes=fewer)


def changed(program: Program, change: object) -> Program:
    assert callable(change)
    return replace(program, ops=tuple(change(op) if op.name == "mul.Tensor" else op for op in program.ops))


def test_what_a_fake_program_has_otherwise_is_named(program: Program) -> None:
    assert _first_unlike(program, program) is None
    for change in (other_number, other_rows):
        assert "is given something else" in str(_first_unlike(program, changed(program, change)))
    assert "ops instead of" in str(_first_unlike(program, replace(program, ops=program.ops[:-1])))


def test_siblings_may_have_other_extents_and_numbers_and_no_other_ops(program: Program) -> None:
    for change in (other_number, other_rows):
        assert _not_siblings(program, changed(program, change)) is None
    swapped = changed(program, lambda op: replace(op, target=torch.ops.aten.add.Tensor))
    assert "add.Tensor" in str(_not_siblings(program, swapped))
    missing = changed(program, lambda op: replace(op, args=op.args[:1]))
    assert "is given something else" in str(_not_siblings(program, missing))
