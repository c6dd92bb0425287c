"""benchmarks/gpu.py, tiny and on the CPU: rows are merged, compared and drawn as they say; a failing row is one row."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from test_site import PLOTS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_results")


@pytest.fixture
def gpu(results: ModuleType) -> ModuleType:
    return importlib.import_module("gpu")


def row(system: str, ms: float, peak: float, process: int = 0, **more: Any) -> dict[str, Any]:
    sizes = {"peak_mib": peak, "reserved_mib": 2 * peak, "between_mib": 120.0, "resident_mib": 100.0}
    others = {"host_ms": 1.0, "first_s": 2.0, "cache": "cold", "loss": 0.5}
    return {"model": "m", "system": system, "process": process, "ms": ms, **sizes, **others, **more}


def test_new_row_replaces_its_own_and_no_other(results: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    one = results.Results.of(file)
    one.add_({"torch": "2.11"}, row("eager", 3.0, 500.0))
    one.add_({"torch": "2.11"}, row("compile", 2.0, 400.0))
    again = results.Results.of(file)
    again.add_({}, {"model": "m", "system": "eager", "process": 0, "error": "out of memory"})
    again.add_({"torch": "2.13"}, row("compile", 1.0, 400.0, process=1))
    data = json.loads(file.read_text())
    assert [(r["system"], r["process"]) for r in data["rows"]] == [("eager", 0), ("compile", 0), ("compile", 1)]
    assert data["rows"][0]["error"] == "out of memory"
    assert data["machine"] == {"torch": "2.13"}
    assert [r.get("otherwise") for r in data["rows"]] == [{"torch": "2.11"}, {"torch": "2.11"}, None]


def test_ratios_are_of_medians_to_torch_compile(results: ModuleType) -> None:
    found = results.Results(None)
    for process, ms in enumerate((9.0, 2.0, 4.0)):
        found.add_({}, row("compile", ms, 500.0, process))
    planned = {"peak_mib": 278.0, "resident_mib": 100.0, "clusters": 7}
    found.add_({}, row("fast@auto", 3.0, 300.0, planned=planned))
    ours = results.cells(found.median("m", "fast@auto"), found.median("m", "compile"))
    by_name = dict(zip(results.HEAD, ours, strict=True))
    assert ours[3] == "0.750"  # 3 of 4 ms
    assert (ours[6], by_name["above"]) == ("0.600", "0.500")  # 300 of 500; 200 of 400 above 100
    assert (by_name["planned"], by_name["fused"]) == ("0.989", "7")  # 178 planned, 300 - 120 measured


def test_peak_of_another_system_becomes_a_target(gpu: ModuleType, results: ModuleType) -> None:
    found = results.Results(None)
    assert gpu.asked_of("fast@12GiB", "m", found) == "fast@12GiB"
    assert gpu.asked_of("fast@peak:compile@0.9", "m", found) is None
    found.add_({}, row("compile@0.9", 2.0, 400.0))
    assert gpu.asked_of("fast@peak:compile@0.9", "m", found) == f"fast@{396 << 20}B"


def test_failing_row_names_its_error(gpu: ModuleType) -> None:
    said = ["Traceback:", "torch._dynamo.exc.InternalTorchDynamoError: no", "Set TORCHDYNAMO_VERBOSE=1 for more"]
    assert gpu.guilty(said) == said[1]
    assert gpu.guilty(["just", "words"]) == "words"
    assert gpu.guilty([]) == ""


def test_losses_are_drawn_with_their_distance() -> None:
    losses = {"eager": [4.0, 3.0], "eager@2": [4.0, 3.5], "fast@auto": [4.5, 3.0]}
    data = {"machine": {"device": "GPU", "torch": "2.11"}}
    data["rows"] = [{"model": "m", "system": s, "losses": v} for s, v in losses.items()]  # type: ignore[assignment]
    picture = PLOTS.loss_curves("m", "title")(data)
    assert picture.count("<polyline") == 3
    assert "mean distance from eager 0.2500, of eager with other dropout 0.2500; GPU" in picture


@pytest.mark.slow
def test_run_and_curves_on_the_cpu(tmp_path: Path) -> None:
    rows, curves, cache = tmp_path / "rows.json", tmp_path / "curves.json", tmp_path / "cache"
    where = ["--device", "cpu", "--tiny", "--mode", "exact", "--cache", str(cache)]
    script = [sys.executable, str(BENCHMARKS / "gpu.py")]
    systems = "eager,fast@auto,liger,fast@peak:compile"
    run = [*script, "run", "bert", "--systems", systems, "--steps", "3", "--json", str(rows), *where]
    subprocess.run(run, check=True, timeout=250)
    eager, ours, liger, at_peak = json.loads(rows.read_text())["rows"]
    assert [ours["system"], ours["model"], ours["asked"]] == ["exact@auto", "bert", "exact@auto"]
    assert ours["loss"] == eager["loss"]  # mode exact: the same steps
    assert ours["resident_mib"] == pytest.approx(eager["resident_mib"])
    assert ours["planned"]["resident_mib"] == pytest.approx(ours["resident_mib"], rel=0.01)
    assert "Liger-Kernel has no layers for bert" in liger["error"]
    assert "no peak of compile" in at_peak["error"]
    learn = [*script, "curves", "gpt2", "--systems", "eager,eager@2,fast@auto", "--steps", "4", "--json", str(curves)]
    subprocess.run([*learn, *where], check=True, timeout=250)
    losses = {r["system"]: r["losses"] for r in json.loads(curves.read_text())["rows"]}
    assert losses["eager"] == losses["exact@auto"] != losses["eager@2"]
