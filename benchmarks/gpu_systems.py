"""The systems of benchmarks/gpu.py, and one row: a model trained by one system, in a process that does nothing else.

    eager                      forward, backward, fused optimizer
    compile                    torch.compile of forward and loss; the rest as in eager, which is how it is used
    compile:reduce-overhead    another mode of it
    compile@0.7                with torch._functorch's activation_memory_budget
    liger                      eager on Liger-Kernel's layers, where it is installed and knows the model
    fast@auto, exact@min, ...  takeback: its mode, and what it is given as memory=

`eager@7` is eager with another seed for its dropout: how far apart two right trainings are.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import takeback as tb
from common import machine, wait
from gpu_models import MODELS, GpuCase, build, lessons

MIB = 1 << 20
FIRST, SETTLE, HOST = 3, 4, 5  #: steps: the first ones, those until all is steady, those of which the host is timed
Step = Callable[..., Tensor]


@dataclass
class GpuRow:
    """One system on one model, in one process. Bytes are as CUDA's caching allocator counts them, over steady steps;
    on a CPU they are None."""

    model: str
    system: str
    ms: float  #: median over steps that follow one another without waiting
    spread_ms: float  #: from the first to the last quartile of them
    host_ms: float  #: until the call of a step comes back, with an idle device
    peak_mib: float | None
    reserved_mib: float | None
    between_mib: float | None  #: alive between steps
    resident_mib: float  #: parameters, module buffers, optimizer state and batch: the same for all systems
    first_s: float  #: from before the system is made until the third step has ended
    ready_s: float  #: before that: imports, the device's start, model and batch
    cache: str  #: what was found of earlier processes: "cold", "warm", "others'" or "unknown"
    loss: float  #: of the last step
    planned: dict[str, Any] | None = None  #: what takeback's report says


@dataclass(frozen=True)
class Running:
    """A system ready to train: `step(*batch)` is one step, and returns its loss."""

    step: Step
    case: GpuCase
    compiled: tb.CompiledStep | None = None
    seed: int = 1  #: of the random numbers that steps draw


def row(model: str, system: str, *, device: str, tiny: bool, steps: int, since: float, cache: str) -> dict[str, Any]:
    """`since`: when the process was started, by time.time()."""
    running = started(model, system, device=device, tiny=tiny)
    gc.collect()
    wait(device)
    ready_s = time.time() - since
    first_s, running = _first(running, system, device)
    batch, step = running.case.batch, running.step
    for _ in range(SETTLE):
        step(*batch)
    gc.collect()
    wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, loss = _steady(step, batch, steps, device)
    memory: dict[str, float | None] = dict.fromkeys(("peak_mib", "reserved_mib", "between_mib"))
    if device == "cuda":
        taken = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated())
        memory = {name: round(size / MIB, 2) for name, size in zip(memory, taken, strict=True)}
    found = GpuRow(
        model=model,
        system=system,
        ms=round(statistics.median(times), 3),
        spread_ms=round(_quartiles(times), 3),
        host_ms=round(_host(step, batch, device), 3),
        **memory,
        resident_mib=round(_resident_bytes(running.case) / MIB, 2),
        first_s=round(first_s, 2),
        ready_s=round(ready_s, 2),
        cache=cache,
        loss=loss,
        planned=_planned(running.compiled) if running.compiled is not None else None,
    )
    return {"machine": about(device) | {"tiny": tiny, "steps": steps}, "row": asdict(found)}


def warm(model: str, system: str, *, device: str, tiny: bool) -> None:
    """Only what fills the caches."""
    _first(started(model, system, device=device, tiny=tiny), system, device)


def learn(model: str, system: str, *, device: str, tiny: bool, steps: int) -> dict[str, Any]:
    """The losses of a training on batches that are the same for all systems."""
    running = made(started(model, system, device=device, tiny=tiny), system)
    torch.manual_seed(running.seed)
    batches = lessons(model, device, tiny=tiny)
    losses = [float(running.step(*next(batches))) for _ in range(steps)]
    return {"machine": about(device) | {"tiny": tiny}, "row": {"model": model, "system": system, "losses": losses}}


def about(device: str) -> dict[str, Any]:
    found = machine(device) | {"cuda": torch.version.cuda}
    for name in ("triton", "torchvision", "transformers", "liger_kernel"):
        with contextlib.suppress(ImportError, ModuleNotFoundError):
            found[name] = _version(name)
    return found


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name.replace("_", "-"))


# -- the systems ---------------------------------------------------------------------------------------------------


def started(model: str, system: str, *, device: str, tiny: bool) -> Running:
    """The model and its batch are there; the system itself is `made` later, for that is timed."""
    if model not in MODELS:
        raise SystemExit(f"unknown model {model!r}; there are {', '.join(MODELS)}")
    if system == "liger":
        _apply_liger(model, device)
    case = build(model, device, tiny=tiny)
    return Running(_eager(case, case.loss_fn), case)


def made(running: Running, system: str) -> Running:
    kind, _, setting = system.partition("@")
    case = running.case
    if kind == "liger" and not setting:
        return running
    if kind == "eager":
        return Running(running.step, case, seed=int(setting or 1))
    if kind == "compile" or kind.startswith("compile:"):
        return Running(_inductor(case, kind.partition(":")[2], float(setting or 1)), case)
    if kind in ("fast", "exact"):
        compiled = tb.compile_step(
            case.model, case.loss_fn, case.optimizer, mode=kind, memory=setting or "auto", graphs="auto"
        )
        return Running(compiled, case, compiled)
    raise SystemExit(f"unknown system {system!r}; see benchmarks/gpu_systems.py")


def _eager(case: GpuCase, loss_fn: Step) -> Step:
    def step(*batch: Tensor) -> Tensor:
        loss = loss_fn(case.model, *batch)
        loss.backward()
        case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _inductor(case: GpuCase, mode: str, budget: float) -> Step:
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = budget
    step = _eager(case, torch.compile(case.loss_fn, mode=mode or None))
    if not mode:
        return step

    def marked(*batch: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(*batch)

    return marked


def _apply_liger(model: str, device: str) -> None:
    """Before the model is made: it puts its layers into transformers' modules."""
    kind = MODELS[model].liger
    if not kind or device != "cuda":
        raise SystemExit(f"Liger-Kernel has no layers for {model} on {device}")
    import liger_kernel.transformers as liger

    getattr(liger, f"apply_liger_kernel_to_{kind}")()


# -- measuring -----------------------------------------------------------------------------------------------------


def _first(running: Running, system: str, device: str) -> tuple[float, Running]:
    """Makes the system and takes its first steps."""
    start = time.perf_counter()
    running = made(running, system)
    torch.manual_seed(running.seed)
    for _ in range(FIRST):
        running.step(*running.case.batch)
    wait(device)
    return time.perf_counter() - start, running


def _steady(step: Step, batch: tuple[Tensor, ...], steps: int, device: str) -> tuple[list[float], float]:
    """Milliseconds from the end of each step to that of the next, and the last loss. Nothing waits in between, as in
    a training: where the host is quicker than the device, its time is hidden."""
    marks = [_mark(device)]
    for _ in range(steps):
        loss = step(*batch)
        marks.append(_mark(device))
    wait(device)
    return list(_between(marks)), float(loss)


def _mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(marks: list[Any]) -> Iterator[float]:
    for one, next_ in pairwise(marks):
        yield (next_ - one) * 1e3 if isinstance(one, float) else one.elapsed_time(next_)


def _quartiles(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return high - low


def _host(step: Step, batch: tuple[Tensor, ...], device: str) -> float:
    times = []
    for _ in range(HOST):
        wait(device)
        start = time.perf_counter()
        step(*batch)
        times.append((time.perf_counter() - start) * 1e3)
    wait(device)
    return statistics.median(times)


def _resident_bytes(case: GpuCase) -> int:
    state = (t for each in case.optimizer.state.values() for t in each.values() if isinstance(t, Tensor))
    tensors = (*case.model.parameters(), *case.model.buffers(), *state, *case.batch)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _planned(step: tb.CompiledStep) -> dict[str, Any]:
    """What the report says, as far as this version's says it: a count for what it lists."""
    report = step.report()
    found: dict[str, Any] = {
        "peak_mib": round(report.peak_bytes / MIB, 2),
        "resident_mib": round(report.resident_bytes / MIB, 2),
        "eager_peak_mib": round(report.eager_peak_bytes / MIB, 2),
        "added": round(report.added_s / report.step_s, 4) if report.step_s else None,
    }
    for name in ("ops", "rebuilt_ops", "clusters", "distinct_clusters", "kernels"):
        value = getattr(report, name, None)
        found[name] = value if value is None or isinstance(value, int) else len(value)
    found["notes"] = list(report.notes)
    return found
