"""Presses Ctrl-C at random moments of compiled steps, and looks whether anything is left half-done.

    python benchmarks/interrupts.py [--interrupts 20000] [--seed 0] [--out benchmarks/results/interrupts.json]

Tiny models, random combinations of options, recordings and replays. A timer (signal.setitimer) strikes somewhere in a
step. After it parameters, buffers, optimizer, scaler and the random state must be those of a complete step, before or
after; gradients, grad mode, autocast, modes, the handler of SIGINT and what a recording sets for its time must be as
they were; and the next steps must be eager's, bit by bit.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import datetime
import itertools
import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # else a step imports it, and that changes torch.manual_seed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import takeback as tb
from common import machine
from takeback.compiler.capture import leaks
from takeback.compiler.run.eager import eager_step

State = dict[str, Tensor]

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "rmsprop, by its own step()": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
}
_STEPS_PER_COURSE = 12  #: replays tried in one course before the next combination of options is drawn
_MOST_FAULTS = 100


@dataclass(frozen=True)
class Choice:
    """One combination of what a step is made with."""

    optimizer: str
    options: tuple[tuple[str, Any], ...]
    scaler: bool

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.optimizer}; {settings or 'no options'}{'; scaler' if self.scaler else ''}"


def choose(draw: random.Random) -> Choice:
    """Options that may stand together: update="early" wants the gradients one by one, and whole."""
    options: dict[str, Any] = {"memory": draw.choice(("keep", "auto", "min", "0.9x"))}
    early = draw.random() < 0.25
    if early:
        options["update"] = "early"
    elif draw.random() < 0.3:
        options["clip_norm"] = 0.5
    if draw.random() < 0.3 and not early:
        options["accumulate"] = 2
    if draw.random() < 0.4:
        options["verify_every"] = draw.choice((1, 2))
    if draw.random() < 0.3 and not early:
        options["keep_grads"] = True
    optimizer = draw.choice(("adamw", "sgd") if early else tuple(OPTIMIZERS))
    return Choice(optimizer, tuple(options.items()), scaler=not early and draw.random() < 0.3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=g), torch.randint(0, 4, (8,), generator=g)


@dataclass
class Side:
    """A model, its optimizer and scaler."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None

    @classmethod
    def made(cls, choice: Choice, model: nn.Module) -> Side:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3) if choice.scaler else None
        return cls(model, OPTIMIZERS[choice.optimizer](model), scaler)

    def state(self) -> State:
        """Everything that a step changes, random numbers included."""
        found = {n: t.detach().clone() for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        names = {id(p): n for n, p in self.model.named_parameters()}
        for p, table in self.optimizer.state.items():
            found |= {f"{names[id(p)]}.{k}": torch.as_tensor(v).detach().clone() for k, v in table.items()}
        if self.scaler is not None:
            found["scale"] = torch.tensor(self.scaler.get_scale())
            found["growth"] = torch.tensor(self.scaler._get_growth_tracker())
        return found | {"random state": torch.get_rng_state()}


def flags() -> dict[str, object]:
    """What a step may change for its own time only."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": tuple(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "SIGINT": signal.getsignal(signal.SIGINT),
        "recording": tuple(leaks._recording.values()),
        "traps": tuple(name for name in ("numpy", "tolist") if name in vars(torch.Tensor)),
        "seeds": (torch.manual_seed, torch.seed, torch.Tensor.__dlpack__),
        "trace": sys.gettrace(),
    }


def difference(a: State, b: State) -> str | None:
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b or not torch.equal(a[name], b[name]):
            return name
    return None


@dataclass
class Tally:
    """What was tried, and what was found."""

    struck: dict[str, int] = field(default_factory=collections.Counter)  #: interrupts that hit, by kind of step
    stayed: dict[str, int] = field(default_factory=collections.Counter)  #: of these, how often the step was made
    missed: int = 0  #: the timer came after the step
    swallowed: int = 0  #: struck where Python itself drops exceptions: in a `__del__`, a collector's callback
    choices: set[Choice] = field(default_factory=set)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def interrupts(self) -> int:
        return sum(self.struck.values())

    def fault(self, kind: str, example: str) -> None:
        self.faults[kind] += 1
        if kind not in self.examples:
            self.examples[kind] = example
            print(f"== {kind}\n{example}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def swallowed(tally: Tally) -> Iterator[None]:
    """Python drops what is raised in finalizers and in callbacks of the garbage collector (hypothesis has one), and
    calls a hook. There a Ctrl-C is lost, with or without a compiled step: it is counted. Another exception there is of
    what the Ctrl-C has left half-made: a fault."""
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            tally.swallowed += 1
        else:
            tally.fault(f"dropped: {dropped.exc_type.__name__}", f"{dropped.exc_value} in {dropped.object}")
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


class Fault(Exception):
    """Something was left half-done: the course ends here."""


class Course:
    """One compiled step, and eager's states."""

    def __init__(self, choice: Choice, tally: Tally, draw: random.Random) -> None:
        self.choice, self.tally, self._draw = choice, tally, draw
        self.ours = Side.made(choice, network())
        self._eager = Side.made(choice, copy.deepcopy(self.ours.model))
        self._before = [self._seeded(0)]  #: eager's states before each step
        self._after: list[State] = []
        self.done = 0
        self.compile()

    def _seeded(self, step: int) -> State:
        torch.manual_seed(1000 + step)
        return self._eager.state()

    def compile(self) -> None:
        extra = {"scaler": self.ours.scaler} if self.ours.scaler is not None else {}
        options = dict(self.choice.options)
        self.step = tb.compile_step(self.ours.model, cross_entropy, self.ours.optimizer, **options, **extra)

    def _states(self, step: int) -> tuple[State, State]:
        options = dict(self.choice.options)
        while len(self._after) <= step:
            torch.manual_seed(1000 + len(self._after))
            eager_step(
                *(self._eager.model, cross_entropy, self._eager.optimizer, batch(len(self._after))),
                accumulate=options.get("accumulate", 1),
                clip_norm=options.get("clip_norm"),
                scaler=self._eager.scaler,
            )
            self._after.append(self._eager.state())
            self._before.append(self._seeded(len(self._after)))
        return self._before[step], self._after[step]

    def _prepare(self) -> tuple[State, State, tuple[Tensor, Tensor]]:
        before, after = self._states(self.done)
        given = batch(self.done)
        torch.manual_seed(1000 + self.done)
        return before, after, given

    def advance(self, kind: str) -> float:
        """One step without an interrupt: eager's. Gives its seconds."""
        _, after, given = self._prepare()
        start = time.perf_counter()
        self.step(*given)
        seconds = time.perf_counter() - start
        self.done += 1
        self._check(kind, self.ours.state(), after, "a step after the interrupts")
        return seconds

    def interrupt(self, kind: str, delay: float) -> bool:
        """One step, with Ctrl-C after `delay` seconds. Whether it struck inside."""
        before, after, given = self._prepare()
        calm = flags()
        where = ""

        def strike(number: int, frame: FrameType | None) -> None:
            nonlocal where
            where = "".join(traceback.format_stack(frame, limit=12))
            signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGALRM, strike)
        with swallowed(self.tally):
            try:
                signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
                self.step(*given)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
        if not where:
            self.done += 1
            self.tally.missed += 1
            self._check(kind, self.ours.state(), after, "a step without an interrupt")
            return False
        self.tally.struck[kind] += 1
        changed = [f"{name}: {calm[name]} -> {now}" for name, now in flags().items() if now != calm[name]]
        if changed:
            self._fault(kind, changed[0].split(":")[0], "\n".join((*changed, where)))
        found = self.ours.state()
        if difference(found, after) is None:
            self.tally.stayed[kind] += 1
            self.done += 1
        else:
            self._check(kind, found, before, where, after)
        kept = dict(self.choice.options).get("keep_grads", False)
        if not kept and any(p.grad is not None for p in self.ours.model.parameters()):
            self._fault(kind, "a gradient is left", where)
        return True

    def _check(self, kind: str, found: State, expected: State, where: str, after: State | None = None) -> None:
        name = difference(found, expected)
        if name is not None:
            other = f"; from the state after: {difference(found, after)}" if after is not None else ""
            self._fault(kind, f"state: {name}", f"{name} differs from the state before{other}\n{where}")

    def _fault(self, kind: str, what: str, example: str) -> None:
        self.tally.fault(f"{kind}: {what}", f"{self.choice}\n{example}")
        raise Fault(what)


def hunt(course: Course, replays: int) -> None:
    """Interrupts a recording until one is made, then replays."""
    draw, recording_s = course._draw, 0.15
    for _ in range(6):
        course.compile()
        # Most of a recording is planning, which is committed: early moments are drawn more often.
        if not course.interrupt("recording", recording_s * draw.random() ** 3):
            break
    course.compile()
    recording_s = course.advance("recording")
    for kind in ("first replay", "second replay"):
        if draw.random() < 0.5:
            course.interrupt(kind, draw.random() * 0.01)
    for _ in range(3):
        course.advance("replay")
    replay_s = min(course.advance("replay") for _ in range(3))
    for _ in range(replays):
        course.interrupt("replay", draw.random() * 1.1 * replay_s)
    for _ in range(2):
        course.advance("replay")


def restore_() -> None:
    """After a fault: the next course begins with everything as it should be."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        mode.__exit__(None, None, None)
    torch.set_grad_enabled(True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leaks._recording.clear()
    for name in ("numpy", "tolist"):
        if name in vars(torch.Tensor):
            delattr(torch.Tensor, name)
    for name in leaks._SEEDS:
        if isinstance(getattr(torch, name), leaks.SeedTrap):
            setattr(torch, name, getattr(torch, name).original)
    torch.Tensor.__dlpack__ = leaks._torch_dlpack


def run(interrupts: int, seed: int, replays: int = _STEPS_PER_COURSE, show: bool = False) -> Tally:
    """Courses until that many interrupts have struck, or too many found a fault: where each does, none may ever strike,
    and who limits a test by an alarm of its own has lost that to the hunt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    draw, tally = random.Random(seed), Tally()
    for number in itertools.count():
        if tally.interrupts >= interrupts or tally.faults.total() >= _MOST_FAULTS:
            return tally
        choice = choose(draw)
        tally.choices.add(choice)
        try:
            hunt(Course(choice, tally, draw), replays)
        except Fault:
            restore_()
        except Exception as error:
            tally.fault(f"{type(error).__name__}: {str(error)[:80]}", f"{choice}\n{traceback.format_exc()[-3000:]}")
            restore_()
        if show and number % 20 == 0:
            print(f"{tally.interrupts} interrupts, {dict(tally.struck)}, faults {dict(tally.faults)}", flush=True)
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replays", type=int, default=60, help="interrupted replays for each combination of options")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    tally = run(args.interrupts, args.seed, args.replays, show=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "command": " ".join(("python", *sys.argv)),
        "seconds": round(time.perf_counter() - start),
        "interrupts": tally.interrupts,
        "by kind of step": dict(tally.struck),
        "after which the step had been made": dict(tally.stayed),
        "timers that came too late": tally.missed,
        "dropped by Python, in a finalizer": tally.swallowed,
        "combinations of options": len(tally.choices),
        "faults": dict(tally.faults),
    }
    print(json.dumps(result, indent=1))
    for kind, example in tally.examples.items():
        print(f"\n== {kind}\n{example}")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
