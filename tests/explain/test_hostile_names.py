"""Names that come from the model are shown as they are, and do nothing: modules, parameters, functions, files."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn

import takeback as tb
from takeback import cli
from takeback.compiler.explain.report import Report
from takeback.errors import CaptureError
from takeback.hazards.report import Findings
from takeback.hazards.trial import OpUnderTest, Outcome, Verdict

EVIL = "<img src=x onerror=alert(1)>\"'&lt;</title></script><script>alert(2)</script>"
FILE = "/tmp/<svg onload=alert(3)>\x1b[31m[bold red]/model.py"

SOURCE = """
def loss_fn(model, x, **kwargs):
    hidden = model.first(x).exp()
    return (model.last(hidden[:, 2:]) * hidden.sum()).square().mean()
"""


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(6, 3)
        self.add_module(EVIL.replace(".", ""), nn.Linear(3, 3))
        self.register_parameter(EVIL.replace(".", "") + "w", nn.Parameter(torch.ones(3)))
        self.register_buffer(EVIL.replace(".", "") + "b", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]


@pytest.fixture(scope="module")
def report() -> Report:
    scope: dict[str, Any] = {}
    exec(compile(SOURCE, FILE, "exec"), scope)
    torch.manual_seed(0)
    model = Hostile()
    used = list(model.modules())[-1]

    def loss_fn(m: nn.Module, x: Tensor, **named: Tensor) -> Tensor:
        weight = next(p for name, p in m.named_parameters() if name.endswith("w"))
        return scope["loss_fn"](m, x) + (used(weight[None]) * named[EVIL]).sum()

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory="keep")
    for _ in range(3):
        step(torch.randn(4, 6), **{EVIL: torch.ones(3)})
    return step.report()


def test_page_has_no_tag_or_attribute_of_the_models(report: Report, tmp_path: Path) -> None:
    page = report.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    found = Tags()
    found.feed(page)
    assert page.count("<script") == found.seen.count("script") == 1, "the page's own"
    assert not {"img", "iframe", "link"} & set(found.seen)
    assert not [name for name in found.attributes if name.startswith("on") or name in ("src", "href")]
    assert "\x1b" not in page
    assert "&lt;svg onload=alert(3)&gt;" in page or "&lt;img src=x" in page, "the names are shown"


def test_text_moves_no_cursor_and_has_no_markup(report: Report) -> None:
    text = str(report)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    assert "model.py" in text


ESCAPE = "ev\x1b[2Jil\x07"


def test_findings_of_hazards_move_no_cursor() -> None:
    subject = OpUnderTest(f"an op {ESCAPE}", nn.Identity, nn.Identity)
    wrong = Outcome(Verdict.RAISED, f"ValueError: {ESCAPE} is\nno operand")
    text = str(Findings(subject, "cpu", {f"hazard {ESCAPE}": wrong}, {f"hazard {ESCAPE}": wrong}))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    assert text.count("ev?[2Jil?") == 3, "the name of the op, of the hazard, and what it said"


def test_errors_of_the_command_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), cli._CleanErrors():
        raise CaptureError(f"the step writes {ESCAPE}\n  at model.py:3")
    said = capsys.readouterr().err
    assert "CaptureError: the step writes ev?[2Jil?\n  at model.py:3" in said
    assert "\x1b[2J" not in said
    assert "\x07" not in said


def test_data_is_json_that_reads_back(report: Report) -> None:
    assert json.loads(report.to_json())["ops"] == report.ops
