"""The rows of benchmarks/gpu.py: kept in a file, and shown as a table beside torch.compile's. Imports no torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]  #: a gpu_systems.GpuRow as data, with the number of its `process`; or an `error`


@dataclass
class Results:
    """The rows of a file. A new one replaces that of the same model, system and process. `machine` is the last one's;
    where that of an older row differs, the row says so itself (`otherwise`)."""

    path: Path | None
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path | None) -> Results:
        if path is None or not path.exists():
            return cls(path)
        data = json.loads(path.read_text())
        return cls(path, data["machine"], data["rows"])

    def add_(self, machine: dict[str, Any], row: Row) -> None:
        same = [i for i, other in enumerate(self.rows) if _key(other) == _key(row)]
        if machine and self.machine and machine != self.machine:
            changed = {
                k: self.machine.get(k) for k in (*self.machine, *machine) if machine.get(k) != self.machine.get(k)
            }
            print(f"note: the file has rows that were measured otherwise: {changed}", flush=True)
            for other in self.rows:
                other["otherwise"] = changed | other.get("otherwise", {})
        self.machine = machine or self.machine
        self.rows[slice(same[0], same[0] + 1) if same else slice(len(self.rows), None)] = [row]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"machine": self.machine, "rows": self.rows}, indent=1) + "\n")

    def median(self, model: str, system: str) -> Row | None:
        """Over the processes that measured it; what is not a number is that of the first."""
        found = [r for r in self.rows if (r["model"], r["system"]) == (model, system)]
        good = [r for r in found if "error" not in r]
        if not good:
            return found[0] if found else None
        numbers = [k for k, v in good[0].items() if isinstance(v, float) and all(r.get(k) is not None for r in good)]
        return good[0] | {k: statistics.median(r[k] for r in good) for k in numbers} | {"processes": len(good)}


def _key(row: Row) -> tuple[object, ...]:
    return row["model"], row["system"], row.get("process", 0)


def in_words(row: Row) -> str:
    if "error" in row:
        return f"{row['model']} {row['system']}: {row['error']}"
    peak = "" if row["peak_mib"] is None else f", peak {row['peak_mib']:.0f} MiB (reserved {row['reserved_mib']:.0f})"
    first = f"first three {row['first_s']:.1f} s ({row['cache']})"
    return f"{row['model']} {row['system']}: {row['ms']:.2f} ms, host {row['host_ms']:.2f}{peak}, {first}"


HEAD = (
    *("model", "system", "ms", "×", "host", "peak", "×", "above", "reserved", "resident", "planned"),
    *("fused", "first s", "loss"),
)


def cells(row: Row, base: Row | None) -> list[str]:
    """`above`: the peak above resident, as a part of torch.compile's; `planned`: takeback's own count of what a step
    adds, as a part of what was measured above what is alive between steps; `fused`: how many kernels its plan has."""
    if "error" in row:
        return [row["model"], row["system"], "failed"]
    base, planned = base or {}, row.get("planned") or {}
    return [
        *(row["model"], row["system"], f"{row['ms']:.2f}", _part(row["ms"], base.get("ms")), f"{row['host_ms']:.1f}"),
        *(_mib(row["peak_mib"]), _part(row["peak_mib"], base.get("peak_mib")), _part(_above(row), _above(base))),
        *(_mib(row["reserved_mib"]), _mib(row["resident_mib"]), _part(_above(planned), _above(row, "between_mib"))),
        str(planned.get("kernels") or planned.get("clusters") or ""),
        f"{row['first_s']:.1f} {row['cache']}",
        f"{row['loss']:.4f}",
    ]


def _part(value: float | None, of: float | None) -> str:
    return f"{value / of:.3f}" if value and of else ""


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _above(row: Row, what: str = "resident_mib") -> float | None:
    peak: float | None = row.get("peak_mib")
    return None if peak is None else peak - row[what]


def show(results: Results, models: Iterable[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEAD, box=box.SIMPLE_HEAD, pad_edge=False)
    for model in models:
        base = results.median(model, "compile")
        base = None if base is None or "error" in base else base
        for system in dict.fromkeys(r["system"] for r in results.rows if r["model"] == model):
            row = results.median(model, system)
            if row is not None:
                table.add_row(*cells(row, base))
    Console(width=170).print(table)
