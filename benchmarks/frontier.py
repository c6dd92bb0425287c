"""Peak against time: takeback's `memory=` beside eager, torch.compile's activation_memory_budget and checkpointing.

    python benchmarks/frontier.py [--cases gpt resnet hf-gpt2 hf-vit] [--rounds 10] [--device cuda] [--out FILE]

The gpt and resnet of benchmarks/cpu.py and two models of transformers; on a GPU larger batches of the same. Every
system is measured beside eager in a process of their own: a few steps of each in turn, the first of which does not
count. A ratio is the median over the rounds of the system's time over eager's in the same round; "eager" against itself
shows the spread. Peaks are bytes of tensors above what is alive between steps. takeback is also asked for the peak that
torch.compile reached at each of its budgets, less one percent; `added` is the time over that of the same system
without any rebuilding (takeback "keep", torch.compile at budget 1, eager).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.checkpoint import checkpoint

import takeback as tb
from common import machine, peak_bytes
from takeback import zoo
from takeback.compiler.run.eager import eager_step

MIB = 1 << 20
BUDGETS = (1.0, 0.75, 0.5, 0.25)
WARM = 4  # steps that compile, record, compare with eager and rehearse
BURST = 3  # steps in a row; the first is not timed
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One system on one case."""

    case: str
    system: str
    median_s: float
    ratio_to_eager: float
    added: float  #: time over that of the same system without rebuilding, less 1
    peak_mib: float  #: above what is alive between steps
    peak_to_eager: float
    equal_to_eager: bool
    predicted_added: float | None  #: takeback's own prediction


# -- the cases ---------------------------------------------------------------------------------------------------


def hf_gpt2(batch: int) -> zoo.Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=4096, n_positions=256, n_embd=256, n_layer=6, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(4096, (batch, 256), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return zoo.Case("hf-gpt2", model.train(), lambda m, x: m(input_ids=x, labels=x).loss, optimizer, (tokens,))


def hf_vit(batch: int) -> zoo.Case:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=8,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=112,
        num_labels=100,
    )
    model = ViTForImageClassification(config)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 112, 112, generator=generator)
    labels = torch.randint(100, (batch,), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return zoo.Case(
        "hf-vit", model.train(), lambda m, x, y: m(pixel_values=x, labels=y).loss, optimizer, (images, labels)
    )


#: by device: how each case is made
CASES: dict[str, dict[str, Callable[[], zoo.Case]]] = {
    "gpt": {
        "cpu": lambda: zoo.case("gpt", size="bench"),
        "cuda": lambda: zoo.case("gpt", size="full", batch=8),
    },
    "resnet": {
        "cpu": lambda: zoo.case("resnet", size="full"),
        "cuda": lambda: zoo.case("resnet", size="full", batch=256),
    },
    "hf-gpt2": {"cpu": lambda: hf_gpt2(4), "cuda": lambda: hf_gpt2(128)},
    "hf-vit": {"cpu": lambda: hf_vit(16), "cuda": lambda: hf_vit(512)},
}


def build(name: str, device: str) -> zoo.Case:
    case = CASES[name][device]()
    case.model.to(device)
    return replace(case, batch=tuple(t.to(device) for t in case.batch))


# -- the systems -------------------------------------------------------------------------------------------------


def eager(case: zoo.Case) -> Step:
    return lambda: eager_step(case.model, case.loss_fn, case.optimizer, case.batch)


def checkpointed(case: zoo.Case) -> Step:
    """Every block of the model under torch.utils.checkpoint."""
    if hasattr(case.model, "gradient_checkpointing_enable"):
        case.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        for module in case.model.modules():
            if type(module).__name__ in ("GPTBlock", "DiTBlock", "SSMBlock", "Bottleneck", "BasicBlock"):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return eager(case)


def inductor(case: zoo.Case, budget: float) -> Step:
    loss_fn = torch.compile(case.loss_fn)

    def step() -> torch.Tensor:
        with functorch_config.patch(activation_memory_budget=budget):
            case.model.zero_grad(set_to_none=True)
            loss = loss_fn(case.model, *case.batch)
            loss.backward()
            case.optimizer.step()
            return loss.detach()

    return step


# -- measuring ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One system beside eager, in a process of their own."""

    ratio: float
    median_s: float
    peak_bytes: int
    eager_peak_bytes: int
    resident_bytes: int
    equal: bool
    predicted_added: float | None


def worker(name: str, device: str, system: str, rounds: int) -> Result:
    """Measures `system` and eager, a few steps of each in turn."""
    plain, case = build(name, device), build(name, device)
    ours: tb.CompiledStep | None = None
    kind, _, setting = system.partition(" ")
    if kind == "eager":
        step = eager(case)
    elif kind == "checkpoint":
        step = checkpointed(case)
    elif kind == "compile":
        step = inductor(case, float(setting))
    else:
        memory, _, update = setting.partition(" ")
        ours = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=memory, update=update or "end")
        step = functools.partial(ours, *case.batch)
    steps = {"reference": eager(plain), system: step}
    for r in range(WARM):
        for each in steps.values():
            torch.manual_seed(r)
            each()
    peaks = {}
    for s, each in steps.items():
        torch.manual_seed(WARM)
        if s == system and ours is not None and device == "cpu":
            each()
            report = ours.report()  # its arena is one block, so the allocator sees no peak of its own
            peaks[s] = report.peak_bytes - report.resident_bytes
        else:
            peaks[s] = peak_bytes(each, device)
    times: dict[str, list[float]] = {s: [] for s in steps}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for r in range(rounds):
        for s in random.Random(r).sample(list(steps), len(steps)):
            for k in range(BURST):
                torch.manual_seed(WARM + 1 + BURST * r + k)
                if k == 1:
                    wait()
                    start = time.perf_counter()
                steps[s]()
            wait()
            times[s].append((time.perf_counter() - start) / (BURST - 1))
    state = plain.model.state_dict()
    return Result(
        statistics.median(t / e for t, e in zip(times[system], times["reference"], strict=True)),
        statistics.median(times[system]),
        peaks[system],
        peaks["reference"],
        ours.report().resident_bytes if ours else 0,
        all(torch.equal(v, state[k]) for k, v in case.model.state_dict().items()),
        ours.report().added_s / ours.report().step_s if ours else None,
    )


def in_a_process(name: str, device: str, system: str, arguments: argparse.Namespace) -> Result:
    """A process for each system: one that holds a dozen models measures their company."""
    command = [sys.executable, __file__, "--worker", name, system, "--device", device]
    command += ["--rounds", str(arguments.rounds)] + (
        ["--threads", str(arguments.threads)] if arguments.threads else []
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {system}:\n{done.stderr[-4000:]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, progress: Progress, arguments: argparse.Namespace) -> list[Row]:
    device, compiled = arguments.device, not arguments.without_compile
    task = progress.add_task(name, total=None)
    found: dict[str, Result] = {}
    bases = {"takeback": "takeback keep", "compile": "compile 1"}

    def run(label: str, system: str) -> Result:
        progress.update(task, description=f"{name}: {label}")
        found[label] = in_a_process(name, device, system, arguments)
        return found[label]

    run("eager", "eager")  # against itself: how far apart two equal systems are
    run("checkpoint", "checkpoint")
    for setting in ("keep", "auto", "min", "keep early", "min early"):
        run(f"takeback {setting}", f"takeback {setting}")
    for budget in BUDGETS if compiled else ():
        peak = run(f"compile {budget:g}", f"compile {budget:g}").peak_bytes
        target = peak * 99 // 100
        keep = found["takeback keep"]
        if found["takeback min"].peak_bytes < target < keep.peak_bytes:
            run(f"takeback below compile {budget:g}", f"takeback {keep.resident_bytes + target}B")
    rows = []
    for label, r in found.items():
        base = bases.get(label.split()[0], "eager")
        if label.endswith(" early"):
            base += " early"
        rows.append(
            Row(
                name,
                label,
                round(r.median_s, 4),
                round(r.ratio, 3),
                round(r.ratio / found[base].ratio - 1, 3),
                round(r.peak_bytes / MIB, 2),
                round(r.peak_bytes / r.eager_peak_bytes, 4),
                r.equal,
                None if r.predicted_added is None else round(r.predicted_added, 3),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds per case")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: as torch finds them)")
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        torch.use_deterministic_algorithms(True)  # for all systems: eager's attention does not repeat otherwise
        torch.backends.cudnn.deterministic = True
    if arguments.worker:
        name, system = arguments.worker
        with _no_warnings():
            print(json.dumps(asdict(worker(name, arguments.device, system, arguments.rounds))))
        return
    out = arguments.out or Path(__file__).parent / "results" / f"frontier-{arguments.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(width=120, file=sys.stdout)
    rows: list[Row] = []
    where = machine(arguments.device) | {"rounds": arguments.rounds}
    for name in arguments.cases:
        with Progress(console=console, transient=True) as progress:
            rows += measure(name, progress, arguments)
        show(console, [r for r in rows if r.case == name])
        # Written after every case, so that an interrupted run keeps what it has.
        out.write_text(json.dumps({"machine": where, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    console.print(f"written to {out}")


def show(console: Console, rows: list[Row]) -> None:
    table = Table("case", "system", "median s", "x eager", "added", "predicted", "peak MiB", "x eager", "bits of eager")
    for r in rows:
        predicted = "" if r.predicted_added is None else f"{r.predicted_added:+.1%}"
        table.add_row(
            *(r.case, r.system, f"{r.median_s:.4f}", f"{r.ratio_to_eager:.3f}", f"{r.added:+.1%}", predicted),
            *(f"{r.peak_mib:.1f}", f"{r.peak_to_eager:.3f}", "yes" if r.equal_to_eager else "no"),
        )
    console.print(table)


@contextlib.contextmanager
def _no_warnings() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    main()
