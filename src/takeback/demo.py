"""`takeback demo`: a GPT and a ResNet learn in eager and compiled, from the same seeds; one table for each comes out.

Every loss, gradient and parameter is compared with torch.equal. The ratio of times is the same in each run: a step is
short beside what disturbs a machine, not all threads are used, and eager never waits for pages.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from takeback.comparison import (
    REHEARSALS,
    Sample,
    SideBySide,
    comparison_table,
    gradient_clones,
    memory_of,
    sample,
    verdict,
)
from takeback.compiler.run.eager import eager_step
from takeback.entry import compile_step
from takeback.zoo import GPT, OPTIMIZERS, Case, GPTConfig, ResNet, byte_batches, gpt, resnet, shape_batches

STEPS = 40

PATIENCE_SECONDS, LEAST_PAIRS = 20.0, 5
"""On a busy machine a lesson ends early after so long and so many pairs; the table says how many there were."""

MOST_THREADS = 4

Advance = Callable[[str], None]
"""Called with what begins now, one unit of a lesson's work."""


@dataclass(frozen=True)
class Lesson:
    """A model of the demo and what it learns from. `batches()` begins the same stream anew."""

    name: str
    title: str
    build: Callable[[], Case]
    batches: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def lessons(*, tiny: bool = False) -> tuple[Lesson, ...]:
    """The demo's two models; `tiny` ones are for tests."""
    rows, context, width, layers = (2, 16, 16, 2) if tiny else (8, 128, 128, 4)
    images, size = (2, 16) if tiny else (16, 64)
    config = GPTConfig(vocabulary=256, width=width, layers=layers, heads=4, context=context)

    def text_case() -> Case:
        model = GPT(config)
        return Case("gpt", model, gpt.loss_fn, OPTIMIZERS["adamw"](model.parameters()), ())

    def shape_case() -> Case:
        model = ResNet(resnet.SMALL)
        return Case("resnet", model, resnet.loss_fn, OPTIMIZERS["momentum"](model.parameters()), ())

    return (
        Lesson(
            "GPT",
            f"GPT, {layers} layers, {width} wide, on {rows} x {context} bytes of Python source",
            text_case,
            lambda: byte_batches(rows, context, seed=1),
        ),
        Lesson(
            "ResNet",
            f"ResNet on {images} drawn shapes of {size} x {size} pixels",
            shape_case,
            lambda: shape_batches(images, size, seed=1),
        ),
    )


def run_demo(console: Console, *, steps: int = STEPS, out: Path | None = None, tiny: bool = False) -> bool:
    """Shows it. True if every loss, gradient and parameter had eager's bits."""
    equal = True
    with few_threads() as (used, there):
        threads = f"on {used} of {there} threads"
        console.print(Text(f"Eager and compiled, step by step in turns, {threads}. About a minute.\n"))
        _let_malloc_keep_pages_()
        for lesson in lessons(tiny=tiny):
            with _progress(console, lesson, steps) as advance:
                result = teach(lesson, steps, advance)
            console.print(comparison_table(lesson.title, result))
            console.print(verdict(result))
            console.print()
            equal = equal and result.equal
            if out is not None and lesson.name == "GPT":
                result.report.to_html(out)
    if out is not None:
        console.print(Text(f"The GPT's report is in {out}"))
    console.print(Text("Next:  takeback explain gpt/small --html report.html"))
    console.print(Text("Yours: step = takeback.compile_step(model, loss_fn, optimizer); step(*batch)"))
    return equal


@contextlib.contextmanager
def few_threads() -> Iterator[tuple[int, int]]:
    """Half of the threads, a few at most. Where all are used, each parallel loop waits for the core that something else
    is on, and the times are not those of the step."""
    there = torch.get_num_threads()
    used = max(1, min(MOST_THREADS, there // 2))
    torch.set_num_threads(used)
    try:
        yield used, there
    finally:
        torch.set_num_threads(there)


def _let_malloc_keep_pages_() -> None:
    """glibc gives free memory back to the system above twice the largest block it saw freed, 64 MiB at most. Below that
    it is luck whether eager's pages go and come in each step, and they take up to a third of its time. Both models stay
    below: eager is at its best, in every run."""
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


@contextlib.contextmanager
def _progress(console: Console, lesson: Lesson, steps: int) -> Iterator[Advance]:
    total = REHEARSALS + 1 + max(steps, REHEARSALS + 1)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(20),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(lesson.name, total=total, completed=-1)
        yield lambda text: bar.update(task, advance=1, description=f"{lesson.name}: {text}")


def teach(lesson: Lesson, steps: int, advance: Advance) -> SideBySide:
    """Trains the lesson's model `steps` times in eager and compiled, and compares every bit of both."""
    steps, deadline = max(steps, REHEARSALS + 1), float("inf")
    with torch.random.fork_rng(devices=[]):
        wrong_gradients = _check_gradients(lesson, advance)
        eager, ours = _seeded(lesson), _seeded(lesson)
        step = compile_step(ours.model, ours.loss_fn, ours.optimizer, mode="exact")
        losses: list[float] = []
        before: list[Sample] = []
        after: list[Sample] = []
        unequal = 0
        for i, batch in zip(range(steps), lesson.batches(), strict=False):
            advance(f"step {i + 1} of {steps} of each, loss {losses[-1]:.3f}" if i >= REHEARSALS else _warming(i))
            if i == REHEARSALS:
                deadline = time.perf_counter() + PATIENCE_SECONDS
            runs = (partial(eager_step, eager.model, eager.loss_fn, eager.optimizer, batch), partial(step, *batch))
            made: dict[int, torch.Tensor] = {}
            taken: dict[int, Sample] = {}
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                _seed(i)
                made[which], taken[which] = sample(runs[which])
            unequal += not torch.equal(made[0], made[1])
            losses.append(float(made[0]))
            if i >= REHEARSALS:
                before.append(taken[0])
                after.append(taken[1])
            if len(before) >= LEAST_PAIRS and time.perf_counter() > deadline:
                break
        state = eager.model.state_dict()
        wrong_parameters = sum(not torch.equal(t, state[name]) for name, t in ours.model.state_dict().items())
        report, clones = step.report(), gradient_clones(step)
        eager.model.zero_grad(set_to_none=True)
        last = next(lesson.batches())
        memory = memory_of(lambda: eager_step(eager.model, eager.loss_fn, eager.optimizer, last))
    differences = {"losses": unequal, "gradients": wrong_gradients, "parameters": wrong_parameters}
    return SideBySide(before, after, memory, report, clones, losses, differences)


def _warming(i: int) -> str:
    return "rehearsing the plan" if i else "recording, and choosing what to rebuild"


def _seed(seed: int) -> None:
    # Not torch.manual_seed: that would reseed the caller's GPU generators too.
    torch.default_generator.manual_seed(seed)


def _seeded(lesson: Lesson) -> Case:
    _seed(0)
    return lesson.build()


def _check_gradients(lesson: Lesson, advance: Advance) -> int:
    """How many gradients differ from eager's over a few steps of a step compiled with keep_grads."""
    eager, ours = _seeded(lesson), _seeded(lesson)
    step = compile_step(ours.model, ours.loss_fn, ours.optimizer, mode="exact", keep_grads=True)
    wrong = 0
    for i, batch in zip(range(REHEARSALS + 1), lesson.batches(), strict=False):
        advance(f"comparing every gradient, step {i + 1} of {REHEARSALS + 1}")
        _seed(i)
        eager_step(eager.model, eager.loss_fn, eager.optimizer, batch)
        _seed(i)
        step(*batch)
        for theirs, mine in zip(eager.model.parameters(), ours.model.parameters(), strict=True):
            same = theirs.grad is mine.grad is None or (
                theirs.grad is not None and mine.grad is not None and torch.equal(theirs.grad, mine.grad)
            )
            wrong += not same
    return wrong
