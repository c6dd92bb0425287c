"""Eager, torch.compile and takeback (mode exact) side by side on the CPU, in one interleaved run.

    python benchmarks/cpu.py [--rounds 12] [--cases gpt resnet gpt_context dit ssm] [--out benchmarks/results/cpu.json]

Fixed sizes: gpt = vocabulary 8192, width 384, 4 layers, 8 x 256 tokens, AdamW fused; resnet = ResNet-50, 8 x 112², SGD
with momentum; gpt_context, dit and ssm (only if asked for) are those of benchmarks/architectures.py. Every round runs
one step of each system, in a shuffled order, so that a slow moment of a shared machine hits all of them; ratios are
medians of the rounds' own ratios. Peaks are tensor bytes as the allocator saw them.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import takeback as tb
from common import cpu
from takeback import zoo
from takeback.compiler.run import allocator
from takeback.compiler.run.eager import eager_step

CASES = {
    "gpt": ("gpt", "bench"),
    "resnet": ("resnet", "full"),
    "gpt_context": ("gpt_context", "bench"),
    "dit": ("dit", "bench"),
    "ssm": ("ssm", "bench"),
}
DEFAULT = ("gpt", "resnet")
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One system on one case."""

    case: str
    system: str
    median_s: float
    minimum_s: float
    ratio_to_eager: float  #: median over rounds of this system's time over eager's
    ratio_to_compile: float
    peak_above_resident_mib: float
    peak_ratio_to_eager: float
    requests_to_malloc: int
    page_faults: float
    equal_to_eager: bool


def compiled_by_inductor(case: zoo.Case) -> Callable[[], torch.Tensor]:
    loss_fn = torch.compile(case.loss_fn)

    def step() -> torch.Tensor:
        case.model.zero_grad(set_to_none=True)
        loss = loss_fn(case.model, *case.batch)
        loss.backward()
        case.optimizer.step()
        return loss.detach()

    return step


def peak_of(step: Callable[[], torch.Tensor], native: allocator.Native) -> tuple[float, int]:
    """(Most bytes alive during one step above what was alive before it, requests that reached the allocator)."""
    cell = allocator.Cell()
    with native.record(cell) as recording:
        step()
    level = most = requests = 0
    sizes: dict[int, int] = {}
    for event in recording.events:
        block = int(event["id"])
        if event["kind"] == allocator.ALLOC:
            sizes[block] = int(event["size_bytes"])
            level += sizes[block]
            requests += 1
        elif block in sizes:
            level -= sizes.pop(block)
        most = max(most, level)
    return most / MIB, requests


def page_faults(step: Callable[[], torch.Tensor], steps: int = 3) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps


def measure(name: str, rounds: int, progress: Progress, *, inductor: bool) -> list[Row]:
    kind, size = CASES[name]
    native = allocator.load()
    assert native is not None, "the benchmark measures with the native allocator; it needs g++"
    ours = {"takeback": "auto", "takeback keep": "keep"}
    cases = {s: zoo.case(kind, size=size) for s in ("eager", "torch.compile", *ours)}
    compiled = {
        s: tb.compile_step(cases[s].model, cases[s].loss_fn, cases[s].optimizer, memory=memory)
        for s, memory in ours.items()
    }
    eager = cases["eager"]
    steps: dict[str, Callable[[], torch.Tensor]] = {
        "eager": lambda: eager_step(eager.model, eager.loss_fn, eager.optimizer, eager.batch),
        **({"torch.compile": compiled_by_inductor(cases["torch.compile"])} if inductor else {}),
        **{s: functools.partial(step, *cases[s].batch) for s, step in compiled.items()},
    }
    times: dict[str, list[float]] = {s: [] for s in steps}
    task = progress.add_task(name, total=rounds + 4)
    for r in range(rounds + 4):
        # A shuffled order: what one leaves behind (spinning threads, a warm heap) must not always meet the same one.
        for system in random.Random(r).sample(list(steps), len(steps)):
            step = steps[system]
            torch.manual_seed(r)
            start = time.perf_counter()
            step()
            if r >= 4:  # the first ones compile, record, compare with eager and rehearse
                times[system].append(time.perf_counter() - start)
        progress.advance(task)
    state = eager.model.state_dict()
    equal = {s: all(torch.equal(v, state[k]) for k, v in cases[s].model.state_dict().items()) for s in ours}
    above = {s: peak_of(step, native) for s, step in steps.items() if s not in ours}
    for system, compiled_step in compiled.items():
        report = compiled_step.report()
        above[system] = ((report.peak_bytes - report.resident_bytes) / MIB, report.allocations_per_step)
        claimed = (report.eager_peak_bytes - report.resident_bytes) / MIB
        assert abs(claimed - above["eager"][0]) <= 0.01 * above["eager"][0], (claimed, above["eager"])
    faults = {s: page_faults(step) for s, step in steps.items()}
    rows = []
    for system in steps:
        ratio = statistics.median(t / e for t, e in zip(times[system], times["eager"], strict=True))
        base = times.get("torch.compile")
        to_compile = (
            statistics.median(t / e for t, e in zip(times[system], base, strict=True)) if base else float("nan")
        )
        rows.append(
            Row(
                name,
                system,
                round(statistics.median(times[system]), 4),
                round(min(times[system]), 4),
                round(ratio, 3),
                round(to_compile, 3),
                round(above[system][0], 2),
                round(above[system][0] / above["eager"][0], 4),
                above[system][1],
                round(faults[system], 1),
                equal.get(system, system == "eager"),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds per case")
    parser.add_argument("--cases", nargs="*", default=list(DEFAULT), choices=list(CASES))
    parser.add_argument(
        "--without-compile",
        action="store_true",
        help="leave torch.compile out",
    )
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: as torch finds them)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console = Console(width=120)
    inductor = not arguments.without_compile
    with Progress(console=console) as progress:
        rows = [row for name in arguments.cases for row in measure(name, arguments.rounds, progress, inductor=inductor)]
    heads = ("case", "system", "median s", "min s", "x eager", "x compile", "peak MiB", "x eager", "mallocs", "faults")
    table = Table(*heads)
    for r in rows:
        ratios = (f"{r.ratio_to_eager:.3f}", f"{r.ratio_to_compile:.3f}")
        peak = (f"{r.peak_above_resident_mib:.1f}", f"{r.peak_ratio_to_eager:.3f}")
        seconds = (f"{r.median_s:.3f}", f"{r.minimum_s:.3f}")
        table.add_row(r.case, r.system, *seconds, *ratios, *peak, str(r.requests_to_malloc), f"{r.page_faults:.0f}")
    console.print(table)
    if not all(r.equal_to_eager for r in rows if r.system.startswith("takeback")):
        console.print("[red]takeback's parameters differ from eager's")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "cpu": cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "takeback": tb.__version__,
        "python": platform.python_version(),
        "rounds": arguments.rounds,
    }
    arguments.out.write_text(json.dumps({"machine": machine, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    console.print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
