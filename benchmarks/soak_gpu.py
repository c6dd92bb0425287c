"""2,000 steps of GPT-2 in mode fast beside eager: loss curves within their own noise, and nothing grows.

    python benchmarks/soak_gpu.py [--steps 2000] [--seeds 4] [--limit-s 300] [--json PATH]
    python benchmarks/soak_gpu.py --device cpu --tiny --steps 60 --seeds 2          # to try the script

takeback and eager train the same weights on the same batches (bytes of Python's sources, 4 x 512), bf16 autocast,
dropout, fused AdamW, each with several seeds for dropout, a process for every training, all at once. Attention's
backward adds up in any order on a GPU, so even the same seed gives another curve each time.

Curves are means over a hundredth part of the way. How far the mean curve of takeback is from eager's is compared with
what chance would give: with every other way to deal the same curves into two groups. Where more than nine in ten of
these groupings are closer than the true one, the two differ.

Exits with 1 if they do, if memory or objects have grown from the second quarter of the way to the last, or if the time
was up before the last step.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback import zoo
from takeback.zoo.gpt import GPT2, SMALL

sys.path.insert(0, str(Path(__file__).parent))

from common import machine, wait

PARTS = 100  #: of the way
CHANCE = 0.1  #: at least so many groupings are as far apart
MOST_MIB = {"device": 1.0, "host": 32.0}  #: that memory may have grown by; the host's pages come and go
MOST_OBJECTS = 300
SYSTEMS = ("takeback", "eager")
_MIB = 2**20


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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


# -- one training, in a process of its own -----------------------------------------------------------------------------


def train(system: str, seed: int, device: str, tiny: bool, steps: int, limit_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    rows, length = (2, 32) if tiny else (4, 512)
    drawn = itertools.islice(zoo.byte_batches(rows, length, 0), steps)
    batches = [tuple(t.to(device) for t in batch) for batch in drawn]
    torch.manual_seed(0)
    with torch.device(device):
        model = zoo.GPT(replace(SMALL if tiny else GPT2, dropout=0.1)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    step = tb.compile_step(model, loss_fn, optimizer, mode="fast") if system == "takeback" else _eager(model, optimizer)
    losses = torch.zeros(steps, device=device)
    part, done, grown = max(1, steps // PARTS), 0, Grown()
    while done < steps and time.perf_counter() - began < limit_s:
        for i in range(done, min(steps, done + part)):
            torch.manual_seed(1_000_003 * seed + i)
            losses[i] = step(*batches[i])
        done = min(steps, done + part)
        wait(device)
        grown.measure(device)
    found: dict[str, Any] = {
        "system": system,
        "seed": seed,
        "steps": done,
        "seconds": round(time.perf_counter() - began, 1),
        "growth": grown.growth(),
        "curve": [round(float(p.mean()), 4) for p in losses[:done].split(part)],
    }
    if isinstance(step, tb.CompiledStep):
        found |= {"plans made": step._plans.made, "replays": step._replays, "steps in eager": step.counts.plain}
        found["graph"] = step._plans[0].executor.graph
    return found


def _eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# -- all of them -------------------------------------------------------------------------------------------------------


def distance(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Between the mean curves of two groups: the root of the mean square."""
    means = [[statistics.fmean(at) for at in zip(*group, strict=True)] for group in (some, others)]
    return (statistics.fmean((a - b) ** 2 for a, b in zip(*means, strict=True))) ** 0.5


def by_chance(curves: Sequence[Sequence[float]], first: int) -> tuple[float, float]:
    """How far the first so many curves are from the others, and the part of all groupings that is as far apart."""
    true = distance(curves[:first], curves[first:])
    every = range(len(curves))
    all_of_them = [
        distance([curves[i] for i in some], [curves[i] for i in every if i not in some])
        for some in itertools.combinations(every, first)
    ]
    return true, sum(d >= true * (1 - 1e-9) for d in all_of_them) / len(all_of_them)


def soak(asked: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for system, seed in itertools.product(SYSTEMS, range(asked.seeds)):
            out = Path(folder) / f"{system}-{seed}.json"
            words = ["--child", system, str(seed), "--device", asked.device, "--steps", str(asked.steps)]
            words += ["--limit-s", str(asked.limit_s), "--json", str(out), *(["--tiny"] if asked.tiny else [])]
            started.append((subprocess.Popen([sys.executable, __file__, *words]), out))
        for process, _ in started:
            if process.wait():
                raise SystemExit(f"a training ended with {process.returncode}")
        made = [json.loads(out.read_text()) for _, out in started]
    parts = min(len(each["curve"]) for each in made)
    curves = [each["curve"][:parts] for each in made]
    far, chance = by_chance(curves, asked.seeds)
    return {
        "rows and length": [2, 32] if asked.tiny else [4, 512],
        "steps": min(each["steps"] for each in made),
        "of": asked.steps,
        "distance from eager": round(far, 5),
        "groupings of the same curves that are as far apart": round(chance, 3),
        "last tenth": {
            system: [
                round(statistics.fmean(e["curve"][parts - parts // 10 :]), 4) for e in made if e["system"] == system
            ]
            for system in SYSTEMS
        },
        "trainings": made,
    }


def problems(found: dict[str, Any]) -> list[str]:
    said = []
    if found["steps"] < found["of"]:
        said.append(f"the time was up after {found['steps']} steps")
    chance = found["groupings of the same curves that are as far apart"]
    if chance < CHANCE:
        said.append(f"the losses differ from eager's: only {chance:.3f} of all groupings are as far apart")
    for each in (each for each in found["trainings"] if each["system"] == "takeback"):
        for name, limit in {**{f"{k} MiB": v for k, v in MOST_MIB.items()}, "objects": MOST_OBJECTS}.items():
            if each["growth"].get(name, 0) > limit:
                said.append(f"seed {each['seed']}: {name} have grown by {each['growth'][name]}")
        if each["plans made"] != 1:
            said.append(f"seed {each['seed']}: {each['plans made']} plans were made for one shape")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=4, help="trainings of each system")
    parser.add_argument("--limit-s", type=float, default=300, help="no part is begun after so many seconds")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("SYSTEM", "SEED"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.child:
        system, seed = asked.child
        found = train(system, int(seed), asked.device, asked.tiny, asked.steps, asked.limit_s)
        asked.json.write_text(json.dumps(found))
        return 0
    found = {"date": datetime.date.today().isoformat(), "machine": machine(asked.device), **soak(asked)}
    said = problems(found)
    print(json.dumps({k: v for k, v in found.items() if k != "trainings"}, indent=1), *said, sep="\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found | {"problems": said}) + "\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
