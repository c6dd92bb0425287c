"""Tips that change the user's code, and with it the last bits: each, when taken, keeps its promise within a tenth. What
a step takes after it is that of the changed code, compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback import zoo
from takeback.compiler.explain.advice import Tip
from takeback.compiler.explain.chunked_loss import in_chunks
from takeback.compiler.explain.half import Autocast
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import as_text, promise
from takeback.compiler.passes.cost import Rates
from takeback.compiler.run import calibrate
from takeback.nn.functional import linear_cross_entropy
from takeback.predict import with_autocast

LossFn = Callable[..., Tensor]


class Reader(nn.Module):
    """Its logits make its peak."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 2048, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def plain(model: Reader, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def chunked(model: Reader, x: Tensor, y: Tensor) -> Tensor:
    return linear_cross_entropy(model.body(x), model.head.weight, y, model.head.bias)


def reader(loss_fn: LossFn = plain, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> zoo.Case:
    torch.manual_seed(0)
    model = Reader(bias).to(dtype)
    batch = (torch.randn(4, 200, 32, dtype=dtype), torch.randint(2048, (4, 200)))
    return zoo.Case("reader", model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def report_of(case: zoo.Case, **options: Any) -> Report:
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, **options)
    for _ in range(3):
        step(*case.batch)
    return step.report()


def tip_of(report: Report, part: str) -> Tip | None:
    return next((tip for tip in report.advice.tips if part in tip.do), None)


def assert_kept(tip: Tip | None, before: Report, after: Report) -> None:
    assert tip is not None
    assert tip.saves_bytes
    assert before.peak_bytes - after.peak_bytes == pytest.approx(tip.saves_bytes, rel=0.1)
    assert tip.added_share is None  # no figure is better than one that is off by a fifth of the step


# -- a loss in chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "dtype", "options"),
    [
        (True, torch.float32, {"memory": "keep"}),
        (False, torch.bfloat16, {"memory": "keep", "accumulate": 2}),
        pytest.param(False, torch.float32, {"memory": "min"}, marks=pytest.mark.slow),
        pytest.param(True, torch.float32, {"clip_norm": 1.0}, marks=pytest.mark.slow),
        pytest.param(True, torch.bfloat16, {"update": "early"}, marks=pytest.mark.slow),
    ],
)
def test_loss_in_chunks_saves_what_the_tip_promised(bias: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    before = report_of(reader(bias=bias, dtype=dtype), **options)
    tip = tip_of(before, "linear_cross_entropy")
    assert tip is not None
    more = ", model.head.bias" if bias else ""
    assert tip.do == f"linear_cross_entropy(hidden, model.head.weight, targets{more})"
    after = report_of(reader(chunked, bias=bias, dtype=dtype), **options)
    assert_kept(tip, before, after)
    assert tip_of(after, "linear_cross_entropy") is None


def test_program_with_its_loss_in_chunks_is_the_one_that_is_recorded_then() -> None:
    def ops(loss_fn: LossFn, change: bool) -> list[str]:
        step = tb.compile_step(*parts(reader(loss_fn, bias=True)), memory="keep")
        step(*reader().batch)
        assert step._last is not None
        program = step._last.finished.program
        found = in_chunks(program, None) if change else program
        assert found is not None
        return [f"{op.name} {op.phase} {[r.shape for r in op.outputs]}" for op in found.ops if op.name != "ne.Scalar"]

    assert ops(plain, True) == ops(chunked, False)


def parts(case: zoo.Case) -> tuple[nn.Module, LossFn, torch.optim.Optimizer]:
    return case.model, case.loss_fn, case.optimizer


def read_again(model: Reader, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()), logits.argmax(1)


def weighted(model: Reader, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), torch.ones(2048))


def smoothed(model: Reader, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("loss_fn", [read_again, weighted, smoothed])
def test_loss_whose_logits_are_read_otherwise_has_no_tip(loss_fn: LossFn) -> None:
    case = reader(loss_fn)
    step = tb.compile_step(*parts(case), memory="keep")
    step(*case.batch)
    assert step._last is not None
    assert in_chunks(step._last.finished.program, None) is None


@pytest.mark.parametrize("frozen", ["body", "head"])
def test_frozen_parts_have_no_gradient_in_what_is_promised(frozen: str) -> None:
    """As in fine-tuning: neither what comes before the head nor the head itself need have one."""

    def case(loss_fn: LossFn) -> zoo.Case:
        made = reader(loss_fn)
        getattr(made.model, frozen).requires_grad_(False)
        trained = [p for p in made.model.parameters() if p.requires_grad]
        return replace(made, optimizer=torch.optim.SGD(trained, lr=0.1))

    before = report_of(case(plain), memory="keep")
    assert_kept(tip_of(before, "linear_cross_entropy"), before, report_of(case(chunked), memory="keep"))


@pytest.mark.slow
def test_language_model_of_transformers_is_converted_for_what_the_tip_promised() -> None:
    transformers = pytest.importorskip("transformers")

    def case(convert: bool) -> zoo.Case:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=2, n_head=4, n_embd=128, vocab_size=8000, n_positions=128, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
        if convert:
            tb.nn.convert(model, body=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = (torch.randint(8000, (8, 128)),)
        return zoo.Case("gpt2", model, lambda m, ids: m(input_ids=ids, labels=ids).loss, optimizer, batch)

    before = report_of(case(False), memory="keep")
    after = report_of(case(True), memory="keep")
    assert_kept(tip_of(before, "takeback.nn.convert(model, body=False)"), before, after)


# -- a fused optimizer ---------------------------------------------------------------------------------------------


def heavy(**flags: bool) -> zoo.Case:
    """Its update takes as long as the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)
    batch = (torch.randn(8, 256), torch.randint(4, (8,)))
    return zoo.Case("heavy", model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, batch)


@pytest.mark.parametrize("foreach", [True, False])
def test_fused_optimizer_promises_no_bytes_since_the_plan_has_found_room_for_the_update(foreach: bool) -> None:
    """In eager it would save some: there the update's temporaries are bytes of their own."""
    before, after = report_of(heavy(foreach=foreach)), report_of(heavy(fused=True))
    assert after.eager_peak_bytes < 0.9 * before.eager_peak_bytes
    assert after.peak_bytes == pytest.approx(before.peak_bytes, rel=0.01)
    tip = tip_of(before, "torch.optim.AdamW(..., fused=True)")
    assert tip is not None
    assert (tip.saves_bytes, tip.added_share) == (0, None)
    assert promise(tip) == "less time; how much is not known here"
    assert "The peak stays" in tip.why
    assert tip_of(after, "fused=True") is None


def test_fused_optimizer_is_no_tip_where_the_update_is_next_to_nothing() -> None:
    case = reader()
    assert tip_of(report_of(case, memory="keep"), "fused") is None


def test_looking_for_tips_leaves_the_optimizer_as_it_was() -> None:
    case = heavy()
    report = report_of(case)
    groups = [dict(group) for group in case.optimizer.param_groups]
    states = {p: {k: v.clone() for k, v in table.items()} for p, table in case.optimizer.state.items()}
    assert report.advice.tips
    assert [dict(group) for group in case.optimizer.param_groups] == groups
    for p, table in case.optimizer.state.items():
        assert all(torch.equal(table[k], v) for k, v in states[p].items())


# -- bfloat16 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Rates(1e10, 1e9, 1e-6, {"float32": 1e11, "bfloat16": 4e11})
    monkeypatch.setattr(calibrate, "rates", lambda *_: known)


def body_heavy(loss_fn: LossFn) -> zoo.Case:
    """Its activations make its peak."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    batch = (torch.randn(512, 64), torch.randint(4, (512,)))
    return zoo.Case("body_heavy", model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def exact(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x), y)


@pytest.mark.usefixtures("quick_in_bfloat16")
def test_bfloat16_saves_what_a_prediction_promised() -> None:
    case = body_heavy(exact)
    predicted = tb.predict(*parts(case), *case.batch, memory="keep")
    tip = tip_of(predicted, "autocast")
    assert tip is not None
    assert tip.do == 'with torch.autocast("cpu", torch.bfloat16):'
    assert "changes results" in tip.why
    after = report_of(body_heavy(half), memory="keep")
    assert_kept(tip, report_of(case, memory="keep"), after)
    assert tip_of(after, "autocast") is None


@pytest.mark.usefixtures("quick_in_bfloat16")
def test_report_of_a_step_names_bfloat16_without_a_figure_and_explain_finds_the_figure() -> None:
    case = body_heavy(exact)
    step = tb.compile_step(*parts(case), memory="keep")
    for _ in range(3):
        step(*case.batch)
    report = step.report()
    tip = tip_of(report, "autocast")
    assert tip is not None
    assert tip.saves_bytes is None
    assert promise(tip) == "how much is not known here"
    assert "takeback.predict" in tip.why
    assert "how much is not known here" in as_text(report)
    known = with_autocast(report, case, step.options)
    assert_kept(tip_of(known, "autocast"), report, report_of(body_heavy(half), memory="keep"))
    assert len([t for t in known.advice.tips if "autocast" in t.do]) == 1


@pytest.mark.usefixtures("quick_in_bfloat16")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("gpt", "dit")])
def test_bfloat16_saves_what_was_promised_in_models_of_the_zoo(name: str) -> None:
    case = zoo.case(name)
    predicted = tb.predict(*parts(case), *case.batch, memory="keep")
    other = zoo.case(name)
    after = report_of(replace(other, loss_fn=Autocast(other.loss_fn, "cpu")), memory="keep")
    assert_kept(tip_of(predicted, "autocast"), predicted, after)


@pytest.mark.usefixtures("quick_in_bfloat16")
def test_bfloat16_is_named_without_a_figure_where_fakes_cannot_show_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = tb.predict(model, lambda m, x: m(x).float().square().mean(), optimizer, torch.randn(2, 3, 8, 8))
    tip = tip_of(report, "autocast")
    assert tip is not None
    assert tip.saves_bytes is None
    assert "could not be traced" in tip.why


def test_bfloat16_is_no_tip_where_it_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Rates(1e10, 1e9, 1e-6, {"float32": 1e11, "bfloat16": 1e11})
    monkeypatch.setattr(calibrate, "rates", lambda *_: known)
    case = body_heavy(exact)
    assert tip_of(tb.predict(*parts(case), *case.batch, memory="keep"), "autocast") is None
    assert tip_of(report_of(case, memory="keep"), "autocast") is None
