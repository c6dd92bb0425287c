"""Peaks predicted for an H200 without one, and the same measured on it.

    python benchmarks/predict_gpu.py predict                    # anywhere: writes benchmarks/results/predicted-gpu.json
    python benchmarks/predict_gpu.py measure --json FILE        # on an H200, once the predictions are committed
    python benchmarks/predict_gpu.py table --json FILE          # one beside the other
    python benchmarks/predict_gpu.py predict --models gpt2,t5 --systems eager,fast@auto --tiny --json FILE   # to try it

Systems are `eager`, and takeback as `exact@auto`, `fast@auto`, `fast@min`. Mode "exact" needs an eager that repeats its
bits, so it is predicted and measured under torch.use_deterministic_algorithms(True), the others without. Each model
is a process of its own, which writes its rows one by one: one that fails or takes longer than --limit-s seconds leaves
the others alone, and after --total-s seconds no model is begun. An error is a part of what a step takes above what is
resident (parameters, state, batch): (predicted - measured peak) / (measured peak - resident). Peaks are
`torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import takeback as tb
from gpu_models import GpuCase, made
from gpu_systems import about
from predict_models import PREDICTED

HERE = Path(__file__).parent
PREDICTIONS = HERE / "results" / "predicted-gpu.json"
MEASURED = HERE / "results" / "predicted-gpu-measured.json"
SYSTEMS = ("eager", "exact@auto", "fast@auto", "fast@min")
ALLOWED = {"eager": 0.02, "exact": 0.02, "fast": 0.05}  #: errors, by the mode
MIB = 1 << 20
WARM, STEADY, SETTLE = 2, 3, 7  #: steps of eager before it is measured, that are measured, and of takeback before
Row = dict[str, Any]


class OutOfTime(BaseException):
    """A row took too long. No Exception: those are caught where a kernel is tried."""


# -- one model, in a process of its own ----------------------------------------------------------------------------


def predicted(model: str, systems: list[str], *, tiny: bool, gpu: str) -> Iterator[Row]:
    case = _without_bytes(model, tiny=tiny)
    for system in systems:
        mode, _, memory = system.partition("@")
        start = time.perf_counter()
        with _repeating(mode == "exact", _pools(case)):
            report = tb.predict(
                case.model,
                case.loss_fn,
                case.optimizer,
                *case.batch,
                mode="exact" if mode == "eager" else mode,
                memory=memory or "keep",
                device="cuda",
                gpu=gpu,
            )
        peak = report.eager_peak_bytes if mode == "eager" else report.peak_bytes
        yield {
            "model": model,
            "system": system,
            "gpu": gpu,
            "peak_mib": _mib(peak),
            "resident_mib": _mib(report.resident_bytes - report.resident.get("library workspaces", 0)),
            "step_ms": None if mode == "eager" else round((report.step_s + report.added_s) * 1e3, 2),
            "took_s": round(time.perf_counter() - start, 1),
            "code": _commit(),
            "transformers": about("cpu").get("transformers"),  # whose models are other programs in other versions
            **(_inside(report) if system == "exact@auto" else {}),
        }


def measured(model: str, systems: list[str], *, tiny: bool, limit_s: int) -> Iterator[Row]:
    case = made(PREDICTED[model], "cuda", tiny=tiny)
    for system in systems:
        row: Row = {"model": model, "system": system}
        start = time.perf_counter()
        try:
            with _no_longer_than(limit_s), _repeating(system.startswith("exact"), _pools(case)):
                row |= _measured(case, system)
        except (Exception, OutOfTime) as error:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        case.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        yield row | {"took_s": round(time.perf_counter() - start, 1)}


def _pools(case: GpuCase) -> bool:
    return any(isinstance(m, torch.nn.MaxPool2d) for m in case.model.modules())


@contextlib.contextmanager
def _repeating(wanted: bool, pools: bool) -> Iterator[None]:
    """Kernels that give the same bits in each run. `pools`: there is a max pool, whose backward has no such kernel."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted, warn_only=wanted and pools)
    torch.backends.cudnn.deterministic = wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def _without_bytes(model: str, *, tiny: bool) -> GpuCase:
    """Fakes where the model can be made of them: a large one is not to be drawn on a CPU."""
    with contextlib.suppress(Exception), FakeTensorMode():
        return made(PREDICTED[model], "cpu", tiny=tiny, trains_on="cuda")
    return made(PREDICTED[model], "cpu", tiny=tiny, trains_on="cuda")


def _measured(case: GpuCase, system: str) -> Row:
    mode, _, memory = system.partition("@")
    step: Callable[..., object] = _eager(case)
    compiled: tb.CompiledStep | None = None
    if mode != "eager":
        step = compiled = tb.compile_step(case.model, case.loss_fn, case.optimizer, mode=mode, memory=memory)
    torch.manual_seed(1)
    for _ in range(WARM if compiled is None else SETTLE):
        step(*case.batch)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEADY):
        start = time.perf_counter()
        step(*case.batch)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    stats = torch.cuda.memory_stats()
    found: Row = {
        "peak_mib": _mib(torch.cuda.max_memory_allocated()),
        "requested_mib": _mib(stats["requested_bytes.all.peak"]),
        "reserved_mib": _mib(torch.cuda.max_memory_reserved()),
        "between_mib": _mib(torch.cuda.memory_allocated()),
        "resident_mib": _mib(_resident_bytes(case)),
        "step_ms": round(min(times), 2),
    }
    if compiled is not None:
        report = compiled.report()
        found["planned_mib"], found["recorded_eager_mib"] = _mib(report.peak_bytes), _mib(report.eager_peak_bytes)
        found["planned_resident_mib"] = _mib(report.resident_bytes)
        if system == "exact@auto":
            found |= _inside(report)
    return found


def _eager(case: GpuCase) -> Callable[..., object]:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = case.loss_fn(case.model, *batch)
        loss.backward()
        case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _resident_bytes(case: GpuCase) -> int:
    state = (t for each in case.optimizer.state.values() for t in each.values() if isinstance(t, torch.Tensor))
    tensors = [t for t in (*case.model.parameters(), *case.model.buffers(), *state, *case.batch) if t.is_cuda]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _inside(report: tb.Report) -> Row:
    """What can be compared op by op: how often each made a value, and the most that it took for itself."""
    made_by = collections.Counter(entry.op for entry in report.ledger if entry.part != "scratch")
    taken: dict[str, int] = {}
    for entry in report.ledger:
        if entry.part == "scratch":
            taken[entry.op] = max(taken.get(entry.op, 0), entry.size_bytes)
    return {"values": dict(sorted(made_by.items())), "scratch_mib": {op: _mib(n) for op, n in sorted(taken.items())}}


@contextlib.contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTime(f"took longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _mib(size_bytes: float) -> float:
    return round(size_bytes / MIB, 2)


# -- all of them ---------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """A process for each model; what it has written goes into the file, whatever became of it."""
    out = arguments.json or (PREDICTIONS if arguments.what == "predict" else MEASURED)
    began = time.time()
    kept: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": []}
    kept["machine"] = about("cuda" if arguments.what == "measure" else "cpu") | {"tiny": arguments.tiny}
    kept["code"] = _commit()
    for model in arguments.models:
        if time.time() - began > arguments.total_s:
            print(f"{model}: not begun, {arguments.total_s} s are over", flush=True)
            continue
        left = arguments.total_s - (time.time() - began)
        for row in _in_a_process(model, arguments, min(left, arguments.limit_s * len(arguments.systems) + 60)):
            same = [r for r in kept["rows"] if (r["model"], r["system"]) == (row["model"], row["system"])]
            kept["rows"] = [r for r in kept["rows"] if r not in same] + [row]
            print({k: v for k, v in row.items() if k not in ("values", "scratch_mib")}, flush=True)
            out.write_text(json.dumps(kept, indent=1) + "\n")
    if arguments.what == "measure":
        table(arguments.predictions, out)


def _in_a_process(model: str, arguments: argparse.Namespace, limit_s: float) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        words = [sys.executable, __file__, f"one-{arguments.what}", "--models", model, "--json", str(rows)]
        words += ["--systems", ",".join(arguments.systems), "--limit-s", str(arguments.limit_s), "--gpu", arguments.gpu]
        process = subprocess.Popen(
            words + ["--tiny"] * arguments.tiny,
            env={
                **os.environ,
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },  # what an H200 has anyway, and determinism asks for
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        said = ""
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = f"stopped after {limit_s:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        if process.returncode:
            last = (said.strip().splitlines() or [""])[-1][:500]
            missing = [s for s in arguments.systems if s not in [row["system"] for row in found]]
            found += [{"model": model, "system": system, "error": last} for system in missing[:1]]
        return found


def one(arguments: argparse.Namespace) -> None:
    [model] = arguments.models
    rows = (
        predicted(model, arguments.systems, tiny=arguments.tiny, gpu=arguments.gpu)
        if arguments.what == "one-predict"
        else measured(model, arguments.systems, tiny=arguments.tiny, limit_s=arguments.limit_s)
    )
    with arguments.json.open("w") as out:
        for row in rows:
            print(json.dumps(row), file=out, flush=True)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False)
    return done.stdout.strip() or "unknown"


# -- the table -----------------------------------------------------------------------------------------------------


def table(predictions: Path, measurements: Path) -> None:
    """Markdown, worst errors told at the end."""
    said = {(r["model"], r["system"]): r for r in json.loads(predictions.read_text())["rows"] if "error" not in r}
    rows = json.loads(measurements.read_text())["rows"]
    print("\n| model | system | resident MiB | predicted MiB | measured MiB | error | allowed |")
    print("|---|---|---:|---:|---:|---:|---:|")
    within: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for row in sorted(rows, key=lambda r: (list(PREDICTED).index(r["model"]), SYSTEMS.index(r["system"]))):
        known = said.get((row["model"], row["system"]))
        if "error" in row or known is None:
            print(f"| {row['model']} | {row['system']} | | | {row.get('error', 'not predicted')} | | |")
            continue
        mode = row["system"].partition("@")[0]
        error = (known["peak_mib"] - row["peak_mib"]) / (row["peak_mib"] - row["resident_mib"])
        total[row["system"]] += 1
        within[row["system"]] += abs(error) <= ALLOWED[mode]
        print(
            f"| {row['model']} | {row['system']} | {row['resident_mib']:.0f} | {known['peak_mib']:.0f} | "
            f"{row['peak_mib']:.0f} | {error:+.1%} | {ALLOWED[mode]:.0%} |"
        )
    print("\n" + ", ".join(f"{system}: {within[system]} of {total[system]} within" for system in SYSTEMS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "table", "one-predict", "one-measure"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(PREDICTED))
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit-s", type=int, default=240)
    parser.add_argument("--total-s", type=float, default=float("inf"))
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models if name not in PREDICTED]
    if unknown:
        raise SystemExit(f"unknown models {', '.join(unknown)}; there are {', '.join(PREDICTED)}")
    if arguments.what.startswith("one-"):
        one(arguments)
    elif arguments.what == "table":
        table(arguments.predictions, arguments.json or MEASURED)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
