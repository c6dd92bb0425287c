"""The long run of benchmarks/soak.py, for some hundred steps: shapes change all the time, nothing grows."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_nothing_grows_and_nothing_drifts_over_some_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    monkeypatch.setattr(soak, "COMPARED", {"exact": 10, "fast": 10})
    monkeypatch.setattr(soak, "ROWS", (7, 3, 12, 1))
    found = soak.soak(400, measurements=12)
    assert found.differences == 0
    assert found.plans_made == len(soak.ROWS)
    assert found.replays > 350
    assert found.growth(found.objects) < 20
    assert found.problems == []


def test_drift_and_growth_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    rising = list(range(0, 16_000, 1000))
    found = soak.Outcome(16, 1, [float(r) for r in rising], rising, [9] * 16, 9, 1)
    assert len(found.problems) == 4
    flat = soak.Outcome(16, 0, [1.0] * 16, [1] * 16, [8] * 16, 8, 1)
    assert flat.problems == []
