"""The report as a page: well-formed, self-contained, escaped, and bounded in size."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reports import MIB, fixed_report, planted, zoo_report

from takeback.compiler.explain.html import MOST_RECTANGLES, as_html
from takeback.compiler.explain.ledger import Entry, Fate
from takeback.compiler.explain.text import show_bytes

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Collects tags and texts, and what was opened but not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.wrong == []
    assert checker.open == []
    return checker


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_page_of_a_zoo_report_is_well_formed_and_self_contained(name: str, tmp_path: Path) -> None:
    # Advice takes as long as planning does: one model shows its part of the page.
    report = dataclasses.replace(zoo_report(name), advisor=zoo_report(name).advisor if name == "mlp" else None)
    page = report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert ("Less memory against more time" in page) == (name == "mlp")
    found = checked(page)
    assert not {"link", "img", "iframe"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name in ("src", "href")]
    assert not re.search(r"https?://|url\(|@import", page)
    assert len(page) < 500_000
    assert found.tags.count("svg") >= 2
    assert "prefers-color-scheme" in page


def test_page_draws_each_value_that_has_a_place() -> None:
    page = as_html(fixed_report())
    drawn = re.findall(r'<rect class="(\w+)" x=', page)
    assert sorted(drawn) == ["copied", "overwritten", "placed", "scratch"]
    assert "layers.3.mlp: relu at train.py:66, 2.00 MiB, overwritten, ops 1 to 3 (%6)" in page


def test_page_escapes_every_text_of_the_user() -> None:
    plain = checked(as_html(planted("harmless")))
    evil = "<script>alert('x')</script>\"><img src=x>&amp;"
    found = checked(as_html(planted(evil)))
    assert found.tags == plain.tags
    assert evil.split("/")[0] in "".join(found.text)


def test_page_of_an_empty_plan_is_well_formed() -> None:
    checked(as_html(dataclasses.replace(fixed_report(), ledger=(), refusals=(), peak_curve=(), eager_curve=())))


def test_page_of_a_large_plan_stays_small() -> None:
    count = 3 * MOST_RECTANGLES
    entries = tuple(
        Entry(f"%{i}", MIB, Fate.PLACED, "convolution_backward", "/a/b/model.py:123", "its own", i % 40 * MIB, i, i + 9)
        for i in range(count)
    )
    report = dataclasses.replace(
        fixed_report(),
        ledger=entries,
        ops=count,
        arena_bytes=40 * MIB,
        peak_curve=(MIB,) * count,
        eager_curve=(2 * MIB,) * count,
    )
    page = as_html(report)
    assert len(page) < 3_000_000
    assert f"{count - MOST_RECTANGLES:,} values too small to see are not drawn" in page


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_curve_is_drawn_as_it_is_and_stays_within_the_arena(name: str) -> None:
    report = zoo_report(name)
    assert max(report.peak_curve) <= report.lower_bound_bytes <= report.arena_bytes
    assert f"takeback, {show_bytes(max(report.peak_curve))} at most" in as_html(
        dataclasses.replace(report, advisor=None)
    )


def test_every_fate_has_a_colour_of_its_own() -> None:
    entries = tuple(Entry("%1", MIB, fate, "op", "", "", 0, 0, 1) for fate in Fate)
    page = as_html(dataclasses.replace(fixed_report(), ledger=entries))
    for fate in Fate:
        assert f'<rect class="{fate.value}" width="14"' in page
        assert f".{fate.value}{{fill:var(--{fate.value})}}" in page
    colours = [re.findall(rf"--{fate.value}:(#\w+)", page) for fate in Fate]
    assert all(len(found) == 2 for found in colours)  # light and dark
    for which in (0, 1):
        assert len({found[which] for found in colours}) == len(Fate)


def test_page_of_a_gpt_shows_what_is_rebuilt() -> None:
    page = as_html(dataclasses.replace(zoo_report("gpt"), advisor=None))
    assert '<rect class="recomputed" x=' in page
    assert "run again per step" in page


def test_page_says_what_rebuilding_costs() -> None:
    assert "2.5 % more time, predicted" in as_html(fixed_report())
    assert "run again" not in as_html(dataclasses.replace(fixed_report(), rebuilt_ops=0))


def test_page_has_a_table_of_the_plans_with_their_seconds() -> None:
    page = as_html(fixed_report())
    assert "<h2>Plans</h2>" in page
    assert '<td data-of="for">input_ids 16x128, labels 16</td><td class=right data-of="peak">9.00 MiB</td>' in page
    assert "native code 9.1 s, measuring this machine 2.0 s" in page
    assert "<h2>Plans</h2>" not in as_html(dataclasses.replace(fixed_report(), plans=()))
