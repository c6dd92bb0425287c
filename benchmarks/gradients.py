"""Flat gradients: copies, peak and time against eager, DistributedDataParallel, and torch's optimizers.

    python benchmarks/gradients.py [--cases gpt hf-gpt2] [--rounds 10] [--device cuda] [--out FILE]

For each case, in processes of their own:

steps       whole steps (forward, backward, clip, update, zero) beside eager with the fused optimizer. Peak: every byte
            of a tensor alive during a step, parameters, states and buckets included. Copies: operations of parameter
            size that only move a gradient (copy_, clone, DDP's scaling copies into buckets), counted by the profiler
            during the backward. DDP and all_reduce run in a group of one.
update      clip + update + zero alone, on gradients that are there
accumulate  four microbatches
early       update="early": the peak against that of the same plan if gradients took no memory at all

Ratios are medians over rounds of a system's time over eager's in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import takeback as tb
from common import Step, in_turn, machine, ratio, total_peak_bytes
from takeback import zoo
from takeback.compiler.capture.batch import microbatch
from takeback.compiler.ownership.curve import alive_bytes

MIB = 1 << 20
CLIP = 1.0
WARM = 4
BURST = 3


def hf_gpt2(layers: int, width: int, vocabulary: int, batch: int, length: int) -> zoo.Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64, use_cache=False
    )
    tokens = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.SGD(model.parameters())  # replaced by each system's own
    return zoo.Case("hf-gpt2", model, lambda m, x: m(input_ids=x, labels=x).loss, optimizer, (tokens,))


CASES: dict[str, dict[str, Callable[[], zoo.Case]]] = {
    "gpt": {"cpu": lambda: zoo.case("gpt", size="bench"), "cuda": lambda: zoo.case("gpt", size="full", batch=8)},
    "gpt, batch 1": {
        "cpu": lambda: zoo.case("gpt", size="bench", batch=1),
        "cuda": lambda: zoo.case("gpt", size="full", batch=1),
    },
    "resnet": {
        "cpu": lambda: zoo.case("resnet", size="full"),
        "cuda": lambda: zoo.case("resnet", size="full", batch=128),
    },
    "hf-gpt2": {
        "cpu": lambda: hf_gpt2(6, 256, 4096, 4, 256),
        "cuda": lambda: hf_gpt2(12, 768, 50257, 8, 1024),
    },
}


def build(name: str, device: str) -> zoo.Case:
    torch.manual_seed(0)
    case = CASES[name][device]()
    case.model.to(device)
    return replace(case, batch=tuple(t.to(device) for t in case.batch))


# -- the systems -------------------------------------------------------------------------------------------------


def adamw(case: zoo.Case, **how: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(case.model.parameters(), lr=1e-4, **how)


def parts_of(case: zoo.Case, count: int) -> list[tuple[torch.Tensor, ...]]:
    return [microbatch((case.batch, {}), i, count)[0] for i in range(count)] if count > 1 else [case.batch]


def plain(case: zoo.Case, count: int = 1, *, wrapped: torch.nn.Module | None = None, **how: bool) -> Step:
    """Eager, or DistributedDataParallel where the model is wrapped."""
    optimizer = adamw(case, **how)
    model, parts = wrapped or case.model, parts_of(case, count)

    def step() -> None:
        for part in parts:
            (case.loss_fn(model, *part) / count).backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ddp(case: zoo.Case, *, views: bool) -> Step:
    wrapped = DistributedDataParallel(case.model, gradient_as_bucket_view=views)
    return plain(case, wrapped=wrapped, fused=True)


def packed(case: zoo.Case, count: int = 1, *, flat: bool, reduced: bool = False) -> Step:
    """A GradBuffer, with torch's fused optimizer or ours."""
    group = dist.group.WORLD if reduced else None
    buf = tb.GradBuffer(case.model, group=group)
    parts = parts_of(case, count)
    optimizer: torch.optim.Optimizer
    if flat:
        optimizer = tb.optim.AdamW(buf, lr=1e-4, clip_norm=CLIP)
    else:
        optimizer = adamw(case, fused=True)

    def step() -> None:
        for part in parts:
            (case.loss_fn(case.model, *part) / count).backward()
        if reduced:
            buf.all_reduce()
        if not flat:
            buf.clip_(CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step.keep = buf  # type: ignore[attr-defined]
    return step


def compiled(case: zoo.Case, count: int = 1, *, update: str = "end", reduced: bool = False) -> tb.CompiledStep:
    optimizer = adamw(case, fused=True)
    clip = CLIP if update == "end" else None
    group = dist.group.WORLD if reduced else None
    return tb.compile_step(
        case.model, case.loss_fn, optimizer, update=update, clip_norm=clip, accumulate=count, group=group, memory="keep"
    )


STEPS: dict[str, Callable[[zoo.Case], Step]] = {
    "eager, fused": lambda case: plain(case, fused=True),
    "eager, foreach": lambda case: plain(case, foreach=True),
    "DDP, fused": lambda case: ddp(case, views=False),
    "DDP, gradient_as_bucket_view, fused": lambda case: ddp(case, views=True),
    "GradBuffer, torch fused": lambda case: packed(case, flat=False),
    "GradBuffer, takeback AdamW": lambda case: packed(case, flat=True),
    "GradBuffer all_reduce, takeback AdamW": lambda case: packed(case, flat=True, reduced=True),
    "compile_step": lambda case: called(compiled(case), case),
    "compile_step, group": lambda case: called(compiled(case, reduced=True), case),
}
ACCUMULATE: dict[str, Callable[[zoo.Case], Step]] = {
    "eager, fused": lambda case: plain(case, 4, fused=True),
    "GradBuffer, takeback AdamW": lambda case: packed(case, 4, flat=True),
    "compile_step": lambda case: called(compiled(case, 4), case),
}


def called(step: tb.CompiledStep, case: zoo.Case) -> Step:
    call = lambda: step(*case.batch)  # noqa: E731
    call.compiled = step  # type: ignore[attr-defined]
    return call


# -- measuring ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One system on one case."""

    case: str
    what: str  #: steps, update, accumulate or early
    system: str
    median_s: float
    ratio_to_eager: float
    peak_mib: float | None = None
    gradient_copies: int | None = None
    gradient_mib: float | None = None  #: one set of gradients
    without_gradients_mib: float | None = None  #: early: the same plan's peak if gradients took no memory


def gradient_bytes(case: zoo.Case) -> int:
    return sum(p.numel() * p.element_size() for p in case.model.parameters() if p.requires_grad)


def copies_of(case: zoo.Case, step: Step, device: str) -> int:
    """Operations of a parameter's size in the backward that only move a gradient."""
    shapes = {tuple(p.shape) for p in case.model.parameters()} | {(p.numel(),) for p in case.model.parameters()}
    backward = torch.Tensor.backward

    def marked(self: torch.Tensor, *args: object, **kwargs: object) -> None:
        with torch.profiler.record_function("the backward"):
            backward(self, *args, **kwargs)  # type: ignore[arg-type]

    torch.Tensor.backward = marked  # type: ignore[assignment,method-assign]
    try:
        with torch.profiler.profile(record_shapes=True) as profile:
            step()
            if device == "cuda":
                torch.cuda.synchronize()
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    events = profile.events()
    assert events is not None
    spans = [e.time_range for e in events if e.name == "the backward"]
    found = 0
    for e in events:
        moves = e.name in ("aten::copy_", "aten::clone") or (e.name == "aten::mul" and len(e.input_shapes) >= 3)
        inside = any(s.start <= e.time_range.start <= s.end for s in spans)
        if moves and inside and any(tuple(shape) in shapes for shape in e.input_shapes[:2]):
            parent = e.cpu_parent
            nested = parent is not None and parent.name in (
                "aten::clone",
                "aten::contiguous",
                "aten::to",
                "aten::_to_copy",
            )
            found += not nested or parent.name == "aten::clone"
    return found


def measure_steps(
    name: str, device: str, system: str, rounds: int, table: dict[str, Callable[[zoo.Case], Step]], what: str
) -> Row:
    made: list[tuple[zoo.Case, Step]] = []

    def make() -> Step:
        case = build(name, device)
        made.append((case, table[system](case)))
        return made[-1][1]

    if system.startswith("compile_step") and device == "cpu":
        step = make()
        for _ in range(WARM):
            step()
        # Its arena is one mapping, which the allocator does not see.
        peak = step.compiled.report().peak_bytes  # type: ignore[attr-defined]
    else:
        peak = total_peak_bytes(make, WARM, device)
    case, step = made[-1]
    reference = table["eager, fused"](build(name, device))
    steps = {"reference": reference, system: step}
    for _ in range(WARM):
        for each in steps.values():
            each()
    copies = None if system.startswith("compile_step") else copies_of(case, step, device)
    times = in_turn(steps, rounds, BURST, device)
    return Row(
        name,
        what,
        system,
        round(statistics.median(times[system]), 5),
        round(ratio(times, system, "reference"), 3),
        round(peak / MIB, 2),
        copies,
        round(gradient_bytes(case) / MIB, 2),
    )


def measure_update(name: str, device: str, rounds: int) -> list[Row]:
    """clip + update + zero alone. The gradients are put back before each, outside of the clock's sight on a GPU: the
    same assignment for every system."""
    systems: dict[str, Step] = {}
    for system in ("torch foreach", "torch fused", "takeback"):
        case = build(name, device)
        parameters = list(case.model.parameters())
        if system == "takeback":
            buf = tb.GradBuffer(case.model)
            buf.flat.normal_()
            grads = [slot.view for slot in buf.slots]
            optimizer: torch.optim.Optimizer = tb.optim.AdamW(buf, lr=1e-4, clip_norm=CLIP)
            kept: object = buf
        else:
            grads = [torch.randn_like(p) for p in parameters]
            optimizer = adamw(case, **{system.removeprefix("torch "): True})
            kept = None

        def step(
            parameters: list[torch.nn.Parameter] = parameters,
            grads: list[torch.Tensor] = grads,
            optimizer: torch.optim.Optimizer = optimizer,
            clips: bool = system != "takeback",
            kept: object = kept,
        ) -> None:
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g
            if clips:
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        systems[system] = step
    for step in systems.values():
        for _ in range(WARM):
            step()
    times = in_turn(systems, rounds, 8, device)
    return [
        Row(name, "update", s, round(statistics.median(times[s]), 6), round(ratio(times, s, "torch fused"), 3))
        for s in systems
    ]


def measure_early(name: str, device: str, rounds: int) -> Row:
    case = build(name, device)
    step = compiled(case, update="early")
    reference = plain(build(name, device), fused=True)
    steps: dict[str, Step] = {"reference": reference, "early": lambda: step(*case.batch)}
    for _ in range(WARM):
        for each in steps.values():
            each()
    times = in_turn(steps, rounds, BURST, device)
    report = step.report()
    return Row(
        name,
        "early",
        'compile_step, update="early"',
        round(statistics.median(times["early"]), 5),
        round(ratio(times, "early", "reference"), 3),
        round(report.peak_bytes / MIB, 2),
        None,
        round(gradient_bytes(case) / MIB, 2),
        round((report.resident_bytes + without_gradients(step)) / MIB, 2),
    )


def without_gradients(step: tb.CompiledStep) -> int:
    """The most bytes of the plan's values alive at one time, the weight gradients left out."""
    assert step._last is not None
    layout = step._last.executor.layout
    program = layout.draft.program
    gradients = {region.buffer for region in program.grads.values()}
    buffers = {b: replace(buffer, size_bytes=0) if b in gradients else buffer for b, buffer in program.buffers.items()}
    return max(alive_bytes(replace(program, buffers=buffers), layout.owners, layout.draft.kept))


def worker(name: str, device: str, what: str, system: str, rounds: int) -> list[Row]:
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{store.name}.store", rank=0, world_size=1
        )
        try:
            if what == "update":
                return measure_update(name, device, rounds)
            if what == "early":
                return [measure_early(name, device, rounds)]
            table = STEPS if what == "steps" else ACCUMULATE
            return [measure_steps(name, device, system, rounds, table, what)]
        finally:
            dist.destroy_process_group()
            Path(f"{store.name}.store").unlink(missing_ok=True)


def in_a_process(name: str, what: str, system: str, arguments: argparse.Namespace) -> list[Row]:
    command = [sys.executable, __file__, "--worker", name, what, system, "--device", arguments.device]
    command += ["--rounds", str(arguments.rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {what}, {system}:\n{done.stderr[-4000:]}")
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds for each system")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=["steps", "update", "accumulate", "early"])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # for all systems: mode exact needs an eager that repeats its bits
        torch.backends.cudnn.deterministic = True
    if arguments.worker:
        name, what, system = arguments.worker
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps([asdict(r) for r in worker(name, arguments.device, what, system, arguments.rounds)]))
        return
    out = arguments.out or Path(__file__).parent / "results" / f"gradients-{arguments.device}.json"
    console = Console(width=130, file=sys.stdout)
    todo = [(n, w, s) for n in arguments.cases for w in arguments.only for s in systems_of(n, w)]
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(todo))
        for name, what, system in todo:
            progress.update(task, description=f"{name}: {what} {system}")
            rows += in_a_process(name, what, system, arguments)
            progress.advance(task)
            out.write_text(
                json.dumps(
                    {
                        "machine": machine(arguments.device) | {"rounds": arguments.rounds},
                        "rows": [asdict(r) for r in rows],
                    },
                    indent=1,
                )
                + "\n"
            )
    show(console, rows)
    console.print(f"written to {out}")


def systems_of(name: str, what: str) -> list[str]:
    if what == "accumulate" and name.endswith("batch 1"):
        return []  # there is nothing to split
    return list({"steps": STEPS, "accumulate": ACCUMULATE}.get(what, {"": None}))


def show(console: Console, rows: list[Row]) -> None:
    table = Table("case", "what", "system", "median ms", "x eager", "peak MiB", "gradient set", "copies")
    for r in rows:
        peak = "" if r.peak_mib is None else f"{r.peak_mib:.1f}"
        if r.without_gradients_mib is not None:
            peak += f" ({r.without_gradients_mib:.1f} without gradients)"
        table.add_row(
            *(r.case, r.what, r.system, f"{r.median_s * 1e3:.3f}", f"{r.ratio_to_eager:.3f}", peak),
            *("" if v is None else f"{v:g}" for v in (r.gradient_mib, r.gradient_copies)),
        )
    console.print(table)


if __name__ == "__main__":
    main()
