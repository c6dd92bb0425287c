"""Injects faults into valid plans, and counts which of them the checks reject and which are harmful in truth.

    PYTHONPATH=tests python tests/mutation/run_mutations.py [--each N] [--json PATH] [--only KIND] [--seed N]

For every kind at least `--each` faults are injected, and as many more as it takes for 200 harmful ones. Exits with 1 if
a harmful one was accepted, or a kind has fewer than 200. With `--only`, what the file has of other kinds stays. `make
trust` runs this, and docs/trust.md shows the result.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from judging import KINDS, AnyMutant, Verdict, drawn, judged
from plans_to_break import RECIPES, Recipe, Subject, group_of_one, made
from rich.progress import Progress

from takeback.compiler.passes import pipeline
from takeback.compiler.program import Cluster

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from revision import COMMIT

WANTED_HARMFUL = 200
MOST = 6  #: times as many as asked for are injected, for the sake of 200 harmful ones
FEW = 2  #: of each kind, in a large plan

Counts = collections.Counter[str]
Watch = Callable[[str, Subject, AnyMutant, Verdict], None]


def inject(kind: str, subject: Subject, draw: Random, count: int, watch: Watch, tries: int = 8) -> int:
    """Up to `count` faults of a kind in one plan. Gives how many there were."""
    injected = 0
    for _ in range(count * tries):
        if injected == count:
            break
        mutant = drawn(kind, subject, draw)
        if mutant is not None:
            watch(kind, subject, mutant, judged(kind, subject, mutant))
            injected += 1
    return injected


def count_(counts: Counts, verdict: Verdict) -> None:
    """Adds a verdict to the counts of its kind."""
    counts["injected"] += 1
    if verdict.harm is not None:
        counts["harmful"] += 1
        counts["missed" if verdict.rejected is None else "caught"] += 1
    else:
        counts["harmless, accepted" if verdict.rejected is None else "harmless, rejected"] += 1
    counts["run for real"] += verdict.was_run
    if verdict.rejected is not None:
        counts[f"by {verdict.rejected.partition(':')[0]}"] += 1


def run_all(
    kinds: Iterable[str], subjects: Sequence[Subject], each: int, seed: int
) -> tuple[dict[str, Counts], list[str]]:
    """The counts by kind, and every harmful mutant that was accepted, in words."""
    table: dict[str, Counts] = {kind: collections.Counter() for kind in kinds}
    missed: list[str] = []

    def watch(kind: str, subject: Subject, mutant: AnyMutant, verdict: Verdict) -> None:
        count_(table[kind], verdict)
        if verdict.missed:
            missed.append(f"{kind} in {subject.name!r}: {mutant.what}: {verdict.harm}")

    with Progress() as progress:
        for kind in table:
            bar = progress.add_task(kind, total=each)
            draws = {s.name: Random(f"{seed} {kind} {s.name}") for s in subjects}
            for subject in subjects:
                if subject.is_large:
                    inject(kind, subject, draws[subject.name], FEW, watch)
            small = [s for s in subjects if not s.is_large]
            counts = table[kind]
            while small and (counts["injected"] < each or counts["harmful"] < WANTED_HARMFUL):
                before = counts["injected"]
                for subject in small:
                    inject(kind, subject, draws[subject.name], 5, watch)
                    progress.update(bar, completed=min(each, counts["injected"]))
                if counts["injected"] == before or counts["injected"] > MOST * each:
                    break
    return table, missed


def acting(subjects: Sequence[Subject]) -> list[str]:
    """The passes that changed something in some plan, in their order."""
    acted = {name for s in subjects for name in s.acted}
    return [stage.name for stage in pipeline.PIPELINE if stage.name in acted]


def about(subjects: Sequence[Subject]) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": f"{_cpu()}, {os.cpu_count()} cores",
        "commit": COMMIT,
        "passes": acting(subjects),
        "plans": [
            {
                "name": s.name,
                "ops": len(s.layout.program.ops),
                "arena_bytes": s.layout.placed.size_bytes if s.layout.arena is not None else None,
                "clusters": sum(isinstance(op.target, Cluster) for op in s.layout.program.ops),
                "rebuilt": len(s.layout.draft.rebuilt),
            }
            for s in subjects
        ],
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=600, help="faults of each kind")
    parser.add_argument("--only", default="", help="kinds whose name has this in it, a regular expression")
    parser.add_argument("--plans", default="", help="plans whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the outcome there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    kinds = [kind for kind in KINDS if re.search(given.only, kind)]
    recipes: list[Recipe] = [recipe for recipe in RECIPES if given.plans in recipe.name]
    with tempfile.TemporaryDirectory() as folder, group_of_one(Path(folder)) as group:
        subjects = [made(recipe, group) for recipe in recipes]
        described = about(subjects)
        table, missed = run_all(kinds, subjects, given.each, given.seed)
    total: Counts = sum(table.values(), collections.Counter())
    for kind, counts in table.items():
        print(
            f"{kind:<32}", ", ".join(f"{counts[name]} {name}" for name in ("injected", "harmful", "caught", "missed"))
        )
    print(*missed, sep="\n")
    print(f"{total['caught']} of {total['harmful']} harmful faults are caught, of {total['injected']} injected")
    if given.json is not None:
        before = (
            json.loads(given.json.read_text()) if given.only and given.json.exists() else {"kinds": {}, "minutes": 0}
        )
        found = {kind: dict(sorted(counts.items())) for kind, counts in table.items()}
        by_kind = {kind: {**before["kinds"], **found}[kind] for kind in KINDS if kind in {**before["kinds"], **found}}
        everything: Counts = sum(map(collections.Counter, by_kind.values()), collections.Counter())
        outcome = {
            **described,
            "seed": given.seed,
            "minutes": round(before["minutes"] + (time.monotonic() - began) / 60, 1),
            "total": dict(sorted(everything.items())),
            "kinds": by_kind,
        }
        given.json.write_text(json.dumps(outcome, indent=1) + "\n")
    few = [kind for kind, counts in table.items() if counts["harmful"] < WANTED_HARMFUL]
    if few:
        print("fewer than", WANTED_HARMFUL, "harmful ones:", ", ".join(few))
    return 1 if missed or few else 0


if __name__ == "__main__":
    sys.exit(main())
