"""What memory targets cost in mode fast, predicted for a GPU without one: added time at parts of eager's peak.

    python benchmarks/target_prices.py [--models gpt2,bert,dit,t5,qwen2] [--targets 0.15x,0.2x,0.3x,0.4x]
                                       [--gpu H200] [--json FILE]

Nothing is run and nothing is measured but the time that planning takes, by this process alone: one plan after the
other, each searched for anew. Rows are merged into the file under the commit that made them, so that two checkouts can
be put beside one another. Models are those of benchmarks/predict_gpu.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import takeback as tb
from common import machine
from predict_gpu import MIB, _without_bytes
from revision import commit
from takeback.errors import MemoryTargetError

RESULTS = Path(__file__).parent / "results" / "target-prices.json"


def priced(model: str, target: str, gpu: str) -> dict[str, Any]:
    """One plan."""
    case = _without_bytes(model, tiny=False)
    begun = time.process_time()
    row: dict[str, Any] = {"model": model, "target": target, "code": commit()}
    asked = {"mode": "fast", "memory": target, "device": "cuda", "gpu": gpu}
    try:
        report = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, **asked)
    except MemoryTargetError:
        return row | {"added": None}
    return row | {
        "added": round(report.added_s / report.step_s, 4),
        "peak_mib": round(report.peak_bytes / MIB, 1),
        "eager_peak_mib": round(report.eager_peak_bytes / MIB, 1),
        "planning_cpu_s": round(time.process_time() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt2", "bert", "dit", "t5", "qwen2"])
    parser.add_argument("--targets", type=lambda text: text.split(","), default=["0.15x", "0.2x", "0.3x", "0.4x"])
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {"rows": []}
    kept |= {"machine": machine(), "gpu": given.gpu}
    for model in given.models:
        for target in given.targets:
            row = priced(model, target, given.gpu)
            which = [row[key] for key in ("model", "target", "code")]
            kept["rows"] = [r for r in kept["rows"] if [r[key] for key in ("model", "target", "code")] != which] + [row]
            print(row, flush=True)
            given.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
