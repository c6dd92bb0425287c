"""Draws random programs for as long as it is told, in both modes, and writes down how many, and what became of them.

    PYTHONPATH=tests:tests/fuzz python tests/fuzz/run_fuzz.py [--minutes 60] [--seed 0] [--traced] [--json PATH]

Each program is trained in mode exact, and in mode fast with eager's kernels in clusters. With `--traced` in mode fast
alone, with what Inductor would be given, op by op: each such kernel is compared with double precision. What is wrong is
shrunk and printed, and the next seed begins. Exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import platform
import sys
import time
import traceback
from pathlib import Path

import torch
from drawn_steps import APPLY, Recipe, recipes
from hypothesis import HealthCheck, Phase, given, seed, settings
from trials import judge

from takeback.compiler.passes import recompute
from takeback.compiler.run import kernels, plan_maker
from takeback.compiler.run.inductor import Compiled, NotCompiled, interpret_cluster

EXAMPLES = 100  #: of each seed


class Outcomes:
    """Counted by mode."""

    def __init__(self, *, traced: bool) -> None:
        self.counts = {mode: collections.Counter[str]() for mode in (("fast",) if traced else ("exact", "fast"))}
        self.traced = traced
        self.reasons: collections.Counter[str] = collections.Counter()
        self.programs = 0

    def try_(self, recipe: Recipe) -> None:
        for mode, counts in self.counts.items():
            found = judge(recipe, mode, whole=not self.traced)
            if found == "no program":
                return
            counts[found.partition(":")[0]] += 1
            self.programs += mode == "fast"
            if found.startswith("refused"):
                self.reasons[found.removeprefix("refused: ")] += 1


def _not_compiled(cluster: object, device: object) -> Compiled:
    raise NotCompiled("eager's kernels were asked for")


def fuzz(minutes: float, first_seed: int, outcomes: Outcomes) -> list[str]:
    """What was wrong, each with its smallest program."""
    end, number, found = time.monotonic() + 60 * minutes, first_seed, []
    while time.monotonic() < end:

        @seed(number)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(recipes())
        def run(recipe: Recipe) -> None:
            if time.monotonic() < end + 120:
                outcomes.try_(recipe)

        try:
            run()
        except Exception:
            found.append(f"seed {number}: {traceback.format_exc()[-4000:]}")
            print(found[-1], flush=True)
        number += 1
        print(f"seed {number}: {outcomes.programs:,} programs, {outcomes.counts}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traced", action="store_true", help="clusters run as what Inductor would be given")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    kernels.compile_cluster = interpret_cluster if asked.traced else _not_compiled
    if not asked.traced:
        plan_maker.in_one_kernel = lambda optimizers: False
    for name in ("_ALIKE_VISITS", "_LOWEST_VISITS", "_LEVEL_VISITS"):
        setattr(recompute, name, 4)  # any choice of what to rebuild has eager's bits, so a fair one will do
    began, outcomes = time.monotonic(), Outcomes(traced=asked.traced)
    wrong = fuzz(asked.minutes, asked.seed, outcomes)
    if asked.json is not None:
        found = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "minutes": round((time.monotonic() - began) / 60, 1),
            "seed": asked.seed,
            "traced": asked.traced,
            "instructions": len(APPLY),
            "programs": outcomes.programs,
            "counts": {mode: dict(counts) for mode, counts in outcomes.counts.items()},
            "reasons": dict(outcomes.reasons.most_common(20)),
            "wrong": wrong,
        }
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
