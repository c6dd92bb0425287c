"""2,000 steps of GPT-2 in mode fast beside eager: loss curves within their own noise, and nothing grows.

    python benchmarks/soak_gpu.py [--steps 2000] [--limit-s 180] [--json PATH]
    python benchmarks/soak_gpu.py --device cpu --tiny --steps 60          # to try the script

takeback and eager train the same weights on the same batches (bytes of Python's sources, 4 x 512) from the same seed,
bf16 autocast, dropout, fused AdamW. Two more eager trainings have other seeds for dropout: how far these three are from
one another is the noise. The trainings take turns, a hundredth part of the way each. Curves are compared by the mean
loss of such a part; takeback's may be as far from eager's as `FACTOR` times the two of eager's that are furthest apart.

Exits with 1 if it is further off, if memory or objects have grown from the second quarter of the way to the last, or
if the time was up before the last step.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback import zoo
from takeback.zoo.gpt import GPT2, SMALL

sys.path.insert(0, str(Path(__file__).parent))

from dataclasses import replace

from common import machine, wait

PARTS = 100  #: of the way
FACTOR = 1.5
MOST_MIB = {"device": 1.0, "host": 32.0}  #: that memory may have grown by; the host's pages come and go
MOST_OBJECTS = 300
_MIB = 2**20


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Training:
    """One of those that take turns. `losses` is on the device, so that no step waits for it."""

    name: str
    seed: int
    model: nn.Module
    step: Callable[[Tensor, Tensor], Tensor]
    losses: Tensor
    seconds: float = 0.0

    def advance(self, batches: Sequence[tuple[Tensor, Tensor]], first: int, device: str) -> None:
        start = time.perf_counter()
        for i, batch in enumerate(batches, first):
            torch.manual_seed(1_000_003 * self.seed + i)
            self.losses[i] = self.step(*batch)
        wait(device)
        self.seconds += time.perf_counter() - start


@dataclass
class Grown:
    """Measured after each part of the way."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)

    def measure(self, device: str) -> None:
        gc.collect()
        if device == "cuda":
            self.device.append(torch.cuda.memory_stats()["requested_bytes.all.current"] / _MIB)
        self.host.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / _MIB)
        self.objects.append(len(gc.get_objects()))

    def growth(self) -> dict[str, float]:
        """From the second quarter of the way to the last."""
        found = {}
        for name, of in (("device MiB", self.device), ("host MiB", self.host), ("objects", self.objects)):
            quarter = max(1, len(of) // 4)
            if of:
                late, early = statistics.median(of[-quarter:]), statistics.median(of[quarter : 2 * quarter] or of[:1])
                found[name] = round(late - early, 2)
        return found


def trainings(device: str, tiny: bool, steps: int, others: int) -> list[Training]:
    config = replace(SMALL if tiny else GPT2, dropout=0.1)
    made = []
    for seed in range(others + 1):
        for fast in (False, True) if seed == 0 else (False,):
            torch.manual_seed(0)
            with torch.device(device):
                model = zoo.GPT(config).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
            step = tb.compile_step(model, loss_fn, optimizer, mode="fast") if fast else _eager(model, optimizer)
            name = "takeback" if fast else f"eager, seed {seed}"
            made.append(Training(name, seed, model, step, torch.zeros(steps, device=device)))
    return made


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Of two curves: the root of the mean square."""
    return (sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)) ** 0.5


def soak(device: str, tiny: bool, steps: int, others: int, limit_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    rows, length = (2, 32) if tiny else (4, 512)
    drawn = itertools.islice(zoo.byte_batches(rows, length, 0), steps)
    batches = [tuple(t.to(device) for t in batch) for batch in drawn]
    made, grown = trainings(device, tiny, steps, others), Grown()
    part, done = max(1, steps // PARTS), 0
    while done < steps and time.perf_counter() - began < limit_s:
        for training in made:
            training.advance(batches[done : done + part], done, device)
        done = min(done + part, steps)
        grown.measure(device)
        if done % (10 * part) == 0:
            said = ", ".join(f"{t.name} {t.losses[done - part : done].mean():.4f}" for t in made)
            print(f"{done} steps, {time.perf_counter() - began:.0f} s: {said}", flush=True)
    curves = {t.name: [float(p.mean()) for p in t.losses[:done].split(part)] for t in made}
    eagers = [c for name, c in curves.items() if name != "takeback"]
    noise = [distance(a, b) for a, b in itertools.combinations(eagers, 2)]
    step = next(t.step for t in made if isinstance(t.step, tb.CompiledStep))
    return {
        "steps": done,
        "of": steps,
        "rows and length": [rows, length],
        "distance from eager": distance(curves["takeback"], curves["eager, seed 0"]),
        "distances between eager's seeds": noise,
        "growth from the second quarter to the last": grown.growth(),
        "plans made": step._plans.made,
        "replays": step._replays,
        "steps in eager": step.counts.plain,
        "seconds": {t.name: round(t.seconds, 1) for t in made} | {"all": round(time.perf_counter() - began, 1)},
        "curves": {name: [round(x, 4) for x in curve] for name, curve in curves.items()},
    }


def problems(found: dict[str, Any]) -> list[str]:
    said = []
    if found["steps"] < found["of"]:
        said.append(f"the time was up after {found['steps']} steps")
    most = max(found["distances between eager's seeds"])
    if not found["distance from eager"] <= FACTOR * most:
        said.append(f"the losses are {found['distance from eager']:.4g} from eager's, whose noise is {most:.4g}")
    growth = found["growth from the second quarter to the last"]
    for name, limit in {**{f"{k} MiB": v for k, v in MOST_MIB.items()}, "objects": MOST_OBJECTS}.items():
        if growth.get(name, 0) > limit:
            said.append(f"{name} have grown by {growth[name]}")
    if found["plans made"] != 1:
        said.append(f"{found['plans made']} plans were made for one shape")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--others", type=int, default=2, help="eager trainings with other seeds")
    parser.add_argument("--limit-s", type=float, default=180, help="no part is begun after so many seconds")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found = soak(asked.device, asked.tiny, asked.steps, asked.others, asked.limit_s)
    found = {"date": datetime.date.today().isoformat(), "machine": machine(asked.device), **found}
    said = problems(found)
    print(json.dumps({k: v for k, v in found.items() if k != "curves"}, indent=1), *said, sep="\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found | {"problems": said}) + "\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
