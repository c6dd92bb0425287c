"""What each pass did, as text: the recorded program, every stage by name, what changed, and why nothing did."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from takeback.cli import app
from takeback.compiler.explain.passes import PassRecord, passes_text
from takeback.compiler.passes import PIPELINE
from takeback.predict import passes


@pytest.fixture(scope="module")
def records() -> tuple[PassRecord, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    found = passes(model, lambda m, x: m(x).clone().square().mean(), optimizer, torch.randn(32, 8), memory="keep")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), "nothing is run"
    return found


def numbered(name: str, said: str) -> str:
    position = [stage.name for stage in PIPELINE].index(name)
    return f"{position + 1}. {name}: {said}"


def test_every_stage_of_the_pipeline_is_recorded_in_order(records: tuple[PassRecord, ...]) -> None:
    assert [r.name for r in records] == [stage.name for stage in PIPELINE]
    drafts = [r for r in records if not isinstance(r.after, str)]
    for one, other in itertools.pairwise(drafts):
        assert one.after is other.before


def test_changes_are_lines_that_go_and_come(records: tuple[PassRecord, ...]) -> None:
    lines = list(passes_text(records))
    start = next(i for i, line in enumerate(lines) if line.startswith("2. functionalize"))
    assert any("- " in line and "relu_" in line and "writes" in line for line in lines[start : start + 6])
    assert any("+ " in line and " = relu(" in line for line in lines[start : start + 6])
    [moved] = [line for line in lines if line.startswith("3. move")]
    gone = [line for line in lines[lines.index(moved) :] if line.startswith("   - ") and "clone" in line]
    assert gone
    assert numbered("reduce", "nothing to do (there is no group to average over)") in lines
    assert numbered("recompute", "nothing to do (memory='keep': nothing is computed twice)") in lines
    assert numbered("fuse", "nothing to do (mode='exact': every op runs with eager's kernel)") in lines
    assert any(line.startswith("   + %") and "takes the bytes of %" in line for line in lines)
    assert any(line.startswith("   refused: overwrite") for line in lines)


def test_whole_prints_the_program_after_each_pass(records: tuple[PassRecord, ...]) -> None:
    changed, whole = list(passes_text(records)), list(passes_text(records, whole=True))
    assert len(whole) > 2 * len(changed)
    recorded = str(records[0].before.program).splitlines()
    assert whole[1 : 1 + len(recorded)] == changed[1 : 1 + len(recorded)] == recorded


def test_command_prints_it_and_refuses_what_does_not_go_together() -> None:
    run = CliRunner().invoke
    shown = run(app, ["explain", "mlp", "--passes", "--memory", "keep"])
    assert shown.exit_code == 0
    assert "the recorded step: " in shown.stdout
    assert numbered("pack", "") in shown.stdout
    assert run(app, ["explain", "mlp", "--whole"]).exit_code == 2
    assert run(app, ["explain", "mlp", "--passes", "--frontier"]).exit_code == 2
