"""docs/trust.md says what the committed results say, and those are what is claimed: nothing harmful was accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_page_is_written_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import trust

    assert trust.PAGE.read_text() == trust.page(), "run `python benchmarks/trust.py`"


def test_every_harmful_fault_was_caught_and_there_were_enough_of_each_kind() -> None:
    found = json.loads((RESULTS / "mutations.json").read_text())
    assert found["total"]["injected"] >= 10_000
    assert found["total"].get("missed", 0) == 0
    for kind, counts in found["kinds"].items():
        assert counts["caught"] == counts["harmful"] >= 200, kind


def test_long_training_neither_drifted_nor_grew() -> None:
    found = json.loads((RESULTS / "soak.json").read_text())
    assert found["steps"] >= 100_000
    assert found["differences"] == 0
    assert found["plans_made"] == found["shapes"]
