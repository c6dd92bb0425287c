"""The long run of benchmarks/soak.py, for some hundred steps: shapes change all the time, nothing grows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def test_nothing_grows_and_nothing_drifts_over_some_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    monkeypatch.setattr(soak, "COMPARED", {"exact": 10, "fast": 10})
    for name, small in {"SHAPES": 7, "AT_A_TIME": 2, "MOVES": {"exact": 50}, "PLANS": 3}.items():
        monkeypatch.setattr(soak, name, small)
    found = soak.soak(500, measurements=12)
    assert found.differences == 0
    assert found.plans_made == found.dropped + 3 > 7
    assert found.plain > 0
    assert found.replays + found.plans_made + found.plain == 500
    assert found.replays > 400
    assert found.growth(found.objects) < 20
    assert found.problems == []


def test_drift_and_growth_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    rising = list(range(0, 16_000, 1000))
    found = soak.Outcome(16, 1, 0, [float(r) for r in rising], rising, [9] * 16, 9, 1)
    assert [problem.split()[0] for problem in found.problems] == ["1", "resident", "there", "9"]
    flat = soak.Outcome(16, 0, 0, [1.0] * 16, [1] * 16, [8] * 16, 8, 1)
    assert flat.problems == []


def test_what_is_not_near_eager_is_judged_by_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    exact = torch.ones(4, dtype=torch.float64)
    eagers = torch.full((4,), 1.02)
    assert soak._no_further(torch.full((4,), 0.97), eagers, exact)
    assert not soak._no_further(torch.full((4,), 0.95), eagers, exact)
    assert not soak._no_further(torch.full((4,), float("nan")), eagers, exact)
