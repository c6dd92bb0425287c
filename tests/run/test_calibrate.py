"""The measured rates: kept in the cache directory, read from it, added to, and never a reason for a step to fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from takeback.compiler.passes.cost import Rates
from takeback.compiler.run import calibrate
from takeback.compiler.run.rate_table import table_rates
from takeback.options import open_cache

KNOWN = Rates(1e10, 1e9, 1e-6, {"float32": 1e11}, 0.5, 0.4)
SINGLE = frozenset({torch.float32})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """What was measured, dtype by dtype; nothing is."""
    calls: list[list[str]] = []

    def pretend(device: str, dtypes: Any, known: Rates | None = None) -> Rates:
        names = [str(d).removeprefix("torch.") for d in dtypes]
        calls.append(names)
        base = known or replace(KNOWN, flops_per_s={})
        return replace(base, flops_per_s={**base.flops_per_s, **dict.fromkeys(names, 2e11)})

    monkeypatch.setattr(calibrate, "measure", pretend)
    calibrate._rates.cache_clear()
    yield calls
    calibrate._rates.cache_clear()


def kept_in(folder: Path) -> bytes | None:
    return open_cache(folder).read("rates", calibrate._machine("cpu", torch.get_num_threads()))


def plant(folder: Path, text: bytes) -> None:
    assert open_cache(folder).write("rates", calibrate._machine("cpu", torch.get_num_threads()), text)


def test_rates_are_written_once_and_read_by_the_next_process(tmp_path: Path, measured: list[list[str]]) -> None:
    first = calibrate.rates("cpu", SINGLE, open_cache(tmp_path / "new" / "folder"))
    assert measured == [["float32"]]
    assert kept_in(tmp_path / "new" / "folder") is not None
    calibrate._rates.cache_clear()  # as in a new process
    assert calibrate.rates("cpu", SINGLE, open_cache(tmp_path / "new" / "folder")) == first
    assert measured == [["float32"]]


def test_rates_are_read_from_the_file_once_in_a_process(tmp_path: Path, measured: list[list[str]]) -> None:
    first = calibrate.rates("cpu", SINGLE, open_cache(tmp_path))
    for entry in tmp_path.iterdir():
        entry.unlink()
    assert calibrate.rates("cpu", SINGLE, open_cache(tmp_path)) is first
    other = calibrate.rates("cpu", SINGLE, open_cache(tmp_path / "other"))
    assert other == first
    assert len(measured) == 2, "another directory is another cache"


def test_missing_dtype_is_added_to_what_is_known(tmp_path: Path, measured: list[list[str]]) -> None:
    plant(tmp_path, json.dumps(asdict(KNOWN)).encode())
    found = calibrate.rates("cpu", frozenset({torch.bfloat16, torch.int64, torch.bool}), open_cache(tmp_path))
    assert measured == [["bfloat16"]]
    assert found.flops_per_s == {"float32": 1e11, "bfloat16": 2e11}
    assert found.bytes_per_s == KNOWN.bytes_per_s
    assert set(json.loads(kept_in(tmp_path) or b"")["flops_per_s"]) == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"text"', "{}", '{"bytes_per_s": 1}', json.dumps({**asdict(KNOWN), "more": 1})],
)
def test_entry_that_makes_no_sense_is_measured_anew_and_replaced(
    text: str, tmp_path: Path, measured: list[list[str]]
) -> None:
    plant(tmp_path, text.encode())
    calibrate.rates("cpu", SINGLE, open_cache(tmp_path))
    assert measured == [["float32"]]
    assert set(json.loads(kept_in(tmp_path) or b"")) == set(asdict(KNOWN))


def test_entry_of_other_bytes_than_text_is_ignored(tmp_path: Path, measured: list[list[str]]) -> None:
    plant(tmp_path, b"\xff\xfe\x00\x80")
    calibrate.rates("cpu", SINGLE, open_cache(tmp_path))
    assert measured == [["float32"]]


@pytest.mark.parametrize(
    "wrong",
    [{"flops_per_s": []}, {"flops_per_s": None}, {"bytes_per_s": None}, {"bytes_per_s": 0.0}, {"maths_per_s": "fast"}],
)
def test_entry_with_values_of_another_kind_is_measured_anew(
    wrong: dict[str, Any], tmp_path: Path, measured: list[list[str]]
) -> None:
    plant(tmp_path, json.dumps({**asdict(KNOWN), **wrong}).encode())
    calibrate.rates("cpu", SINGLE, open_cache(tmp_path))
    assert measured == [["float32"]]


def test_directory_that_cannot_be_written_is_no_error(tmp_path: Path, measured: list[list[str]]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="cannot keep anything in the cache folder"):
        found = calibrate.rates("cpu", SINGLE, open_cache(blocked / "cache"))
    assert found.flops_per_s == {"float32": 2e11}
    assert blocked.read_text(encoding="utf-8") == "not a directory"


def test_rates_from_the_table_are_said_to_be(tmp_path: Path) -> None:
    assert calibrate.OpCost(KNOWN).notes == ()
    [note] = calibrate.OpCost(replace(KNOWN, source="table")).notes
    assert "was taken from a table" in note


def test_measuring_gives_positive_rates_and_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_TURNS", (2,))
    monkeypatch.setattr(calibrate, "_BYTES", 1 << 16)
    monkeypatch.setattr(calibrate, "_SIDE", 64)
    monkeypatch.setattr(calibrate, "_OPS", 10)
    before = torch.get_rng_state()
    monkeypatch.setattr(calibrate, "_STEADY", float("inf"))
    found = calibrate.measure("cpu", [torch.float32, torch.bfloat16])
    assert found.source == "measured"
    assert torch.equal(torch.get_rng_state(), before)
    assert set(found.flops_per_s) == {"float32", "bfloat16"}
    numbers = (found.bytes_per_s, found.maths_per_s, found.op_s, found.convolution, found.attention)
    assert all(0 < n < float("inf") for n in (*numbers, *found.flops_per_s.values()))
    added = calibrate.measure("cpu", [torch.float64], found)
    assert added == replace(found, flops_per_s={**found.flops_per_s, "float64": added.flops_per_s["float64"]})


def test_measuring_inside_autocast_measures_what_its_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's first call may be inside `torch.autocast`, and the file outlives it."""
    monkeypatch.setattr(calibrate, "_TURNS", (2,))
    monkeypatch.setattr(calibrate, "_BYTES", 1 << 12)
    monkeypatch.setattr(calibrate, "_SIDE", 16)
    monkeypatch.setattr(calibrate, "_OPS", 1)
    honest = torch.conv2d
    seen: set[torch.dtype] = set()

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = honest(*args, **kwargs)
        seen.add(result.dtype)
        return result

    monkeypatch.setattr(torch, "conv2d", watched)
    with torch.autocast("cpu", torch.bfloat16):
        calibrate.measure("cpu", [torch.float32])
    assert seen == {torch.float32}


# -- where measuring is not steady ---------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """What the experiments take, in both halves; nothing is run."""
    times: dict[str, tuple[float, float]] = {}
    usual = (2e-3, 2.2e-3)
    monkeypatch.setattr(calibrate, "_halves", lambda tried, device: {name: times.get(name, usual) for name in tried})
    monkeypatch.setattr(calibrate, "_BYTES", 1 << 12)
    monkeypatch.setattr(calibrate, "_SIDE", 16)
    return times


def test_steady_halves_give_measured_rates_from_the_faster(timed: dict[str, tuple[float, float]]) -> None:
    timed["bytes"] = (4e-3, 3.2e-3)
    found = calibrate.measure("cpu", [torch.float32])
    assert found.source == "measured"
    assert found.bytes_per_s == 3 * (1 << 12) / 3.2e-3


@pytest.mark.parametrize("name", ["bytes", "maths", "op", "convolution", "attention", "float32"])
def test_halves_that_disagree_give_the_row_of_the_table(name: str, timed: dict[str, tuple[float, float]]) -> None:
    timed[name] = (2e-3, 2.7e-3)
    found = calibrate.measure("cpu", [torch.float32, torch.float64])
    row = table_rates("cpu", "", torch.get_num_threads())
    assert found.source == "table"
    assert found == replace(row, flops_per_s={d: row.flops_per_s[d] for d in ("float32", "float64")})


def test_dtype_that_is_not_steady_is_added_from_the_table_and_the_rest_stays(
    timed: dict[str, tuple[float, float]],
) -> None:
    known = calibrate.measure("cpu", [torch.float32])
    timed["bfloat16"] = (1e-3, 9e-3)
    found = calibrate.measure("cpu", [torch.bfloat16], known)
    row = table_rates("cpu", "", torch.get_num_threads())
    assert found == replace(
        known, flops_per_s={**known.flops_per_s, "bfloat16": row.flops_per_s["bfloat16"]}, source="table"
    )


def test_what_is_added_to_rates_of_the_table_comes_from_the_table(timed: dict[str, tuple[float, float]]) -> None:
    timed["op"] = (1e-3, 9e-3)
    known = calibrate.measure("cpu", [torch.float32])
    timed.clear()
    assert calibrate.measure("cpu", [torch.float64], known).source == "table"


def test_rates_of_the_table_are_kept_so_that_the_next_process_plans_with_them(
    tmp_path: Path, timed: dict[str, tuple[float, float]]
) -> None:
    timed["op"] = (1e-3, 9e-3)
    calibrate._rates.cache_clear()
    first = calibrate.rates("cpu", SINGLE, open_cache(tmp_path))
    timed.clear()
    calibrate._rates.cache_clear()
    second = calibrate.rates("cpu", SINGLE, open_cache(tmp_path))
    calibrate._rates.cache_clear()
    assert first == second
    assert first.source == "table"


def test_busy_second_half_is_seen_by_the_real_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is slowed down for the second half of the turns."""
    monkeypatch.setattr(calibrate, "_BYTES", 1 << 12)
    monkeypatch.setattr(calibrate, "_SIDE", 16)
    monkeypatch.setattr(calibrate, "_OPS", 1)
    monkeypatch.setattr(calibrate, "_TURNS", (4,))
    seen = 0

    def clock() -> float:
        nonlocal seen
        seen += 1
        turn = (seen - 1) // 12  # two readings of six experiments
        return seen * (1.0 if turn < 3 else 2.0)

    monkeypatch.setattr(calibrate.time, "perf_counter", clock)
    assert calibrate.measure("cpu", [torch.float32]).source == "table"


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H100 80GB HBM3"])
def test_gpu_that_is_known_is_not_measured(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(calibrate, "measure", lambda *given: asked.append(name) or KNOWN)
    calibrate._rates.cache_clear()
    found = calibrate.rates("cuda", SINGLE, open_cache(tmp_path))
    calibrate._rates.cache_clear()
    if name == "NVIDIA H200":
        assert replace(found, source="table") == table_rates("cuda", name, 1)
        assert not calibrate.OpCost(found).notes
    assert bool(asked) is (name != "NVIDIA H200")


def test_table_knows_the_gpu_it_was_measured_on_and_scales_a_cpu_by_its_threads() -> None:
    known, other = table_rates("cuda", "NVIDIA H200", 1), table_rates("cuda", "NVIDIA Something", 1)
    assert known.bytes_per_s > other.bytes_per_s
    one, four, many = (table_rates("cpu", "", n) for n in (1, 4, 64))
    assert four.flops_per_s["float32"] == 4 * one.flops_per_s["float32"]
    assert four.bytes_per_s == 4 * one.bytes_per_s
    assert many.bytes_per_s == 8 * one.bytes_per_s
    for row in (known, other, one):
        assert row.source == "table"
        assert row.op_s > 0
        assert {"float32", "float64", "bfloat16", "float16"} == set(row.flops_per_s)
