"""Peak against time: takeback's `memory=` beside eager, torch.compile's activation_memory_budget and checkpointing.

    python benchmarks/frontier.py [--cases gpt resnet hf-gpt2 hf-vit] [--rounds 10] [--device cuda] [--out FILE]

The gpt and resnet of benchmarks/cpu.py and two models of transformers; on a GPU larger batches of the same. All systems
of a case run in one process, one step each per round in a shuffled order; a ratio is the median over the rounds of a
system's time over eager's in the same round. Peaks are bytes of tensors above what is alive between steps. takeback is
also asked for the peak that torch.compile reached at each of its budgets, less one percent; `added` is the time over
that of the same system without any rebuilding (takeback "keep", torch.compile at budget 1, eager).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import platform
import random
import statistics
import sys
import time
import types
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
from takeback import zoo
from takeback.run import allocator
from takeback.run.eager import eager_step

MIB = 1 << 20
BUDGETS = (1.0, 0.75, 0.5, 0.25)
WARM = 4  # rounds that compile, record, compare with eager and rehearse
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
            if type(module).__name__ in ("Block", "Bottleneck", "BasicBlock"):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return eager(case)


def inductor(case: zoo.Case, budget: float) -> Step:
    # A code object of its own for every budget: Dynamo keeps what it compiled by code object, and a model of the same
    # shapes would be given the graphs of the budget before.
    plain = case.loss_fn
    own = types.FunctionType(
        plain.__code__.replace(co_name=f"loss_at_{budget:g}".replace(".", "_")),
        plain.__globals__,
        closure=plain.__closure__,
    )
    loss_fn = torch.compile(own)

    def step() -> torch.Tensor:
        with functorch_config.patch(activation_memory_budget=budget):
            case.model.zero_grad(set_to_none=True)
            loss = loss_fn(case.model, *case.batch)
            loss.backward()
            case.optimizer.step()
            return loss.detach()

    return step


# -- measuring ---------------------------------------------------------------------------------------------------


def peak_of(step: Step, device: str) -> int:
    """The most bytes alive during one step above what was alive before it."""
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    native = allocator.load()
    assert native is not None, "the benchmark measures with the native allocator; it needs g++"
    with native.record(allocator.Cell()) as recording:
        step()
    level = most = 0
    sizes: dict[int, int] = {}
    for event in recording.events:
        block = int(event["id"])
        if event["kind"] == allocator.ALLOC:
            sizes[block] = int(event["size_bytes"])
            level += sizes[block]
        elif block in sizes:
            level -= sizes.pop(block)
        most = max(most, level)
    return most


class Bench:
    """One case: its systems, their times and peaks."""

    def __init__(self, name: str, device: str, progress: Progress, rounds: int) -> None:
        self.name, self.device, self.rounds = name, device, rounds
        self.cases: dict[str, zoo.Case] = {}
        self.steps: dict[str, Step] = {}
        self.ours: dict[str, tb.CompiledStep] = {}
        self.peaks: dict[str, int] = {}
        self.times: dict[str, list[float]] = {}
        self.task = progress.add_task(name, total=None)
        self.progress = progress

    def add(self, system: str, make: Callable[[zoo.Case], Step]) -> None:
        """Builds a system, warms it up and takes its peak."""
        self.progress.update(self.task, description=f"{self.name}: {system}")
        case = self.cases[system] = build(self.name, self.device)
        step = make(case)
        for r in range(WARM):
            torch.manual_seed(r)
            step()
        self.steps[system] = step
        torch.manual_seed(WARM)
        if system in self.ours and self.device == "cpu":
            step()
            report = self.ours[system].report()  # its arena is one block, so the allocator sees no peak of its own
            self.peaks[system] = report.peak_bytes - report.resident_bytes
        else:
            self.peaks[system] = peak_of(step, self.device)

    def add_ours(self, system: str, memory: str, **settings: Any) -> None:
        def make(case: zoo.Case) -> Step:
            self.ours[system] = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=memory, **settings)
            return functools.partial(self.ours[system], *case.batch)

        self.add(system, make)

    def resident_bytes(self) -> int:
        return next(iter(self.ours.values())).report().resident_bytes

    def run(self) -> None:
        self.times = {s: [] for s in self.steps}
        self.progress.update(self.task, description=self.name, total=self.rounds, completed=0)
        wait = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        for r in range(self.rounds):
            for system in random.Random(r).sample(list(self.steps), len(self.steps)):
                torch.manual_seed(WARM + 1 + r)
                wait()
                start = time.perf_counter()
                self.steps[system]()
                wait()
                self.times[system].append(time.perf_counter() - start)
            self.progress.advance(self.task)

    def rows(self) -> list[Row]:
        state = self.cases["eager"].model.state_dict()
        found = []
        for system, times in self.times.items():
            base = "eager"
            if system in self.ours:
                base = "takeback early keep" if " early" in system else "takeback keep"
            elif system.startswith("compile"):
                base = "compile 1"
            ratio, added = (
                statistics.median(t / e for t, e in zip(times, self.times[b], strict=True)) for b in ("eager", base)
            )
            report = self.ours[system].report() if system in self.ours else None
            equal = all(torch.equal(v, state[k]) for k, v in self.cases[system].model.state_dict().items())
            found.append(
                Row(
                    self.name,
                    system,
                    round(statistics.median(times), 4),
                    round(ratio, 3),
                    round(added - 1, 3),
                    round(self.peaks[system] / MIB, 2),
                    round(self.peaks[system] / self.peaks["eager"], 4),
                    equal,
                    round(report.added_s / report.step_s, 3) if report else None,
                )
            )
        return found


def measure(name: str, device: str, rounds: int, progress: Progress, *, compiled: bool) -> list[Row]:
    bench = Bench(name, device, progress, rounds)
    bench.add("eager", eager)
    bench.add("checkpoint", checkpointed)
    for memory in ("keep", "auto", "min"):
        bench.add_ours(f"takeback {memory}", memory)
    for memory in ("keep", "auto", "min"):
        bench.add_ours(f"takeback early {memory}", memory, update="early")
    for budget in BUDGETS if compiled else ():
        bench.add(f"compile {budget:g}", functools.partial(inductor, budget=budget))
    for budget in BUDGETS if compiled else ():
        target = bench.peaks[f"compile {budget:g}"] * 99 // 100
        if bench.peaks["takeback min"] < target < bench.peaks["takeback keep"]:
            bench.add_ours(f"takeback below {budget:g}", f"{bench.resident_bytes() + target}B")
    bench.run()
    return bench.rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds per case")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: as torch finds them)")
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        torch.use_deterministic_algorithms(True)  # for all systems: eager's attention does not repeat otherwise
        torch.backends.cudnn.deterministic = True
    torch._dynamo.config.recompile_limit = 64  # every system compiles the same functions for a model of its own
    out = arguments.out or Path(__file__).parent / "results" / f"frontier-{arguments.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(width=120, file=sys.stdout)
    rows: list[Row] = []
    machine = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "takeback": tb.__version__,
        "python": platform.python_version(),
        "rounds": arguments.rounds,
    }
    for name in arguments.cases:
        with Progress(console=console, transient=True) as progress, _no_warnings():
            rows += measure(name, arguments.device, arguments.rounds, progress, compiled=not arguments.without_compile)
        show(console, [r for r in rows if r.case == name])
        # Written after every case, so that an interrupted run keeps what it has.
        out.write_text(json.dumps({"machine": machine, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
        torch._dynamo.reset()
        gc.collect()
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


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
