"""Diffusion, state space and attention context: eager and takeback (mode exact) side by side on the CPU, in one run.

    python benchmarks/architectures.py [--rounds 6] [--memory auto keep min] [--out FILE]

dit: 32² images in patches of 2, width 256, 6 layers, batch 8; ssm: vocabulary 8192, width 256, 4 layers, state 64,
8 x 256 tokens; gpt and gpt_context: vocabulary 8192, width 384, 4 layers, 8 x 256 tokens, the second with the attention
context. AdamW fused. Peaks are tensor bytes above what is resident, from the report; eager's is measured again here and
must agree. Times are medians of the rounds' own ratios. `--size full` takes DiT-S/2, Mamba-2 130M and GPT-2 small.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import takeback as tb
from common import Step, in_turn, machine, peak_bytes, ratio, seed
from takeback import zoo
from takeback.compiler.run.eager import eager_step

CASES = ("dit", "ssm", "gpt", "gpt_context")
MEMORY = ("auto", "keep", "min")
WARM = 4  #: calls that record, compare with eager and rehearse


@dataclass(frozen=True)
class Row:
    """One setting of one case, beside eager."""

    case: str
    system: str
    seconds: float
    time_to_eager: float
    peak_above_resident_mib: float
    peak_to_eager: float
    requests_to_malloc: int | None
    equal_to_eager: bool


@dataclass(frozen=True)
class Context:
    """What the attention context costs: the GPT with it over the same GPT without it."""

    system: str
    time_to_plain: float


def eager(case: zoo.Case) -> Step:
    return functools.partial(eager_step, case.model, case.loss_fn, case.optimizer, case.batch)


def warmed(step: Step) -> Step:
    for i in range(WARM):
        seed(i)
        step()
    return step


def measure(name: str, make: Callable[[], zoo.Case], rounds: int, settings: Sequence[str]) -> list[Row]:
    """`make` gives the same case each time."""
    cases = {system: make() for system in ("eager", *settings)}
    made = {m: c for m, c in cases.items() if m != "eager"}
    compiled = {m: tb.compile_step(c.model, c.loss_fn, c.optimizer, memory=m) for m, c in made.items()}
    steps: dict[str, Step] = {"eager": warmed(eager(cases["eager"]))}
    steps |= {m: warmed(functools.partial(step, *cases[m].batch)) for m, step in compiled.items()}
    times = in_turn(steps, rounds, 2, "cpu")
    # All have taken the same steps with the same random numbers.
    state = cases["eager"].model.state_dict()
    equal = {m: all(torch.equal(v, state[k]) for k, v in cases[m].model.state_dict().items()) for m in compiled}
    measured = peak_bytes(steps["eager"], "cpu")
    rows = [Row(name, "eager", round(min(times["eager"]), 4), 1.0, round(measured / 2**20, 2), 1.0, None, True)]
    for memory, step in compiled.items():
        report = step.report()
        ours, theirs = (p - report.resident_bytes for p in (report.peak_bytes, report.eager_peak_bytes))
        assert abs(theirs - measured) <= 0.01 * measured, (theirs, measured)
        rows.append(
            Row(
                name,
                f"takeback {memory}",
                round(min(times[memory]), 4),
                round(ratio(times, memory, "eager"), 3),
                round(ours / 2**20, 2),
                round(ours / theirs, 4),
                report.allocations_per_step,
                equal[memory],
            )
        )
    return rows


def context_cost(size: str, rounds: int) -> list[Context]:
    """All four in one interleaved run."""
    steps: dict[str, Step] = {}
    for name in ("gpt", "gpt_context"):
        case = zoo.case(name, size=size)
        steps[f"eager {name}"] = warmed(eager(case))
        for memory in ("auto", "keep"):
            case = zoo.case(name, size=size)
            step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=memory)
            steps[f"takeback {memory} {name}"] = warmed(functools.partial(step, *case.batch))
    times = in_turn(steps, rounds, 2, "cpu")
    systems = ("eager", "takeback auto", "takeback keep")
    return [Context(s, round(ratio(times, f"{s} gpt_context", f"{s} gpt"), 3)) for s in systems]


def write(arguments: argparse.Namespace, rows: list[Row], context: list[Context]) -> None:
    found = {
        "machine": machine() | {"rounds": arguments.rounds, "size": arguments.size},
        "rows": [asdict(r) for r in rows],
        "context": [asdict(c) for c in context],
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--memory", nargs="*", default=list(MEMORY), choices=list(MEMORY))
    parser.add_argument("--size", default="bench", choices=["small", "bench", "full"])
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: as torch finds them)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "architectures-cpu.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console = Console(width=120)
    rows: list[Row] = []
    with Progress(console=console) as progress:
        task = progress.add_task("cases", total=len(arguments.cases) + 1)
        for name in arguments.cases:
            make = functools.partial(zoo.case, name, size=arguments.size)
            rows += measure(name, make, arguments.rounds, arguments.memory)
            gc.collect()
            write(arguments, rows, [])
            progress.advance(task)
        context = context_cost(arguments.size, 2 * arguments.rounds)
        write(arguments, rows, context)
        progress.advance(task)
    console.print(table_of(rows))
    for c in context:
        console.print(f"attention context, {c.system}: {c.time_to_plain:.3f} x the step without it")
    console.print(f"written to {arguments.out}")


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("case", "system", "s", "x eager", "peak MiB", "x eager", "mallocs", "equal")
    for r in rows:
        requests = "" if r.requests_to_malloc is None else str(r.requests_to_malloc)
        peak = (f"{r.peak_above_resident_mib:.1f}", f"{r.peak_to_eager:.3f}")
        times = (f"{r.seconds:.3f}", f"{r.time_to_eager:.3f}")
        table.add_row(r.case, r.system, *times, *peak, requests, "yes" if r.equal_to_eager else "[red]no")
    return table


if __name__ == "__main__":
    main()
