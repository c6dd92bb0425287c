"""Draws random programs for as long as it is told, in both modes, and writes down how many, and what became of them.

    PYTHONPATH=tests:tests/fuzz python tests/fuzz/run_fuzz.py [--minutes 60] [--seed 0] [--traced]
        [--json PATH [--append]]

Each program is trained in mode exact, and in mode fast with eager's kernels in clusters. With `--traced` in mode fast
alone, with what Inductor would be given, op by op: each such kernel is compared with double precision. What is wrong is
shrunk and printed, and the next seed begins; what is tried to shrink it is not counted. Exits with 1 if there was any.
With `--append` the file keeps the runs that it has, and this one comes after them. Nothing is written there by hand.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from drawn_steps import APPLY, Recipe, recipes
from hypothesis import HealthCheck, Phase, given, seed, settings
from trials import judge

from takeback.compiler.passes import recompute
from takeback.compiler.run import kernels, plan_maker
from takeback.compiler.run.inductor import Compiled, NotCompiled, interpret_cluster

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from revision import COMMIT

EXAMPLES = 100  #: of each seed


class Outcomes:
    """Counted by mode."""

    def __init__(self, *, traced: bool) -> None:
        self.counts = {mode: collections.Counter[str]() for mode in (("fast",) if traced else ("exact", "fast"))}
        self.traced = traced
        self.reasons: collections.Counter[str] = collections.Counter()
        self.programs = 0
        self.given_up: list[str] = []
        self.shrinking = False  #: a program was wrong, and smaller ones are looked for

    def try_(self, recipe: Recipe) -> None:
        try:
            found = {mode: judge(recipe, mode, whole=not self.traced) for mode in self.counts}
        except Exception:
            if not self.shrinking:
                self._count_(dict.fromkeys(self.counts, "wrong"))
            self.shrinking = True
            raise
        if not self.shrinking and "no program" not in found.values():
            self._count_(found)

    def _count_(self, found: Mapping[str, str]) -> None:
        self.programs += 1
        for mode, said in found.items():
            outcome, _, told = said.partition(": ")
            self.counts[mode][outcome] += 1
            if outcome == "refused":
                self.reasons[told] += 1
            elif outcome == "given up":
                self.given_up.append(told)


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

        outcomes.shrinking = False
        try:
            run()
        except Exception:
            found.append(f"seed {number}: {traceback.format_exc()[-4000:]}")
            print(found[-1], flush=True)
        number += 1
        print(f"seed {number}: {outcomes.programs:,} programs, {outcomes.counts}", flush=True)
    return found


def runs_in(file: Path | None, *, traced: bool) -> list[dict[str, Any]]:
    """Those that a file of ours has, to which one more is added."""
    if file is None or not file.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(file.read_text()).get("runs", [])
    if not runs:
        raise SystemExit(f"{file} has no runs to which one could be added: leave --append out, and it is written anew")
    if any(run["traced"] != traced for run in runs):
        raise SystemExit(f"{file} has runs of the other kind: --traced or not")
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traced", action="store_true", help="clusters run as what Inductor would be given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="to the runs that the file has")
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
        run = {
            "date": datetime.date.today().isoformat(),
            "commit": COMMIT,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "minutes": round((time.monotonic() - began) / 60, 1),
            "seed": asked.seed,
            "traced": asked.traced,
            "instructions": len(APPLY),
            "programs": outcomes.programs,
            "counts": {mode: dict(counts) for mode, counts in outcomes.counts.items()},
            "reasons": dict(outcomes.reasons.most_common(20)),
            "given up": outcomes.given_up,
            "wrong": wrong,
        }
        earlier = runs_in(asked.json, traced=asked.traced) if asked.append else []  # now: another run may have ended
        asked.json.write_text(json.dumps({"runs": [*earlier, run]}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
