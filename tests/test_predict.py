"""predict sees the step's peak without running it; largest_batch finds the last size that fits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import takeback as tb
from pairwise import quick_ones
from takeback import zoo
from takeback.compiler.capture import update
from takeback.errors import CaptureError, OptionError
from takeback.options import Options, parse_bytes
from takeback.tracing import TracedStep

pytestmark = pytest.mark.usefixtures("short_search")


@pytest.mark.parametrize(("name", "memory"), [("mlp", "keep"), ("mlp", "auto"), ("gpt", "auto"), ("resnet", "keep")])
def test_predicted_peak_above_resident_is_within_one_percent_of_the_compiled_steps(name: str, memory: str) -> None:
    case = zoo.case(name)
    said = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory=memory)
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=memory)
    for _ in range(4):
        step(*case.batch)
    found = step.report()
    assert said.peak_bytes - said.resident_bytes == pytest.approx(found.peak_bytes - found.resident_bytes, rel=0.01)
    assert said.eager_peak_bytes == pytest.approx(found.eager_peak_bytes, rel=0.01)
    assert said.resident_bytes == found.resident_bytes
    assert said.measured is None
    assert found.measured is not None


def disproved(case: zoo.Case, monkeypatch: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    """One that takeback would write out, were it not that its twin shows something else."""
    own = update._adam_single

    def wrong(w: Any, group: Any, s: Any, decoupled: bool) -> None:
        own(w, group, s, decoupled)
        w.write(torch.ops.aten.mul_.Tensor, s.parameter, 1)

    monkeypatch.setattr(update, "_adam_single", wrong)
    return torch.optim.AdamW(case.model.parameters(), foreach=False)


def unknown(case: zoo.Case, monkeypatch: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(case.model.parameters())


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("optimizer", [disproved, unknown])
def test_prediction_and_compiled_step_agree_where_the_update_is_not_in_the_plan(
    optimizer: Any, keep_grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = zoo.case("mlp")
    own = optimizer(case, monkeypatch)
    settings = {"memory": "keep", "keep_grads": keep_grads}
    said = tb.predict(case.model, case.loss_fn, own, *case.batch, **settings)
    step = tb.compile_step(case.model, case.loss_fn, own, **settings)
    for _ in range(3):
        step(*case.batch)
    found = step.report()
    [refusal] = [r for r in said.refusals if r.decision == "plan the update"]
    assert said.refusals == found.refusals
    assert refusal.op == type(own).__name__
    assert said.peak_bytes - said.resident_bytes == found.peak_bytes - found.resident_bytes
    assert said.ops == found.ops
    assert said.notes == found.notes
    [note] = said.notes
    assert note == (
        f"the update is not part of the plan: {refusal.op}'s own step() is called after the backward, because "
        f"{refusal.reason}"
    )
    assert f"note: the update is not part of the plan: {refusal.op}" in str(found)
    assert note in json.loads(found.to_json())["notes"]


def test_prediction_touches_nothing() -> None:
    case = zoo.case("resnet")
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    random = torch.get_rng_state()
    tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch)
    assert all(torch.equal(v, before[k]) for k, v in case.model.state_dict().items())
    assert not case.optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in case.model.parameters())


def test_value_read_into_python_cannot_be_predicted_and_says_so() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        CaptureError, match=r"value into Python .* at test_predict\.py:\d+, which .* return the tensor as aux"
    ):
        tb.predict(model, lambda m, x: m(x).sum() * float(x.max()), optimizer, torch.randn(2, 4))


def test_result_that_its_kernel_makes_in_more_bytes_than_it_has_is_predicted_as_it_is_recorded() -> None:
    """mse_loss makes its mean where it made the squares."""
    torch.manual_seed(0)
    model = nn.Linear(16, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(m(x), y)

    batch = (torch.randn(128, 16), torch.randn(128, 64))
    traced = TracedStep(model, loss_fn, optimizer, batch, {}, Options(memory="keep")).traced()
    step = tb.compile_step(model, loss_fn, optimizer, memory="keep")
    step(*batch)
    assert step._last is not None
    sizes = [
        {op.name: program.buffers[op.outputs[0].buffer].size_bytes for op in program.ops if op.outputs}
        for program in (traced.program, step._last.original)
    ]
    assert sizes[0] == sizes[1]
    assert sizes[0]["mse_loss"] == 4 * 128 * 64


def test_kernel_that_does_not_take_what_fakes_gave_is_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = m(x).float().square().mean()
            return loss

    with pytest.raises(CaptureError, match=r"native_batch_norm_backward cannot be tried by itself.* Compile and run"):
        tb.predict(model, loss_fn, optimizer, torch.randn(2, 3, 8, 8))
    assert tb.compile_step(model, loss_fn, optimizer)(torch.randn(2, 3, 8, 8)).isfinite()


def test_gpu_prediction_is_refused_plainly() -> None:
    case = zoo.case("mlp")
    with pytest.raises(OptionError, match="device='cuda' needs gpu="):
        tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, device="cuda")


def _make(n: int) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda m, x: m(x).square().mean(), optimizer, (torch.zeros(n, 64),)


@pytest.mark.parametrize("memory", quick_ones(["400KiB", "1MiB", "3MiB"], ["1MiB"]))
def test_largest_batch_is_the_last_one_that_fits(memory: str) -> None:
    found = tb.largest_batch(_make, memory=memory)

    def peak(n: int) -> int:
        model, loss_fn, optimizer, batch = _make(n)
        return tb.predict(model, loss_fn, optimizer, *batch).peak_bytes

    assert peak(found) <= parse_bytes(memory) < peak(found + 1)


def test_model_that_does_not_fit_at_all_is_an_error_with_both_sizes() -> None:
    with pytest.raises(OptionError, match=r"a batch of 1 peaks at [\d,]+ bytes \(auto\), more than 1,024"):
        tb.largest_batch(_make, memory="1KiB")


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 << 30), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), (77, 77)])
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "12 parsecs", 0, True, None])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(OptionError, match="a size such as"):
        parse_bytes(text)
