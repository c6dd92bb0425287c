"""How slow a training step is under takeback.guard(), against the same step without it.

    python benchmarks/guard.py [--rounds 5] [--size small] [--device cpu] [--out benchmarks/results/guard-cpu.json]

Three kinds of step: torch's own nodes only, which are trusted; with a GradBuffer, whose Functions make most nodes of
linear layers, norms and embeddings foreign, so that each is watched; and `every_node=True`. Each kind is timed in turns
with the same step without a guard; the ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import takeback as tb
from common import Step, in_turn, machine, ratio
from takeback import zoo

CASES = ("mlp", "gpt", "resnet")
BURST = 2


@dataclass(frozen=True)
class Row:
    """One kind of step on one model."""

    case: str
    kind: str
    plain_s: float
    guarded_s: float
    slowdown: float
    nodes: int  #: of one backward
    watched: int
    fingerprinted_mib: float


def step_of(case: zoo.Case) -> Step:
    def step() -> None:
        case.optimizer.zero_grad()
        case.loss_fn(case.model, *case.batch).backward()
        case.optimizer.step()

    return step


def build(name: str, size: str, device: str, buffered: bool) -> tuple[Step, object]:
    case = zoo.case(name, size=size)
    case.model.to(device)
    case = zoo.Case(case.name, case.model, case.loss_fn, case.optimizer, tuple(t.to(device) for t in case.batch))
    return step_of(case), tb.GradBuffer(case.model) if buffered else None


def measure(name: str, kind: str, arguments: argparse.Namespace) -> Row:
    step, kept = build(name, arguments.size, arguments.device, kind == "GradBuffer")
    counts: list[dict[str, int | float]] = []

    def guarded() -> None:
        with tb.guard(every_node=kind == "every_node") as g:
            step()
        counts.append(g.report())
        assert not g.errors

    for warm in (step, guarded):
        warm()
    steps: dict[str, Callable[[], object]] = {"plain": step, "guarded": guarded}
    times = in_turn(steps, arguments.rounds, BURST, arguments.device)
    del kept
    return Row(
        name,
        kind,
        round(statistics.median(times["plain"]), 5),
        round(statistics.median(times["guarded"]), 5),
        round(ratio(times, "guarded", "plain"), 1),
        int(counts[-1]["nodes"]),
        int(counts[-1]["checked"]),
        round(counts[-1]["fingerprinted_bytes"] / 2**20, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--size", default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = arguments.out or Path(__file__).parent / "results" / f"guard-{arguments.device}.json"
    console, table = (
        Console(width=110),
        Table("case", "step", "plain ms", "guarded ms", "slowdown", "nodes", "watched", "MiB"),
    )
    rows = [measure(n, k, arguments) for n in arguments.cases for k in ("torch only", "GradBuffer", "every_node")]
    for r in rows:
        cells = (r.plain_s * 1e3, r.guarded_s * 1e3, r.slowdown, r.nodes, r.watched, r.fingerprinted_mib)
        table.add_row(r.case, r.kind, *(f"{cell:.6g}" for cell in cells))
    console.print(table)
    setting = machine(arguments.device) | {"rounds": arguments.rounds, "size": arguments.size}
    out.write_text(json.dumps({"machine": setting, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)  # on a machine that others use too, threads that wait for each other measure the others
    main()
