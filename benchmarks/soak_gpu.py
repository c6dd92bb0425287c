"""2,000 steps of GPT-2 in mode fast beside eager: loss curves within their own noise, and nothing grows.

    python benchmarks/soak_gpu.py [--steps 2000] [--seeds 4] [--limit-s 480] [--json PATH]
    python benchmarks/soak_gpu.py --device cpu --tiny --steps 60 --seeds 2          # to try the script

takeback and eager train the same weights on the same batches (bytes of Python's sources, 4 x 512), bf16 autocast,
dropout, fused AdamW, each with several seeds for dropout, a process for every training, all at once. Attention's
backward adds up in any order on a GPU, so even the same seed gives another curve each time.

Curves are means over a hundredth part of the way. How far the mean curve of takeback is from eager's is compared with
what chance would give: with every other way to deal the same curves into two groups. Where more than nine in ten of
these groupings are closer than the true one, the two differ.

Exits with 1 if they do, if memory or objects have grown from the second quarter of the way to the last, if a training
failed, or if the time was up before the last step. The results are written all the same, of the trainings and steps
that there are: each training writes down after every part what it has, and what still runs at the limit is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
GRACE_S = 15.0  #: before the limit no part is begun, so that the last one ends by itself
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


def train(
    system: str, seed: int, device: str, tiny: bool, steps: int, until: float, write: Callable[[dict[str, Any]], None]
) -> None:
    """`write` is given what is known after each part; none is begun when the clock (time.time) shows `until`."""
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
    while done < steps and time.time() < until:
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
            found["graph"] = step._plans[0].executor.graph if len(step._plans) else None
        write(found)


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


@dataclass(frozen=True)
class Training:
    """What one of the processes left behind: `found` is the last that it wrote, None if it wrote nothing."""

    name: str
    found: dict[str, Any] | None
    failed: str | None  #: why it did not end by itself, or not well


def run_all(commands: Mapping[str, Sequence[str]], until: float, folder: Path) -> list[Training]:
    """Runs them at once; each is told, as its last word, where to write. What still runs when the clock shows `until`
    is ended."""
    started = {}
    try:
        for name, words in commands.items():
            with (folder / f"{name}.err").open("w") as said:
                started[name] = subprocess.Popen([*words, str(folder / f"{name}.json")], stderr=said)
        for process in started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.time()))
        late = {name for name, process in started.items() if process.poll() is None}
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    made = []
    for name, process in started.items():
        out, said = folder / f"{name}.json", (folder / f"{name}.err").read_text().strip()
        why = f"it ended with {process.returncode}: {said[-2000:]}" if process.returncode else None
        found = json.loads(out.read_text()) if out.exists() else None
        made.append(Training(name, found, "it was ended, for the time was up" if name in late else why))
    return made


def soak(asked: argparse.Namespace) -> dict[str, Any]:
    ends = time.time() + asked.limit_s
    commands = {}
    for system, seed in itertools.product(SYSTEMS, range(asked.seeds)):
        words = ["--child", system, str(seed), "--device", asked.device, "--steps", str(asked.steps)]
        words += ["--until", str(ends - GRACE_S), *(["--tiny"] if asked.tiny else []), "--json"]
        commands[f"{system}-{seed}"] = [sys.executable, __file__, *words]
    with tempfile.TemporaryDirectory() as folder:
        trainings = run_all(commands, ends, Path(folder))
    return {"rows and length": [2, 32] if asked.tiny else [4, 512], "of": asked.steps, **compared(trainings)}


def compared(trainings: Sequence[Training]) -> dict[str, Any]:
    """The curves as far as all go of which there is one; without a curve of each system there is nothing to compare."""
    made = [each.found for each in trainings if each.found is not None]
    failed = {each.name: each.failed for each in trainings if each.failed is not None}
    curves = {system: [e["curve"] for e in made if e["system"] == system] for system in SYSTEMS}
    found: dict[str, Any] = {
        "steps": min((each["steps"] for each in made), default=0),
        "failed": failed,
        "trainings": made,
    }
    if not all(curves.values()):
        return found
    parts = min(len(each["curve"]) for each in made)
    ours, eagers = ([curve[:parts] for curve in curves[system]] for system in SYSTEMS)
    far, chance = by_chance([*ours, *eagers], len(ours))
    return found | {
        "distance from eager": round(far, 5),
        "groupings of the same curves that are as far apart": round(chance, 3),
        "distance of two curves": {
            "takeback and eager": _middle(itertools.product(ours, eagers)),
            "two of eager": _middle(itertools.combinations(eagers, 2)),
        },
        "last tenth": {
            system: [round(statistics.fmean(curve[-max(1, parts // 10) :]), 4) for curve in group]
            for system, group in zip(SYSTEMS, (ours, eagers), strict=True)
        },
    }


def _middle(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float | None:
    """The median distance; None of no pairs."""
    found = [distance([one], [other]) for one, other in pairs]
    return round(statistics.median(found), 5) if found else None


def problems(found: dict[str, Any]) -> list[str]:
    said = [f"{name}: {why}" for name, why in found["failed"].items()]
    if found["steps"] < found["of"]:
        said.append(f"a training has made {found['steps']} of {found['of']} steps")
    chance = found.get("groupings of the same curves that are as far apart")
    if chance is None:
        said.append("there is nothing to compare")
    elif chance < CHANCE:
        said.append(f"the losses differ from eager's: only {chance:.3f} of all groupings are as far apart")
    for each in (each for each in found["trainings"] if each["system"] == "takeback"):
        for name, limit in {**{f"{k} MiB": v for k, v in MOST_MIB.items()}, "objects": MOST_OBJECTS}.items():
            if each["growth"].get(name, 0) > limit:
                said.append(f"seed {each['seed']}: {name} have grown by {each['growth'][name]}")
        if each["plans made"] != 1:
            said.append(f"seed {each['seed']}: {each['plans made']} plans were made for one shape")
    return said


def _write_whole(path: Path, found: dict[str, Any]) -> None:
    """Who reads it finds all of it, or what was there before."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(found))
    beside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=4, help="trainings of each system")
    parser.add_argument("--limit-s", type=float, default=480, help="what still runs after so many seconds is ended")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, metavar=("SYSTEM", "SEED"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.child:
        system, seed = asked.child
        write = functools.partial(_write_whole, asked.json)
        train(system, int(seed), asked.device, asked.tiny, asked.steps, asked.until, write)
        return 0
    found = {"date": datetime.date.today().isoformat(), "machine": machine(asked.device), **soak(asked)}
    said = problems(found)
    print(json.dumps({k: v for k, v in found.items() if k != "trainings"}, indent=1), *said, sep="\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found | {"problems": said}) + "\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
