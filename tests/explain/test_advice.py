"""Each tip, when it is taken, saves what it promised within a tenth."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback import zoo
from takeback.compiler.explain.advice import OF_COPIES, OF_PEAK, Tip
from takeback.compiler.explain.report import Report


def deep() -> zoo.Case:
    """Activations make its peak."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    batch = (torch.randn(256, 16), torch.randint(4, (256,)))
    loss_fn = lambda m, x, y: F.cross_entropy(m(x), y)  # noqa: E731
    return zoo.Case("deep", model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch)


MAKE = {"deep": deep, "gpt": lambda: zoo.case("gpt"), "resnet": lambda: zoo.case("resnet")}


def report_of(case: zoo.Case, **options: Any) -> Report:
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, **options)
    for _ in range(3):
        step(*case.batch)
    return step.report()


def taken(tip: Tip) -> dict[str, str]:
    """The arguments of compile_step, as they were pasted."""
    found: dict[str, str] = eval(f"dict({tip.do})")
    return found


@pytest.mark.parametrize("name", ["deep", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt", "resnet"))])
def test_memory_that_is_asked_for_as_the_tip_says_saves_what_it_promised(name: str) -> None:
    report = report_of(MAKE[name](), memory="keep")
    tips = [tip for tip in report.advice.tips if tip.do.startswith("memory=")]
    assert len(tips) == 2
    assert tips[0].do == 'memory="min"'
    assert tips[0].saves_bytes > tips[1].saves_bytes
    assert (tips[0].added_share or 0.0) > (tips[1].added_share or 0.0) > 0.0
    for tip in tips:
        assert tip.of == OF_PEAK
        after = report_of(MAKE[name](), **taken(tip))
        assert report.peak_bytes - after.peak_bytes == pytest.approx(tip.saves_bytes, rel=0.1)
        assert after.added_s / after.step_s == pytest.approx(tip.added_share, rel=0.1)


def wide() -> zoo.Case:
    """Gradients make its peak: it has many parameters, and few rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(2, 256), torch.randint(4, (2,)))
    return zoo.Case("wide", model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, batch)


def test_early_update_saves_what_the_tip_promised_and_is_not_told_twice() -> None:
    report = report_of(wide())
    [tip] = [tip for tip in report.advice.tips if tip.do == 'update="early"']
    after = report_of(wide(), **taken(tip))
    assert report.peak_bytes - after.peak_bytes == pytest.approx(tip.saves_bytes, rel=0.1)
    assert not [tip for tip in after.advice.tips if tip.do == 'update="early"']


@pytest.mark.slow
def test_tips_of_mode_fast_save_what_they_promised() -> None:
    """What kernels take for themselves is known of the plan that ran, and of no other one."""

    def fast(**options: Any) -> Report:
        case = zoo.case("gpt")
        step = tb.compile_step(case.model, case.loss_fn, case.optimizer, mode="fast", **options)
        for _ in range(5):
            step(*case.batch)
        return step.report()

    report = fast()
    assert any(kernel.generated for kernel in report.kernels)
    tips = [tip for tip in report.advice.tips if tip.of == OF_PEAK and tip.do.startswith(("memory=", "update="))]
    assert len(tips) >= 2
    for tip in tips:
        assert report.peak_bytes - fast(**taken(tip)).peak_bytes == pytest.approx(tip.saves_bytes, rel=0.1)


def test_line_that_copies_is_named_with_what_it_copies() -> None:
    def case(loss_fn: Any) -> zoo.Case:
        found = wide()
        return zoo.Case(
            "copying", found.model, loss_fn, found.optimizer, (torch.randn(64, 256), torch.randint(4, (64,)))
        )

    def copying(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.double().float()), y)

    def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    report = report_of(case(copying), memory="keep")
    [tip] = [tip for tip in report.advice.tips if tip.of == OF_COPIES]
    assert tip.do.startswith("test_advice.py:")
    assert "float64" in tip.why
    saved = report.copied_bytes - report_of(case(plain), memory="keep").copied_bytes
    assert saved == pytest.approx(tip.saves_bytes, rel=0.1)


def test_advice_is_found_for_a_prediction_too() -> None:
    case = zoo.case("mlp")
    report = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="keep")
    assert report.advice.frontier is not None
    assert {tip.do for tip in report.advice.tips} <= {f'memory="{t.memory}"' for t in report.advice.frontier.points}


def test_report_is_pickled_as_data_with_the_advice_that_was_found() -> None:
    case = zoo.case("mlp")
    report = report_of(case, memory="keep")
    assert report.advisor is not None
    assert pickle.loads(pickle.dumps(report)).advisor is None
    found = report.advice
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    assert again.advice == found
