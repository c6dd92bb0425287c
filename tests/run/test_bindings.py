"""Which Python function replays an op."""

from __future__ import annotations

import torch

import takeback.nn  # registers torch.ops.takeback
from takeback.compiler.run.bindings import fastest

assert takeback.nn


def test_torchs_binding_is_used_for_torchs_own_ops() -> None:
    assert fastest(torch.ops.aten.mm.default) is torch.mm


def test_an_op_of_another_namespace_is_not_taken_for_its_namesake_in_torch() -> None:
    operator = torch.ops.takeback.rms_norm.default
    assert fastest(operator) is operator._op
