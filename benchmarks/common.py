"""What the benchmarks share: the machine they ran on, the bytes a step took, and rounds measured in turn."""

from __future__ import annotations

import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

import takeback as tb
from revision import COMMIT
from takeback.compiler.run import allocator

Step = Callable[[], object]


def machine(device: str = "cpu") -> dict[str, object]:
    """Where and with what the numbers were measured."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "takeback": tb.__version__,
        "python": platform.python_version(),
        "commit": COMMIT,
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(step: Step, device: str) -> int:
    """The most bytes of tensors alive during one step above what was alive before it."""
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
    cell = allocator.Cell()
    cell.view[0] = 1
    with native.record(cell) as recording:
        step()
    return _highest(recording.events)


def allocated(step: Step) -> tuple[int, int]:
    """How often one step on the CPU asks the allocator for memory of a tensor, and for how many bytes in all."""
    native = allocator.load()
    assert native is not None, "the benchmark measures with the native allocator; it needs g++"
    with native.record(allocator.Cell()) as recording:
        step()
    sizes = [int(event["size_bytes"]) for event in recording.events if event["kind"] == allocator.ALLOC]
    return len(sizes), sum(sizes)


def total_peak_bytes(build: Callable[[], Step], warm: int, device: str) -> int:
    """The most bytes of tensors alive during a step, with everything that `build` and the steps before it left."""
    if device == "cuda":
        step = build()
        for _ in range(warm):
            step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    native = allocator.load()
    assert native is not None, "the benchmark measures with the native allocator; it needs g++"
    cell = allocator.Cell()
    cell.view[0] = 0
    with native.record(cell) as recording:
        step = build()
        for _ in range(warm):
            step()
        gc.collect()
        cell.view[0] = 1
        step()
    return _highest(recording.events)


def _highest(events: Iterable[Mapping[str, int]]) -> int:
    """The most bytes alive while the recording's cell was 1."""
    level = most = 0
    sizes: dict[int, int] = {}
    for event in events:
        block = int(event["id"])
        most = max(most, level) if event["op"] == 1 else most
        if event["kind"] == allocator.ALLOC:
            sizes[block] = int(event["size_bytes"])
            level += sizes[block]
        elif block in sizes:
            level -= sizes.pop(block)
        most = max(most, level) if event["op"] == 1 else most
    return most


def seed(number: int) -> None:
    """torch's random numbers, and numpy's, from which some models of speech draw."""
    torch.manual_seed(number)
    np.random.seed(number)


def in_turn(steps: Mapping[str, Step], rounds: int, burst: int, device: str) -> dict[str, list[float]]:
    """Seconds of each in every round: a few calls in a row, the first of which does not count, in a drawn order."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for r in range(rounds):
        for name in random.Random(r).sample(list(steps), len(steps)):
            for k in range(burst):
                seed(1 + burst * r + k)
                if k == 1:
                    wait(device)
                    start = time.perf_counter()
                steps[name]()
            wait(device)
            times[name].append((time.perf_counter() - start) / (burst - 1))
    return times


def ratio(times: Mapping[str, list[float]], name: str, reference: str) -> float:
    """The median over the rounds of one system's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[reference], strict=True))
