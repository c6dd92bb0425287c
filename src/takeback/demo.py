"""`takeback demo` and `takeback bench`: a step in eager beside the same step compiled, from the same seeds.

Every figure is measured here: time and page faults side by side, and bits with torch.equal. What this machine cannot
measure (without the native allocator: eager's memory) is None, and shown as such.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import show_bytes, show_ratio
from takeback.compiler.program import Phase, Program
from takeback.compiler.run import allocator
from takeback.compiler.run.allocator import ALLOC, Cell
from takeback.compiler.run.eager import eager_step
from takeback.options import cache_dir, compiler
from takeback.step import CompiledStep, compile_step
from takeback.zoo import GPT, OPTIMIZERS, Case, GPTConfig, ResNet, byte_batches, gpt, resnet, shape_batches

Result = TypeVar("Result")

PATIENCE_SECONDS = 50.0
"""On a busy machine a lesson ends early after this long; the table says how many steps there were."""

FAULT_ROUNDS = 5

REHEARSALS = 3
"""The first steps record and rehearse the plan; the steady ones come after."""


@dataclass(frozen=True)
class Sample:
    """One step: how long it took, and how many pages the kernel had to bring in."""

    seconds: float
    page_faults: int


@dataclass(frozen=True)
class Memory:
    """What one step took of the ordinary allocator: the most bytes alive at once, and how many requests."""

    peak_bytes: int
    allocations: int


@dataclass(frozen=True)
class Comparison:
    """A step in eager beside the same step compiled. `ratio` is the median of the paired ratios of time."""

    eager: Sequence[Sample]
    ours: Sequence[Sample]
    eager_memory: Memory | None
    report: Report
    gradient_clones: tuple[int, int]
    losses: Sequence[float] = ()
    differences: Mapping[str, int] = field(default_factory=dict)  #: what was compared, and how many were not equal

    @property
    def ratio(self) -> float:
        return statistics.median(o.seconds / e.seconds for e, o in zip(self.eager, self.ours, strict=True))

    @property
    def noisy(self) -> bool:
        """Whether the median step took half again as long as the fastest: something else uses the machine."""
        sides = [[s.seconds for s in side] for side in (self.eager, self.ours)]
        return any(statistics.median(seconds) > 1.5 * min(seconds) for seconds in sides)

    @property
    def equal(self) -> bool:
        return not any(self.differences.values())


# -- measuring ---------------------------------------------------------------------------------------------------


def sample(step: Callable[[], Result]) -> tuple[Result, Sample]:
    """The result of one call, with its time and page faults."""
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    result = step()
    seconds = time.perf_counter() - start
    return result, Sample(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def interleaved(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[list[Sample], list[Sample]]:
    """Both, in turns, `rounds` times: what disturbs the machine disturbs both. Which goes first changes each round."""
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for i in range(rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            samples[which].append(sample((first, second)[which])[1])
    return samples


def faults_alone(step: Callable[[], object], rounds: int) -> int:
    """Page faults of a steady eager step, on average. To be called before anything is compiled: a compiled step beside
    it keeps the heap from shrinking, which would flatter eager."""
    for _ in range(2):
        step()
    return round(statistics.mean(sample(step)[1].page_faults for _ in range(rounds)))


def memory_of(step: Callable[[], object]) -> Memory | None:
    """What one call asks of the ordinary allocator, or None where there is no native one to watch it."""
    native = allocator.load(cache_dir(), compiler())
    if native is None:
        return None
    with native.record(Cell()) as recording:
        step()
    alive: dict[int, int] = {}
    level = peak = allocations = 0
    for event in recording.events:
        if event["kind"] == ALLOC:
            allocations += 1
            alive[int(event["id"])] = int(event["size_bytes"])
            level += int(event["size_bytes"])
            peak = max(peak, level)
        else:
            level -= alive.pop(int(event["id"]), 0)
    return Memory(peak, allocations)


def compare(
    eager: Case, ours: Case, rounds: int, *, memory: str = "auto", progress: Callable[[str], None] | None = None
) -> Comparison:
    """Steady steps of two equal cases: one in eager, one compiled with `memory`."""
    say = progress or (lambda text: None)

    def in_eager() -> None:
        eager_step(eager.model, eager.loss_fn, eager.optimizer, eager.batch)

    say("eager alone")
    faults = faults_alone(in_eager, min(rounds, FAULT_ROUNDS))
    say("recording, and choosing what to rebuild")
    step = compile_step(ours.model, ours.loss_fn, ours.optimizer, memory=memory)
    for _ in range(REHEARSALS):
        step(*ours.batch)
    say(f"timing {rounds} steps of each in turns")
    before, after = interleaved(in_eager, lambda: step(*ours.batch), rounds)
    before = [Sample(s.seconds, faults) for s in before]
    eager.model.zero_grad(set_to_none=True)
    return Comparison(before, after, memory_of(in_eager), step.report(), gradient_clones(step))


def gradient_clones(step: CompiledStep) -> tuple[int, int]:
    """How many clones the backward makes: as eager ran it when it was recorded, and as it is replayed."""

    def count(program: Program) -> int:
        return sum(op.phase is Phase.BACKWARD and op.name.startswith("clone") for op in program.ops)

    plan = step._last
    assert plan is not None
    return count(plan.original), count(plan.executor.program)


# -- the demo ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """A model of the demo and what it learns from. `batches()` begins the same stream anew."""

    title: str
    build: Callable[[], Case]
    batches: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def lessons(*, tiny: bool = False) -> tuple[Lesson, ...]:
    """The demo's two models; `tiny` ones are for tests."""
    rows, context, width, layers = (2, 16, 16, 2) if tiny else (8, 128, 256, 4)
    images, size = (2, 16) if tiny else (64, 64)
    config = GPTConfig(vocabulary=256, width=width, layers=layers, heads=4, context=context)

    def text_case() -> Case:
        model = GPT(config)
        return Case("gpt", model, gpt.loss_fn, OPTIMIZERS["adamw"](model.parameters()), ())

    def shape_case() -> Case:
        model = ResNet(resnet.SMALL)
        return Case("resnet", model, resnet.loss_fn, OPTIMIZERS["momentum"](model.parameters()), ())

    return (
        Lesson(
            f"GPT, {layers} layers, {width} wide, on {rows} x {context} bytes of Python source",
            text_case,
            lambda: byte_batches(rows, context, seed=1),
        ),
        Lesson(
            f"ResNet on {images} drawn shapes of {size} x {size} pixels",
            shape_case,
            lambda: shape_batches(images, size, seed=1),
        ),
    )


def teach(lesson: Lesson, steps: int, advance: Callable[[str], None]) -> Comparison:
    """Trains the lesson's model `steps` times in eager and compiled, and compares every bit of both."""
    steps, deadline = max(steps, REHEARSALS + 1), time.perf_counter() + PATIENCE_SECONDS
    with torch.random.fork_rng(devices=[]):
        faults = _eager_faults(lesson, advance)
        wrong_gradients = _check_gradients(lesson, advance)
        eager, ours = _seeded(lesson), _seeded(lesson)
        step = compile_step(ours.model, ours.loss_fn, ours.optimizer)
        losses: list[float] = []
        before: list[Sample] = []
        after: list[Sample] = []
        unequal = 0
        for i, batch in zip(range(steps), lesson.batches(), strict=False):
            runs = (partial(eager_step, eager.model, eager.loss_fn, eager.optimizer, batch), partial(step, *batch))
            made: dict[int, torch.Tensor] = {}
            taken: dict[int, Sample] = {}
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                _seed(i)
                made[which], taken[which] = sample(runs[which])
            unequal += not torch.equal(made[0], made[1])
            losses.append(float(made[0]))
            if i >= REHEARSALS:
                before.append(Sample(taken[0].seconds, faults))
                after.append(taken[1])
            advance(f"step {i + 1} of {steps}, loss {losses[-1]:.3f}")
            if i > REHEARSALS and time.perf_counter() > deadline:
                break
        state = eager.model.state_dict()
        wrong_parameters = sum(not torch.equal(t, state[name]) for name, t in ours.model.state_dict().items())
        report, clones = step.report(), gradient_clones(step)
        eager.model.zero_grad(set_to_none=True)
        last = next(lesson.batches())
        memory = memory_of(lambda: eager_step(eager.model, eager.loss_fn, eager.optimizer, last))
    differences = {"losses": unequal, "gradients": wrong_gradients, "parameters": wrong_parameters}
    return Comparison(before, after, memory, report, clones, losses, differences)


def _seed(seed: int) -> None:
    # Not torch.manual_seed: that would reseed the caller's GPU generators too.
    torch.default_generator.manual_seed(seed)


def _seeded(lesson: Lesson) -> Case:
    _seed(0)
    return lesson.build()


def _eager_faults(lesson: Lesson, advance: Callable[[str], None]) -> int:
    case, batches = _seeded(lesson), lesson.batches()

    def step() -> None:
        advance("eager alone")
        eager_step(case.model, case.loss_fn, case.optimizer, next(batches))

    return faults_alone(step, FAULT_ROUNDS)


def _check_gradients(lesson: Lesson, advance: Callable[[str], None]) -> int:
    """How many gradients differ from eager's over a few steps of a step compiled with keep_grads."""
    eager, ours = _seeded(lesson), _seeded(lesson)
    step = compile_step(ours.model, ours.loss_fn, ours.optimizer, keep_grads=True)
    wrong = 0
    for i, batch in zip(range(REHEARSALS + 1), lesson.batches(), strict=False):
        _seed(i)
        eager_step(eager.model, eager.loss_fn, eager.optimizer, batch)
        _seed(i)
        step(*batch)
        for theirs, mine in zip(eager.model.parameters(), ours.model.parameters(), strict=True):
            same = theirs.grad is mine.grad is None or (
                theirs.grad is not None and mine.grad is not None and torch.equal(theirs.grad, mine.grad)
            )
            wrong += not same
        advance("comparing gradients")
    return wrong


def run_demo(console: Console, *, steps: int = 20, out: Path | None = None, tiny: bool = False) -> bool:
    """Shows it. True if every loss, gradient and parameter had eager's bits."""
    equal = True
    for lesson in lessons(tiny=tiny):
        total = FAULT_ROUNDS + 2 + REHEARSALS + 1 + max(steps, REHEARSALS + 1)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        with bar:
            task = bar.add_task("starting", total=total)

            def advance(text: str, bar: Progress = bar, task: object = task) -> None:
                bar.update(task, advance=1, description=text)  # type: ignore[arg-type]

            result = teach(lesson, steps, advance)
        console.print(comparison_table(lesson.title, result))
        console.print(verdict(result))
        console.print()
        equal = equal and result.equal
        if out is not None and lesson.title.startswith("GPT"):
            result.report.to_html(out)
    if out is not None:
        console.print(Text(f"The GPT's report is in {out}"))
    console.print(Text("Next:  takeback explain gpt/small --html report.html"))
    console.print(Text("Yours: step = takeback.compile_step(model, loss_fn, optimizer); step(*batch)"))
    return equal


# -- showing -----------------------------------------------------------------------------------------------------


def comparison_table(title: str, result: Comparison) -> Table:
    """One row per figure, columns eager and takeback; never wider than 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", width=78)
    table.add_column("per step", ratio=1)
    for name in ("eager", "takeback", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _rows(result):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _rows(result: Comparison) -> Iterator[tuple[str, str, str, str]]:
    report, memory = result.report, result.eager_memory
    resident, ours, unknown = report.resident_bytes, report.peak_bytes, "not measured"
    if memory is None:
        yield "peak tensor memory", unknown, unknown, ""
        yield "allocations", unknown, unknown, ""
    else:
        theirs = memory.peak_bytes + resident
        yield "peak tensor memory", show_bytes(theirs), show_bytes(ours), show_ratio(ours, theirs)
        above, eager_above = ours - resident, memory.peak_bytes
        yield "  above resident", show_bytes(eager_above), show_bytes(above), show_ratio(above, eager_above)
        yield "allocations", f"{memory.allocations:,}", f"{report.allocations_per_step:,}", ""
    clones = result.gradient_clones
    yield "gradient clones", f"{clones[0]:,}", f"{clones[1]:,}", ""
    faults = [statistics.mean(s.page_faults for s in side) for side in (result.eager, result.ours)]
    yield "page faults", f"{faults[0]:,.0f}", f"{faults[1]:,.0f}", ""
    eager, mine = ([s.seconds * 1e3 for s in side] for side in (result.eager, result.ours))
    medians, best = (statistics.median(eager), statistics.median(mine)), (min(eager), min(mine))
    yield f"time, median of {len(eager)}", f"{medians[0]:,.1f} ms", f"{medians[1]:,.1f} ms", f"{result.ratio:.2f}x"
    yield "time, minimum", f"{best[0]:,.1f} ms", f"{best[1]:,.1f} ms", f"{best[1] / best[0]:.2f}x"
    if result.losses:
        loss = f"{result.losses[0]:.3f} to {result.losses[-1]:.3f}"
        same = result.differences.get("losses") == 0
        yield f"loss over {len(result.losses)} steps", loss, "the same bits" if same else "DIFFERS", ""


def verdict(result: Comparison) -> Text:
    """What was compared bit for bit, in red where it differs; and what could not be measured, or not well."""
    lines = []
    if result.differences:
        text = Text()
        for name, wrong in result.differences.items():
            style, word = ("bold red", f"{wrong} DIFFER") if wrong else ("green", "bit-equal")
            text.append(f"{name}: ").append(word, style=style).append("   ")
        text.rstrip()
        lines.append(text)
    if result.noisy:
        lines.append(Text("This machine is busy: equal steps take very different times.", style="yellow"))
    if result.eager_memory is None:
        lines.append(Text("No native allocator on this machine: memory is not measured.", style="yellow"))
    return Text("\n").join(lines)
