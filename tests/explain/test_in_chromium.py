"""The pages in a real browser: nothing is cut off at 390 pixels, the search finds, the keyboard walks, no error is
logged.

A script that is added to the page does what a reader would, and writes what it sees into the page; Chromium prints that
page. Where there is no Chromium, nothing is tested.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from reports import ADVICE, MIB, fixed_report, with_kernels, zoo_report

from takeback.compiler.explain.advice import OF_PEAK, Tip
from takeback.compiler.explain.html import as_html
from takeback.compiler.explain.ledger import Entry, Fate
from takeback.compiler.explain.report import Report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--dump-dom"),
)
READER = """
<script>window.wrong = []; addEventListener("error", (e) => wrong.push(e.message));
console.error = (...said) => wrong.push(said.join(" "));</script>
%s
<script>
(() => {
  const seen = {}, out = document.getElementById("readout"), find = document.getElementById("find");
  const began = performance.now();
  seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const tips = document.querySelector(".tips").parentElement;
  seen.tips = tips.scrollWidth - tips.clientWidth;
  const over = (part) => part.scrollWidth - part.clientWidth;
  seen.parts = Math.max(...[...document.querySelectorAll(".scroll, section")].map(over));
  seen.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  seen.idle = out.textContent;
  const rects = [...document.querySelectorAll("#arena rect")];
  seen.values = rects.length;
  rects[0].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  seen.hovered = out.textContent;
  find.value = "MLP"; find.dispatchEvent(new Event("input"));
  seen.found = rects.filter((rect) => !rect.classList.contains("dim")).length;
  seen.said = out.textContent;
  const press = (key) => document.getElementById("arena").dispatchEvent(new KeyboardEvent("keydown", { key }));
  press("ArrowRight"); seen.first = out.textContent;
  press("ArrowRight"); seen.second = out.textContent;
  press("ArrowLeft"); seen.back = out.textContent;
  find.value = ""; find.dispatchEvent(new Event("input"));
  seen.again = out.textContent;
  seen.explained = [...document.querySelectorAll("abbr")].every((word) => word.title.length > 20);
  const folded = document.querySelector("details"), head = folded && folded.querySelector("summary");
  if (head) {
    head.focus(); seen.focused = document.activeElement === head;
    head.click(); seen.unfolded = folded.open && folded.querySelector("table").offsetHeight > 0;
    seen.kernels = folded.parentElement.scrollWidth - folded.parentElement.clientWidth;
  }
  seen.ms = performance.now() - began;
  seen.wrong = wrong;
  const note = document.createElement("pre");
  note.id = "seen"; note.textContent = JSON.stringify(seen);
  document.body.append(note);
})();
</script>
"""


def seen_in(report: Report, folder: Path, width: int) -> dict[str, Any]:
    """What a reader sees in a window of this width."""
    page = folder / "page.html"
    page.write_text(READER % as_html(report), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", page.as_uri()]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(found.group(1)))
    return seen


def test_reader_finds_points_and_walks_and_nothing_is_cut_off(tmp_path: Path) -> None:
    report = with_kernels(zoo_report("gpt"))
    long = Tip("linear_cross_entropy(hidden, model.decoder.output_projection.weight, targets)", MIB, OF_PEAK, None, "")
    advice = dataclasses.replace(ADVICE, tips=(long, *ADVICE.tips))
    seen = seen_in(dataclasses.replace(report, advisor=lambda: advice), tmp_path, 390)
    assert seen["wrong"] == []
    assert seen["wide"] <= 0, "the page is wider than its window"
    assert seen["tips"] <= 0, "what is to be pasted is cut off"
    assert seen["parts"] <= 0, "a table or a picture is cut off"
    assert "ops" in seen["hovered"]
    assert seen["hovered"] != seen["idle"]
    assert 0 < seen["found"] < seen["values"]
    assert seen["said"] == f"{seen['found']} of {seen['values']} values"
    assert "mlp" in seen["first"]
    assert "mlp" in seen["second"]
    assert seen["second"] != seen["first"] == seen["back"]
    assert seen["again"] == seen["idle"]
    assert seen["explained"]
    assert seen["focused"], "a kernel cannot be reached with the keyboard"
    assert seen["unfolded"]
    assert seen["kernels"] <= 0


@pytest.mark.slow
def test_page_of_20_000_values_does_not_stall(tmp_path: Path) -> None:
    entries = tuple(
        Entry(
            *(f"%{i}", MIB, Fate.PLACED, "addmm", "/a/model.py:1", "its own", i % 40 * MIB, i, i + 9),
            *(f"%{i}", f"layers.{i % 32}.mlp", "activation"),
        )
        for i in range(20_000)
    )
    report = dataclasses.replace(
        fixed_report(),
        ledger=entries,
        ops=20_000,
        arena_bytes=40 * MIB,
        peak_curve=(MIB,) * 20_000,
        eager_curve=(2 * MIB,) * 20_000,
    )
    seen = seen_in(report, tmp_path, 1200)
    assert seen["wrong"] == []
    assert seen["found"] == seen["values"] > 5000
