"""Ordinary training raises no alarm, and has the same bits and the same in-place decisions as without the guard."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import honest
import pytest
import torch
from honest import CASES, Numbers, Owner

import takeback as tb
from pairwise import in_turns


def numbers(case: Callable[[], Numbers]) -> tuple[Numbers, int, int]:
    torch.manual_seed(1)
    Owner.in_place = Owner.copied = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about prototypes
        found = case()
    return found, Owner.in_place, Owner.copied


@pytest.mark.parametrize(
    ("case", "every_node"), in_turns(CASES, [False, True]), ids=lambda v: getattr(v, "__name__", v)
)
def test_no_alarm_and_the_same_bits(case: Callable[[], Numbers], every_node: bool) -> None:
    if every_node and case is honest.zoo_models:
        pytest.skip("every node of every model takes long")
    plain = numbers(case)
    with tb.guard(every_node=every_node) as g:
        guarded = numbers(case)
    assert len(plain[0]) == len(guarded[0]) > 0
    for a, b in zip(plain[0], guarded[0], strict=True):
        assert torch.equal(a, b)
    assert plain[1:] == guarded[1:]
    assert g.errors == []
    assert g.report()["backwards"] > 0
    strange = [reason for reason in g.skipped if "cannot be read" in reason]
    assert strange == []


def test_some_cases_do_overwrite() -> None:
    assert sum(numbers(case)[1] for case in (honest.mlp, honest.residual, honest.cnn)) > 3
