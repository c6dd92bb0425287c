"""What users see of mode fast: the kernels of a report, what stayed out of them, the mode; in the text, the page, the
data and on the command line. Nothing is compiled here: eager's kernels stand in for generated ones.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from reports import MIB, fixed_report, with_kernels
from torch import Tensor, nn
from typer.testing import CliRunner

import takeback as tb
from takeback.cli import app
from takeback.compiler.explain.composition import composition
from takeback.compiler.explain.html import as_html
from takeback.compiler.explain.kernels import KernelAccount
from takeback.compiler.explain.ledger import Fate
from takeback.compiler.explain.memory_viz import as_snapshot
from takeback.compiler.explain.passes import passes_text
from takeback.compiler.explain.report import Report, title_of
from takeback.compiler.explain.text import copy_groups, refusal_groups
from takeback.compiler.program import Cluster, Program
from takeback.compiler.run.cluster_ops import eagerly
from takeback.compiler.run.inductor import NotCompiled
from takeback.compiler.run.nondeterminism import nondeterminism
from takeback.compiler.run.proof import NEAR, Bits
from takeback.compiler.run.verify import advice
from takeback.options import Options
from takeback.predict import passes
from takeback.step import CompiledStep

Compile = Callable[[Cluster, torch.device], Callable[[list[Tensor]], Any]]
ROWS, WIDTH, LAYERS = 12, 16, 2
STEADY = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(x))) * 2 + 1


def missing(cluster: Cluster, device: torch.device) -> Callable[[list[Tensor]], Any]:
    raise NotCompiled("NoCompiler: there is none here")


def stand_in(cluster: Cluster, device: torch.device) -> Callable[[list[Tensor]], Any]:
    return eagerly(cluster)


def wrong_norms(cluster: Cluster, device: torch.device) -> Callable[[list[Tensor]], Any]:
    right = eagerly(cluster)
    if not any(op.name == "native_layer_norm_backward" for op in cluster.ops):
        return right
    return lambda operands: [2 * t for t in right(operands)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).double().square().float().mean()


def made(mode: str = "fast", **options: Any) -> tuple[CompiledStep, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    step = tb.compile_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), mode=mode, **options)
    return step, torch.randn(ROWS, WIDTH)


def reported(compiles: Compile, mode: str = "fast", steps: int = STEADY) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("takeback.compiler.run.kernels.compile_cluster", compiles)
        step, x = made(mode, memory="keep")
        for _ in range(steps):
            step(x)
        return step.report()


@pytest.fixture(scope="module")
def generated() -> Report:
    return reported(stand_in)


@pytest.fixture(scope="module")
def uncompiled() -> Report:
    return reported(missing)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("takeback.compiler.run.kernels.compile_cluster", missing)


def kernel_between(report: Report, first: str, last: str) -> KernelAccount:
    [found] = [k for k in report.kernels if k.ops[0].name == first and k.ops[-1].name == last]
    return found


# -- the account -------------------------------------------------------------------------------------------------------


def test_kernel_has_its_ops_with_lines_and_modules_its_bytes_and_its_number(generated: Report) -> None:
    kernel = kernel_between(generated, "tanh", "native_layer_norm")
    assert kernel.count == 1, "the other layer's is followed by the loss"
    assert [op.name.partition(".")[0] for op in kernel.ops] == ["tanh", "mul", "add", "native_layer_norm"]
    here = Path(__file__).read_text().splitlines()
    for op in kernel.ops:
        file, _, line = op.line.rpartition(":")
        assert file == __file__
        assert "torch.tanh(self.up(self.norm(x)))" in here[int(line) - 1]
    assert {op.module for op in kernel.ops} == {"0", "1.norm"}
    assert kernel.modules == ("*", "*.norm")
    whole = ROWS * WIDTH * 4
    assert kernel.read_bytes == whole + 2 * WIDTH * 4, "the product, and the weight and bias of the norm"
    assert kernel.written_bytes >= whole
    assert kernel.generated
    assert kernel.why == ""


def test_totals_are_those_of_the_program_and_equal_clusters_are_one_kernel() -> None:
    step, x = made(memory="keep")
    step(x)
    ops = [op for op in step._plans[0].executor.program.ops if isinstance(op.target, Cluster)]
    report = step.report()
    assert sum(k.count for k in report.kernels) == len(ops) >= len(report.kernels) > 2
    assert report.ops_in_clusters == sum(len(cast(Cluster, op.target).ops) for op in ops)
    assert len({k.name + str(k.ops) for k in report.kernels}) == len(report.kernels)


def test_launches_are_saved_by_generated_kernels_alone(generated: Report, uncompiled: Report) -> None:
    clusters = sum(k.count for k in generated.kernels)
    assert generated.launches_saved == generated.ops_in_clusters - clusters > 0
    assert uncompiled.launches_saved == 0
    assert uncompiled.ops_in_clusters == generated.ops_in_clusters


def test_kernels_that_could_not_be_compiled_are_named_in_one_note(generated: Report, uncompiled: Report) -> None:
    assert all(k.fell_back and "NoCompiler: there is none here" in k.why for k in uncompiled.kernels)
    [note] = [note for note in uncompiled.notes if "distinct kernels" in note]
    assert note.startswith(f"{len(uncompiled.kernels)} of {len(uncompiled.kernels)} distinct kernels")
    assert note.count("NoCompiler") == 1, "kernels with one reason are named together"
    assert not [note for note in generated.notes if "distinct kernels" in note]


def test_kernel_that_is_further_off_than_eagers_is_given_up_and_named() -> None:
    report = reported(wrong_norms)
    guilty = [k for k in report.kernels if not k.generated]
    assert guilty
    assert all(any(op.name == "native_layer_norm_backward" for op in k.ops) for k in guilty)
    assert len(guilty) < len(report.kernels)
    [note] = [note for note in report.notes if "distinct kernels" in note]
    assert f"{len(guilty)} of {len(report.kernels)}" in note
    assert "from double precision" in note


def test_kernels_that_wait_are_no_failure_and_a_replay_that_compares_is_no_measure() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("takeback.compiler.run.kernels.compile_cluster", stand_in)
        step, x = made(memory="keep")
        step(x)
        report = step.report()
        assert all(k.waits and not k.fell_back and k.why for k in report.kernels)
        assert not [note for note in report.notes if "distinct kernels" in note]
        step(x)
        step(x)  # every kernel is used for the first time here, and compared in double precision
        first = step.report()
        assert all(k.generated for k in first.kernels)
        assert first.measured is None
        step(x)
        step(x)
        steady = step.report()
    assert steady.measured is not None
    assert steady.measured.misses == 0
    assert steady.peak_bytes <= first.peak_bytes < 1.5 * steady.peak_bytes, "foreseen, nearly"


def test_exact_mode_has_none_of_it() -> None:
    report = reported(missing, mode="exact")
    assert report.mode == "exact"
    assert report.kernels == ()
    assert "-- Kernels" not in str(report)
    assert ">Kernels<" not in as_html(dataclasses.replace(report, advisor=None))


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_text_names_kernels_and_sums_up_what_stayed_out() -> None:
    text = str(with_kernels(fixed_report()))
    assert max(map(len, text.splitlines())) <= 80
    assert (
        """\
-- Kernels ---------------------------------------------------------------------
74 ops run in 8 clusters, by 2 distinct kernels, 1 of them generated: 7 launches
fewer than one by one.
 times          in         out  kernel    ops (modules)
     7    3.00 MiB    1.00 MiB  generated add, native_layer_norm (layers.* and 1
                                          more)
     1    1.00 MiB         4 B  eager's   mul x60 (head)

Ops that keep eager's kernels, with the bytes that they make:
     2 x    5.00 MiB  it computes more than it moves (largest: mm)

"""
        in text
    )
    assert "fuse" not in text.split("-- Refusals")[1]
    assert "record choose  place compile  write  prove replays proved" in text
    assert "compile" not in str(fixed_report())


def test_text_of_a_real_report_fits_80_columns(generated: Report, uncompiled: Report) -> None:
    for report in (generated, uncompiled):
        text = str(report)
        assert max(map(len, text.splitlines())) <= 80
        assert text.isascii()
        assert text.count("-- Kernels") == 1
        assert not [group for group in refusal_groups(report) if group.decision == "fuse"]
        assert "it computes more than it moves" in text


def test_page_has_each_kernel_its_ops_and_what_stayed_out() -> None:
    report = with_kernels(fixed_report())
    page = as_html(dataclasses.replace(report, advisor=None))
    section = page.split(">Kernels</abbr>")[1].split("</section>")[0]
    assert section.count("<details>") == len(report.kernels)
    assert "layers.3.norm" in section
    assert "train.py:14" in section
    assert section.count(">mul.Tensor</td>") == 48, "a kernel of many ops does not fill the page"
    assert "and 12 ops more" in section
    assert "eager&#x27;s kernels: it could not be compiled (Error: no compiler)" in section
    assert '>5.00 MiB</td><td data-of="why">it computes more than it moves (largest: mm)</td>' in section


def test_data_and_pickle_hold_it(generated: Report) -> None:
    data = json.loads(generated.to_json())
    assert data["mode"] == "fast"
    assert data["launches_saved"] == generated.launches_saved
    assert data["ops_in_clusters"] == generated.ops_in_clusters
    assert [k["count"] for k in data["kernels"]] == [k.count for k in generated.kernels]
    assert data["kernels"][0]["ops"][0].keys() == {"name", "line", "module"}
    again = pickle.loads(pickle.dumps(generated))
    assert again.kernels == generated.kernels


def test_ledger_composition_and_snapshot_know_clusters(generated: Report) -> None:
    made_by = [e for e in generated.ledger if e.op.startswith("cluster[")]
    assert made_by
    assert all(e.line.startswith(__file__) for e in made_by)
    assert any(e.module == "1.norm" for e in made_by), "the place of a cluster's last op"
    assert sum(part.size_bytes for part in composition(generated)) == generated.peak_bytes
    events = as_snapshot(generated)["device_traces"][0]
    assert any("cluster[" in event["frames"][0]["name"] for event in events)


def test_conversion_inside_a_cluster_is_no_copy(generated: Report) -> None:
    def conversions(report: Report) -> list[str]:
        return [e.op for e in report.ledger if e.fate is Fate.COPIED and "converts" in e.reason]

    assert conversions(reported(missing, mode="exact"))
    assert not conversions(generated)


def test_results_that_are_copied_into_their_place_are_among_the_copies() -> None:
    plain = fixed_report()
    assert plain.measured is not None
    landed = dataclasses.replace(plain.measured, landed=3, landed_bytes=2 * MIB)
    first, *rest = copy_groups(with_kernels(dataclasses.replace(plain, measured=landed)))
    assert (first.count, first.size_bytes) == (3, 2 * MIB)
    assert "a cluster's kernel allocates its results" in first.reason
    assert rest == copy_groups(plain) == copy_groups(with_kernels(plain))


def test_advice_compares_plans_by_one_account(uncompiled: Report) -> None:
    """Kernels of their own take memory that only the plan that runs is known to take."""
    saved = [tip.saves_bytes or 0 for tip in uncompiled.advice.tips]
    assert max(saved, default=0) < uncompiled.peak_bytes - uncompiled.resident_bytes
    assert not [tip for tip in uncompiled.advice.tips if "linear_cross_entropy" in tip.do]
    frontier = uncompiled.advice.frontier
    assert frontier is not None
    named = [name for t in frontier.points for name in t.rebuilt if name.startswith("cluster[")]
    assert all(name.endswith("]") for name in named)


# -- the mode ----------------------------------------------------------------------------------------------------------


def test_step_and_report_say_in_which_mode_they_run() -> None:
    step, _ = made("auto")
    assert step.options.mode == "auto"
    assert step.mode == "exact"
    assert made("fast")[0].mode == "fast"


@pytest.mark.parametrize(
    ("mode", "device", "said"),
    [
        ("auto", "cpu", ""),
        ("exact", "cpu", ""),
        ("fast", "cpu", ', mode="fast"'),
        ("auto", "cuda", ', mode="fast"'),
        ("exact", "cuda", ', mode="exact"'),
    ],
)
def test_title_has_the_mode_where_it_is_not_plain_exact(mode: str, device: str, said: str) -> None:
    title = title_of(nn.Linear(2, 2), "4x2", Options(mode=mode), torch.device(device))
    assert title == f'Linear, batch 4x2, memory="auto"{said} on {device}'


def test_passes_of_mode_fast_are_shown_with_what_stayed_out_summed_up() -> None:
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = list(passes_text(passes(model, loss_of, optimizer, torch.randn(ROWS, WIDTH), mode="fast", memory="keep")))
    assert any(line.startswith("   + ") and "cluster[" in line for line in lines)
    left = [line for line in lines if line.startswith("   left out: ")]
    assert 0 < len(left) < 8
    assert any("it computes more than it moves" in line for line in left)
    assert not [line for line in lines if line.startswith("   refused: fuse")]


def test_prediction_of_mode_fast_is_refused_with_the_way_out() -> None:
    model = Block()
    with pytest.raises(tb.OptionError, match=r"mode='fast' cannot be predicted: .*read its report"):
        tb.predict(model, loss_of, torch.optim.SGD(model.parameters()), torch.randn(4, WIDTH), mode="fast")


def test_commands_take_a_mode() -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "80", "TERM": "dumb"})

    shown = run("explain", "mlp", "--mode", "fast", "--no-tips", "--memory", "keep", "--steps", "2")
    assert shown.exit_code == 0, shown.output
    assert 'mode="fast"' in shown.stdout.splitlines()[0]
    assert "-- Kernels" in shown.stdout
    assert "-- Kernels" not in run("explain", "mlp", "--mode", "exact", "--no-tips", "--memory", "keep").stdout
    refused = run("explain", "mlp", "--frontier", "--mode", "fast")
    assert refused.exit_code == 1
    assert "cannot be predicted" in refused.stderr
    assert "mode must be one of" in run("explain", "mlp", "--mode", "slow").stderr


def test_refusal_of_bits_on_cuda_names_the_way_out() -> None:
    program = cast(Program, SimpleNamespace(device_type="cuda", ops=()))
    assert "mode='fast'" in nondeterminism(program)
    assert "mode='fast'" in advice(program, Bits())
    assert "mode='fast'" not in advice(program, NEAR), "who runs in it is not sent there"
    assert nondeterminism(cast(Program, SimpleNamespace(device_type="cpu", ops=()))) == ""


def test_fixed_bytes_of_a_kernel() -> None:
    assert [k.moved_bytes for k in with_kernels(fixed_report()).kernels] == [28 * MIB, MIB + 4]
