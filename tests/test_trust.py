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


def test_no_sample_was_wrong_in_either_mode() -> None:
    found = json.loads((RESULTS / "op-samples.json").read_text())
    assert {(run["how"]["of"], run["how"]["mode"]) for run in found.values()} == {
        (of, mode) for of in ("ops", "modules") for mode in ("exact", "fast")
    }
    for name, run in found.items():
        assert run["counts"]["wrong"] == run["counts"]["foreign exception"] == 0, name
        assert run["subjects"] >= (114 if run["how"]["of"] == "modules" else 540), name
        assert run["counts"]["refused"] <= 0.05 * sum(run["counts"].values()), name
    assert {"generated", "traced"} <= {run["how"]["kernels"] for run in found.values()}


@pytest.mark.parametrize("file", ["transformers-models.json", "transformers-models-fast.json"])
def test_no_model_was_wrong_and_few_were_refused(file: str) -> None:
    counts = json.loads((RESULTS / file).read_text())["counts"]
    trained = sum(n for outcome, n in counts.items() if outcome != "skipped")
    assert counts["differs"] == counts["foreign exception"] == 0
    assert trained >= 120
    assert counts["refused"] <= 0.05 * trained


def test_no_random_program_was_wrong() -> None:
    for name in ("fuzz", "fuzz-traced"):
        found = json.loads((RESULTS / f"{name}.json").read_text())
        assert found["wrong"] == []
        assert found["programs"] > 500


def test_training_in_mode_fast_neither_drifted_nor_grew() -> None:
    found = json.loads((RESULTS / "soak-fast.json").read_text())
    assert found["mode"] == "fast"
    assert found["differences"] == 0
    assert found["plans_made"] == found["shapes"]


def test_every_fault_that_is_listed_has_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import trust_faults

    for line in trust_faults.TROUBLE:
        for test in line.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (Path(__file__).parent / file).read_text(), test


def test_what_is_wrong_with_a_training_on_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import soak_gpu

    ours = {"system": "takeback", "seed": 0, "plans made": 1}
    fine = {
        "steps": 20,
        "of": 20,
        "groupings of the same curves that are as far apart": 0.4,
        "trainings": [ours | {"growth": {"device MiB": 0.0, "host MiB": 3.0, "objects": 2}}],
    }
    assert soak_gpu.problems(fine) == []
    growth = {"device MiB": 9.0, "host MiB": 99.0, "objects": 9999}
    bad = {"steps": 10, "groupings of the same curves that are as far apart": 0.03}
    bad |= {"trainings": [ours | {"growth": growth, "plans made": 2}]}
    assert len(soak_gpu.problems(fine | bad)) == 6
    assert soak_gpu.distance([[1.0, 2.0]], [[1.0, 1.0], [1.0, 3.0]]) == 0.0
    assert soak_gpu.distance([[1.0, 2.0]], [[2.0, 3.0]]) == 1.0
    apart = [[1.0], [1.1], [1.2], [2.0], [2.1], [2.2]]
    assert soak_gpu.by_chance(apart, 3) == (
        pytest.approx(1.0),
        2 / 20,
    )  # also the other way round
    assert soak_gpu.by_chance([[1.0], [2.0], [1.1], [1.9]], 2)[1] == 1.0


@pytest.mark.slow
def test_step_of_large_buffers_at_a_small_size_has_eagers_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    import big_buffers

    found = big_buffers.compare(4 * big_buffers.COLUMNS, "keep")
    assert found["differences"] == []
    assert found["replays"] == big_buffers.STEPS - 1
    assert found["elements in one buffer"] == 4 * big_buffers.COLUMNS
    assert big_buffers.FULL > 1 << 31
