"""Memory over one step of the zoo's GPT, in eager and planned: the data of the README's picture.

    python benchmarks/memory_curve.py --out benchmarks/results/memory-curve-cpu.json

Out: for eager and each `memory=`, the bytes alive above what is resident during each op, as the report of a real step
has them (`eager_curve`, `peak_curve`). `python docs/plots.py` draws it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import takeback as tb
from common import machine
from takeback import zoo

MODES = ("auto", "min")


def curve(values: tuple[int, ...]) -> list[float]:
    return [round(value / 2**20, 2) for value in values]


def measure(size: str) -> dict[str, object]:
    rows: list[dict[str, object]] = []
    for memory in MODES:
        case = zoo.case("gpt", size=size)
        step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=memory)
        for _ in range(3):
            step(*case.batch)
        report = step.report()
        if not rows:
            rows.append({"system": "eager", "above_resident_mib": curve(report.eager_curve)})
        rows.append({"system": f"takeback {memory}", "above_resident_mib": curve(report.peak_curve)})
        resident = report.resident_bytes / 2**20
    return {"machine": machine(), "case": f"gpt/{size}", "resident_mib": round(resident, 2), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="bench")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps(measure(arguments.size)) + "\n")


if __name__ == "__main__":
    main()
