"""takeback.nn on every hazard on a GPU, with two streams; and that those hazards expose an op that overwrites."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "hazards"))  # the suite is shared with the CPU's tests

from hazard_saboteurs import SABOTEURS
from subjects import OURS, failures

from takeback.hazards import HAZARDS, OpUnderTest, Verdict, judge, run, run_ddp
from takeback.nn import streams

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

STREAMS = [each for each in HAZARDS if each.name.startswith("two streams")]
COMPILED = [each for each in HAZARDS if each.name.startswith("torch.compile")]
HALF = [each for each in OURS if "4d" in each.name or "(" in each.name or each.name.startswith("InPlaceR")]


@pytest.fixture(autouse=True)
def one_stream_so_far() -> None:
    """From the first side stream on, nothing is overwritten: each test begins as a program that has none."""
    streams.forget()


@pytest.mark.parametrize("subject", OURS, ids=lambda subject: subject.name)
def test_no_gradient_is_wrong(subject: OpUnderTest) -> None:
    assert failures(subject, run(subject, "cuda", quick=True)) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("subject", HALF, ids=lambda subject: subject.name)
def test_no_gradient_is_wrong_in_half_precision(subject: OpUnderTest, dtype: torch.dtype) -> None:
    low = replace(subject, dtype=dtype, tolerance={dtype: 0.3}, autocast=())  # what is overwritten is off by more
    assert failures(low, run(low, "cuda", quick=True)) == {}


@pytest.mark.parametrize("hazard", COMPILED, ids=lambda hazard: hazard.name)
@pytest.mark.parametrize("subject", OURS, ids=lambda subject: subject.name)
def test_no_gradient_is_wrong_when_compiled(subject: OpUnderTest, hazard: object) -> None:
    assert failures(subject, {"torch.compile": judge(hazard, subject, "cuda")}) == {}  # type: ignore[arg-type]


def test_no_gradient_is_wrong_in_two_processes() -> None:
    outcomes = run_ddp(OURS, "cuda")
    assert {name: str(outcome) for name, outcome in outcomes.items() if outcome.verdict is not Verdict.RIGHT} == {}


@pytest.mark.parametrize("hazard", STREAMS, ids=lambda hazard: hazard.name)
def test_streams_expose_an_op_that_overwrites(hazard: object) -> None:
    outcomes = {each.name: judge(hazard, each, "cuda") for each in SABOTEURS}  # type: ignore[arg-type]
    assert Verdict.WRONG in {outcome.verdict for outcome in outcomes.values()}, outcomes
