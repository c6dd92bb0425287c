"""Lengths that never come again: what each leaves behind in the process, in eager and with takeback.

    python benchmarks/new_lengths.py [--lengths 800] [--json PATH]

The model of benchmarks/soak.py is trained for some steps on batches of every number of rows from 1 on, each system in a
process of its own. Over the second half of the lengths the objects that Python's collector knows and the resident
memory are counted: torch itself keeps something for each shape, so eager's growth stands beside. Exits with 1 if
takeback leaves more objects behind than `MOST_OBJECTS` for a length.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import takeback as tb

sys.path.insert(0, str(Path(__file__).parent))

import soak
from common import machine

STEPS = {"eager": 60, "exact": 12, "fast": 60}  #: of a length; after 50 mode fast compiles kernels for it alone
PLANS = 8
MOST_OBJECTS = 10.0  #: of a length: caches that are bounded fill by and by


def train(system: str, lengths: int) -> dict[str, float]:
    """What a length leaves behind, in the mean over the second half."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = soak.Small()
    optimizer = soak._optimizer(model, "fast")
    if system == "eager":

        def step(x: torch.Tensor, y: torch.Tensor) -> object:
            return soak._plain(model, optimizer, x, y)
    else:
        step = tb.compile_step(model, soak.loss_fn, optimizer, mode=system, max_plans=PLANS)
    measured = []
    warnings.filterwarnings("ignore", "there are .* plans and no room for more")
    for rows in track(range(1, lengths + 1), system, transient=True):
        for _ in range(STEPS[system]):
            step(torch.randn(rows, 16), torch.randint(4, (rows,)))
        if rows in (lengths // 2, lengths):
            gc.collect()
            measured.append((len(gc.get_objects()), soak._resident_mib()))
    (objects, mib), (more, at_end) = measured
    half = lengths - lengths // 2
    return {"objects": round((more - objects) / half, 2), "mib": round((at_end - mib) / half, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, default=800)
    parser.add_argument("--json", type=Path, help="write the outcome there")
    parser.add_argument("--system", choices=tuple(STEPS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.system is not None:
        print(json.dumps(train(given.system, given.lengths)))
        return 0
    found: dict[str, Any] = {}
    for system in STEPS:
        command = [sys.executable, __file__, "--system", system, "--lengths", str(given.lengths)]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[system] = json.loads(told.splitlines()[-1])
        print(system, found[system], flush=True)
    if given.json is not None:
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "lengths": given.lengths,
            "steps": STEPS,
        }
        given.json.write_text(json.dumps({**about, "left by a length": found}, indent=1) + "\n")
    return 1 if max(found[mode]["objects"] for mode in ("exact", "fast")) > MOST_OBJECTS else 0


if __name__ == "__main__":
    sys.exit(main())
