"""A long training with changing shapes beside its eager twin: nothing grows, and no bit ever differs.

    python benchmarks/soak.py [--steps 100000] [--mode exact|fast] [--minutes M] [--json PATH]

After each step the losses are compared, and every 100 steps all parameters, buffers and optimizer state, bit by bit. In
mode fast, with kernels that Inductor generates, all are compared within `NEAR` every 10 steps, and then takeback goes
on from eager's tensors: two right trainings of which each rounds in its own way grow apart. SGD trains there. A norm
over two or three rows makes much of what is rounded, so what is not near must be no further from the same steps in
double precision than twice what eager is.
There are more shapes than plans: a few come up at a time, every so often one goes and another comes, and between them
are odd ones out of all. So plans are made and dropped all the way, and what has no room for one runs plainly.
Every hundredth part of the way the process is measured: its resident memory, the objects that Python's collector knows,
and the plans. Exits with 1 if anything differs, or has grown from the second quarter of the way to the last.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import takeback as tb

sys.path.insert(0, str(Path(__file__).parent))

from common import machine

SHAPES = 48  #: batches have 1 to so many rows; each is a shape of its own
AT_A_TIME = 6  #: that come up in turns of chance, until
MOVES = {"exact": 200, "fast": 50}  #: steps later the first of them goes, and the next one comes
ODD = 0.02  #: of the steps have any shape at all
PLANS = 8  #: are kept
NEAR = 1e-2  #: of a tensor's norm, in mode fast
COMPARED = {"exact": 100, "fast": 10}  #: steps from one comparison of everything to the next
_MIB = 2**20
MOST_MIB = 4.0  #: that the resident memory may differ by: pages come and go
MOST_OBJECTS = 200  #: the same of objects: caches of torch's and of Python's own fill by and by


class Small(nn.Module):
    """Norms with running statistics, dropout, an op in place, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.seen = nn.BatchNorm1d(16, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.first(x)))
        x = F.dropout(x, 0.1) + F.linear(x, self.first.weight).relu_()
        return self.last(x if len(x) == 1 else self.seen(x))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@dataclass
class Outcome:
    """What was found. Each list has one number for each measurement."""

    steps: int = 0
    differences: int = 0
    doubled: int = 0  #: losses or tensors that were not near, and no further from double precision than they may be
    resident_mib: list[float] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    plans: list[int] = field(default_factory=list)
    plans_made: int = 0
    dropped: int = 0  #: plans, for want of room
    replays: int = 0
    plain: int = 0  #: steps that had no plan

    def growth(self, of: list[float] | list[int]) -> float:
        """From the second quarter of the way to the last."""
        quarter = max(1, len(of) // 4)
        return statistics.median(of[-quarter:]) - statistics.median(of[quarter : 2 * quarter] or of[:1])

    @property
    def problems(self) -> list[str]:
        found = [f"{self.differences} differences from eager"] if self.differences else []
        if self.growth(self.resident_mib) > MOST_MIB:
            found.append(f"resident memory has grown by {self.growth(self.resident_mib):.1f} MiB")
        if self.growth(self.objects) > MOST_OBJECTS:
            found.append(f"there are {self.growth(self.objects):.0f} more objects")
        if max(self.plans) > PLANS:
            found.append(f"{max(self.plans)} plans were kept, which may be {PLANS}")
        return found


def soak(
    steps: int,
    measurements: int = 100,
    progress: Progress | None = None,
    mode: str = "exact",
    minutes: float = float("inf"),
) -> Outcome:
    """Trains so many steps, or for so long, and measures so often."""
    torch.manual_seed(0)
    ours = Small()
    eagers = copy.deepcopy(ours)
    optimizer, twin = (_optimizer(m, mode) for m in (ours, eagers))
    doubled = _Doubled(eagers) if mode == "fast" else None
    step = tb.compile_step(ours, loss_fn, optimizer, max_plans=PLANS, mode=mode)
    end = time.monotonic() + 60 * minutes
    draw = torch.Generator().manual_seed(1)
    found = Outcome()
    bar = progress.add_task("soaking", total=steps) if progress is not None else None
    every = max(1, steps // measurements)
    for i in range(steps):
        if time.monotonic() > end:
            break
        rows = _rows(i, draw, MOVES[mode])
        x = torch.randn(rows, 16, generator=draw)
        y = torch.randint(4, (rows,), generator=draw)
        torch.manual_seed(i)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "there are .* plans and no room for more")
            loss = step(x, y)
        torch.manual_seed(i)
        expected = _plain(eagers, twin, x, y)
        exact = []
        if doubled is not None:
            torch.manual_seed(i)
            exact = [_plain(doubled.model, doubled.optimizer, x.double(), y)]
        found.steps += 1
        pairs = [(loss, expected)]
        if i % COMPARED[mode] == 0 or i == steps - 1:
            states = zip(_everything(ours, optimizer), _everything(eagers, twin), strict=True)
            pairs.extend(states)
            if doubled is not None:
                exact.extend(_everything(doubled.model, doubled.optimizer))
        if doubled is None:
            found.differences += sum(not torch.equal(a, b) for a, b in pairs)
        else:
            far = [(a, b, c) for (a, b), c in zip(pairs, exact, strict=True) if not _near(a, b)]
            wrong = sum(not _no_further(*each) for each in far)
            found.differences += wrong
            found.doubled += len(far) - wrong
            if len(pairs) > 1:
                _go_on_from_(pairs[1:], exact[1:])
        if (i + 1) % every == 0:
            del x, y, loss, expected, exact, pairs
            gc.collect()
            found.resident_mib.append(_resident_mib())
            found.objects.append(len(gc.get_objects()))
            found.plans.append(len(step._plans))
            if progress is not None and bar is not None:
                progress.update(bar, completed=i + 1)
    found.plans_made, found.dropped = step._plans.made, step._plans.dropped
    found.replays, found.plain = step._replays, step.counts.plain
    return found


class _Doubled:
    """The twin in double precision, with the same masks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).double()
        self.optimizer = _optimizer(self.model, "fast")


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = loss_fn(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _rows(step: int, draw: torch.Generator, moves: int) -> int:
    if float(torch.rand((), generator=draw)) < ODD:
        return 1 + int(torch.randint(SHAPES, (), generator=draw))
    return 1 + (step // moves + int(torch.randint(AT_A_TIME, (), generator=draw))) % SHAPES


def _optimizer(model: nn.Module, mode: str) -> torch.optim.Optimizer:
    if mode == "fast":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a.double() - b.double()).norm() <= NEAR * b.double().norm() + 1e-6)


def _no_further(ours: Tensor, eagers: Tensor, exact: Tensor) -> bool:
    """From double precision than twice what eager is."""
    return bool((ours.double() - exact).norm() <= 2 * (eagers.double() - exact).norm())


@torch.no_grad()
def _go_on_from_(pairs: list[tuple[Tensor, Tensor]], exact: list[Tensor]) -> None:
    """From what eager has, in all three."""
    for (ours, eagers), doubled in zip(pairs, exact, strict=True):
        ours.copy_(eagers)
        doubled.copy_(eagers)


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return [*model.parameters(), *model.buffers(), *states]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / _MIB, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then")
    parser.add_argument("--json", type=Path, help="write the outcome there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with Progress() as progress:
        found = soak(given.steps, progress=progress, mode=given.mode, minutes=given.minutes)
    growth = {"resident_mib": round(found.growth(found.resident_mib), 2), "objects": found.growth(found.objects)}
    print(f"{found.steps} steps, {found.differences} differences, growth {growth}, {found.plans_made} plans made")
    print(f"{found.dropped} of them dropped, {found.plain} steps without a plan, {found.doubled} as near as eager is")
    print(*found.problems, sep="\n")
    if given.json is not None:
        outcome = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "mode": given.mode,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "shapes": SHAPES,
            "growth from the second quarter to the last": growth,
            **asdict(found),
        }
        given.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
