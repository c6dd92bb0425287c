"""What the checks before a replay cost: what a plan assumes is compared before each, as a share of the steady step.

    python benchmarks/checks.py [--cases gpt/bench resnet/full ...] [--out benchmarks/results/checks-cpu.json]

For every model of benchmarks/cpu.py: a few steps, then the median of the steady ones beside the median of the checks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import takeback as tb
from common import machine
from first_minute import _checks, _seconds
from takeback import zoo

CASES = ("gpt/bench", "resnet/full", "gpt_context/bench", "dit/bench", "ssm/bench")
WARM, STEADY, LOOKS = 3, 5, 50


@dataclass(frozen=True)
class ChecksRow:
    """One model. `share` is the goal's figure: at most 0.005."""

    case: str
    steady_step_s: float
    checks_us: float
    share: float
    ops: int


def measure(name: str) -> ChecksRow:
    model, _, size = name.partition("/")
    case = zoo.case(model, size=size)
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory="keep")
    for _ in range(WARM):
        step(*case.batch)
    steady = statistics.median(_seconds(lambda: step(*case.batch), STEADY))
    checks = statistics.median(_seconds(_checks(step, case.batch), LOOKS))
    assert step._last is not None
    return ChecksRow(
        name, round(steady, 4), round(1e6 * checks, 1), round(checks / steady, 6), len(step._last.original.ops)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "checks-cpu.json")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rows = []
    for name in arguments.cases:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    arguments.out.write_text(json.dumps({"machine": machine(), "rows": list(map(asdict, rows))}, indent=1) + "\n")


if __name__ == "__main__":
    main()
