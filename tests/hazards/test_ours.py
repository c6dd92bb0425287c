"""takeback.nn on every hazard: 0 wrong gradients, errors only where torch's own in-place ops raise too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hazard_saboteurs import OverwritesGradient, Plain
from subjects import OURS, failures

from takeback.hazards import HAZARDS, OpUnderTest, Trial, Verdict, judge, run, run_ddp
from takeback.hazards.gradients import plain_chain, residual, sum_backward

BY_NAME = {each.name: each for each in HAZARDS}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("subject", OURS, ids=lambda subject: subject.name)
def test_no_gradient_is_wrong(subject: OpUnderTest) -> None:
    assert failures(subject, run(subject, quick=True)) == {}


@pytest.mark.parametrize(
    "subject", [pytest.param(s, marks=() if i % 3 == 0 else pytest.mark.slow, id=s.name) for i, s in enumerate(OURS)]
)
def test_no_gradient_is_wrong_when_compiled(subject: OpUnderTest) -> None:
    assert failures(subject, {"torch.compile": judge(BY_NAME["torch.compile, aot_eager"], subject, "cpu")}) == {}


@pytest.mark.parametrize("name", ["InPlaceABN, leaky_relu, 4d", "InPlaceRMSNorm", "SwiGLU(gate, up)"])
def test_no_gradient_is_wrong_when_compiled_with_inductor(name: str) -> None:
    subject = next(each for each in OURS if each.name == name)
    assert failures(subject, {"torch.compile": judge(BY_NAME["torch.compile, inductor"], subject, "cpu")}) == {}


def test_no_gradient_is_wrong_in_two_processes_where_a_saboteurs_is() -> None:
    broken, plain = OpUnderTest("broken", OverwritesGradient, Plain), OpUnderTest("plain", Plain, Plain)
    outcomes = run_ddp([*OURS, broken, plain])
    assert outcomes.pop("broken").verdict is Verdict.WRONG
    assert {name: str(outcome) for name, outcome in outcomes.items() if outcome.verdict is not Verdict.RIGHT} == {}


@pytest.mark.parametrize("graph", [plain_chain, residual, sum_backward], ids=lambda graph: graph.__name__)
@pytest.mark.parametrize("subject", [each for each in OURS if each.name != "inplace_abn"], ids=lambda each: each.name)
def test_hazards_leave_room_to_overwrite(subject: OpUnderTest, graph: object) -> None:
    """The suite shows something only if the layers do overwrite where they may."""
    trial = Trial(subject, torch.device("cpu"), plain=False)
    if graph is residual and trial.output_shape != subject.shapes[0]:
        pytest.skip("input and output have different shapes")
    graph(trial)  # type: ignore[operator]
    assert dict(trial.module().copies) == {}  # type: ignore[arg-type]
