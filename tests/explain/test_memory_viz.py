"""The snapshot is one that torch's own reader takes, and holds what the report says."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from reports import fixed_report, zoo_report
from torch.cuda import _memory_viz

from takeback.compiler.explain.memory_viz import as_snapshot, write_snapshot


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_snapshot_is_read_by_torch_and_peaks_as_the_report_does(name: str, tmp_path: Path) -> None:
    report = zoo_report(name)
    data = pickle.loads(write_snapshot(report, tmp_path / "s.pickle").read_bytes())
    assert "segments: 2" in _memory_viz.segsum(data)
    assert "entries" in _memory_viz.trace(data)
    assert "<html" in _memory_viz.trace_plot(data)
    held: dict[int, int] = {}
    most = 0
    for event in data["device_traces"][0]:
        if event["action"] == "alloc":
            end = event["addr"] + event["size"]
            assert not any(a < end and event["addr"] < a + size for a, size in held.items()), "two values in one place"
            held[event["addr"]] = event["size"]
            most = max(most, sum(held.values()))
        elif event["action"] == "free_completed":
            del held[event["addr"]]
    assert not held
    assert most <= report.arena_bytes
    assert most > 0.9 * max(report.peak_curve)


def test_frames_name_module_op_and_line() -> None:
    frames = [event["frames"][0] for event in as_snapshot(fixed_report())["device_traces"][0]]
    assert {"filename", "line", "name"} == set(frames[0])
    assert any(frame["line"] == 66 and frame["name"] == "layers.3: mm" for frame in frames)
