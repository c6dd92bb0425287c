"""What the first steps of mode "fast" cost, beside torch.compile's: from nothing, and with what a process before kept.

    python benchmarks/first_kernels.py [--models gpt2 bert ...] [--workers 2] [--out FILE]
    python benchmarks/first_kernels.py --device cuda --workers 16 --out benchmarks/results/first-kernels-h200.json
    python benchmarks/first_kernels.py --models gpt2 --profile FOLDER  # where the time goes, with the caches of FOLDER

Every measurement is a process of its own, whose caches (TAKEBACK_CACHE, Inductor's and Triton's) are in a folder that
is empty at first; a second process takes a few steps more, so that everything is kept, and a third one finds the folder
filled. What is timed is three first steps, from before the system is made to the end of the third; a step in eager has
warmed the device up. `one by one` is takeback with each kernel waited for before the next one is written. All have the
same number of compile workers. On a CPU models have few columns and all their layers, and what takes the time of a
first step is g++; `cpu_s` is the time that this process had a core, which its compilers' is not.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpu_systems
import takeback as tb
from common import machine, wait
from gpu_models import GpuCase, causal
from takeback.compiler.run import kernels
from takeback.compiler.run.kernel_workers import Afterwards

FILL = 6  #: steps after which nothing more is kept
ROWS, LENGTH, WORDS = 2, 64, 509


def _text(kind: str, config: str, **settings: int) -> GpuCase:
    import transformers

    made = getattr(transformers, config)(vocab_size=WORDS, bos_token_id=1, eos_token_id=2, **settings)
    made.use_cache = False
    model: nn.Module = getattr(transformers, kind)(made).train()
    return GpuCase(model, causal, torch.optim.AdamW(model.parameters(), 1e-3), (torch.randint(WORDS, (ROWS, LENGTH)),))


class Bottleneck(nn.Module):
    """As in ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1))
        self.main = nn.Sequential()
        for a, b, kernel, step in sizes:
            self.main.extend((nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()))
        del self.main[-1]
        self.side = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.side.extend((nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.side(x))


def _resnet50() -> GpuCase:
    width = 8
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not number else 1))
            inputs = 4 * (width << stage)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    model = nn.Sequential(*layers).train()

    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m(x), y)

    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return GpuCase(model, loss_fn, optimizer, (torch.randn(4, 3, 64, 64), torch.randint(10, (4,))))


_LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SMALL: dict[str, Callable[[], GpuCase]] = {
    "gpt2": lambda: _text("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_head=4, n_layer=12, n_positions=LENGTH),
    "bert": lambda: _text("BertForMaskedLM", "BertConfig", num_hidden_layers=12, **_LAYERS),
    "llama": lambda: _text("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=16, num_key_value_heads=2, **_LAYERS),
    "resnet50": _resnet50,
}
SYSTEMS = {"torch.compile": "compile", "takeback": "fast@auto", "takeback, one by one": "fast@auto"}


def case_of(model: str, device: str) -> GpuCase:
    torch.manual_seed(0)
    return SMALL[model]() if device == "cpu" else gpu_systems.started(model, "eager", device=device, tiny=False).case


def measure(model: str, system: str, device: str, steps: int, *, profile: bool = False) -> dict[str, Any]:
    case = case_of(model, device)
    if "one by one" in system:
        kernels.at_once = lambda: contextlib.nullcontext(Afterwards())
    warm = case.loss_fn(case.model, *case.batch)
    warm.backward()
    case.model.zero_grad()
    del warm
    wait(device)
    profiler = cProfile.Profile()
    start, began = time.perf_counter(), time.process_time()
    if profile:
        profiler.enable()
    running = gpu_systems.made(gpu_systems.Running(gpu_systems._eager(case, case.loss_fn), case), SYSTEMS[system])
    for _ in range(steps):
        running.step(*case.batch)
    wait(device)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(120).sort_stats("tottime").print_stats(40)
    found: dict[str, Any] = {
        "first_three_s": round(time.perf_counter() - start, 2),
        "cpu_s": round(time.process_time() - began, 2),
    }
    step = running.compiled
    if isinstance(step, tb.CompiledStep) and step._last is not None:
        made = step._last.executor.kernels.in_program(step._last.executor.program)
        found |= {"kernels": len(made), "on eager's": [str(k.note) for k in made if k.note is not None]}
        found["spent"] = {name: round(s, 2) for name, s in vars(step._last.spent).items()}
    return found


def in_process(model: str, system: str, device: str, steps: int, folder: str, workers: int) -> dict[str, Any]:
    child = [sys.executable, __file__, "--models", model, "--device", device, "--child", system, "--steps", str(steps)]
    out = subprocess.run(child, env=environment(folder, workers), capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(out.stderr)
    found: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return found


def environment(folder: str, workers: int) -> dict[str, str]:
    return os.environ | {
        "TAKEBACK_CACHE": f"{folder}/takeback",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_COMPILE_THREADS": str(workers),
    }


def rows_of(model: str, system: str, device: str, workers: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for cache in ("empty", "filled"):
            if cache == "filled":
                in_process(model, system, device, FILL, folder, workers)
            row = {"model": model, "system": system, "cache": cache}
            found.append(row | in_process(model, system, device, 3, folder, workers))
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SMALL), choices=list(SMALL))
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="that compile")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--child", default="", help="one system in this process, as JSON")
    parser.add_argument("--profile", default="", metavar="FOLDER")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.child or asked.profile:
        if asked.profile:
            os.environ.update(environment(asked.profile, asked.workers))
        for model in asked.models:
            system = asked.child or "takeback"
            print(json.dumps(measure(model, system, asked.device, asked.steps, profile=bool(asked.profile))))
        return
    rows = [row for m in asked.models for s in asked.systems for row in rows_of(m, s, asked.device, asked.workers)]
    for row in rows:
        torchs = [r for r in rows if (r["model"], r["cache"]) == (row["model"], row["cache"])]
        [beside] = [r for r in torchs if r["system"] == "torch.compile"] or [row]
        row["ratio to torch.compile"] = round(row["first_three_s"] / beside["first_three_s"], 2)
    result = {
        "machine": machine(asked.device) | {"workers": asked.workers},
        "command": " ".join(("python", *sys.argv)),
        "rows": rows,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
