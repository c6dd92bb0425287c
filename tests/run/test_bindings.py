"""Which Python function replays an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import takeback.nn  # registers torch.ops.takeback
from operators import COMPLEX, FLOATS, WHOLE, calls, copied, operators, same_numbers
from takeback.compiler.run.bindings import fastest

assert takeback.nn


def test_torchs_binding_is_used_for_torchs_own_ops() -> None:
    assert fastest(torch.ops.aten.mm.default) is torch.mm


def test_an_op_of_another_namespace_is_not_taken_for_its_namesake_in_torch() -> None:
    operator = torch.ops.takeback.rms_norm.default
    assert fastest(operator) is operator._op


def _is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Or the in-place form of one that is."""
    if torch.Tag.nondeterministic_seeded in op.tags or any(a.is_out for a in op._schema.arguments):
        return False
    functional = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
    overload = getattr(functional, op._schema.overload_name or "default", None)
    return torch.Tag.pointwise in (*op.tags, *getattr(overload, "tags", ()))


def _outcome(function: Callable[..., Any], args: list[object], named: dict[str, object]) -> list[object]:
    given = [copied(a) if isinstance(a, torch.Tensor) else a for a in args]
    out = function(*given, **named)
    return [*out] if isinstance(out, tuple | list) else [out]


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same_numbers(a, b)
    return a == b


@pytest.mark.filterwarnings("ignore")
def test_bindings_of_pointwise_ops_and_of_their_forms_in_place_give_the_bits_of_the_overload() -> None:
    tried, wrong = 0, set()
    for op in filter(_is_pointwise, operators()):
        binding = fastest(op)
        if binding is op._op:
            continue
        for dtype in (*FLOATS, *COMPLEX, *WHOLE):
            for args, named in calls(op, dtype, tails=(12,), tails_of_rows=(4,)):
                try:
                    expected = _outcome(op, args, named)
                except (RuntimeError, IndexError, TypeError):
                    continue  # not for this dtype, or with other arguments
                tried += 1
                if not all(map(_same, _outcome(binding, args, named), expected)):
                    wrong.add(f"{op} of {dtype}")
    assert not wrong, sorted(wrong)
    assert tried > 5000
