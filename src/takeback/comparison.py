"""A step in eager beside the same step compiled: two equal cases in, a `SideBySide` and its table out.

Every figure is measured, the times step by step in turns. What this machine cannot measure (without the native
allocator: eager's memory) is None, and shown as such.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import show_bytes, show_ratio
from takeback.compiler.program import Phase, Program
from takeback.compiler.run import allocator
from takeback.compiler.run.allocator import ALLOC, Cell
from takeback.compiler.run.eager import eager_step
from takeback.entry import compile_step
from takeback.options import cache_dir, compiler
from takeback.step import CompiledStep
from takeback.zoo import Case

Result = TypeVar("Result")

FAULT_ROUNDS = 5

REHEARSALS, REHEARSALS_FAST = 3, 5
"""The first steps record and rehearse the plan, and warm eager up; the steady ones come after. In mode fast the first
replay runs eager's kernels, the next compares the generated ones."""


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
class SideBySide:
    """A step in eager beside the same step compiled; `eager[i]` and `ours[i]` came right after each other."""

    eager: Sequence[Sample]
    ours: Sequence[Sample]
    eager_memory: Memory | None
    report: Report
    gradient_clones: tuple[int, int]
    losses: Sequence[float] = ()
    differences: Mapping[str, int] = field(default_factory=dict)  #: what was compared, and how many were not equal

    @property
    def ratios(self) -> list[float]:
        """Of time, pair by pair: what disturbs the machine for longer than a step disturbs both sides of a pair."""
        return [o.seconds / e.seconds for e, o in zip(self.eager, self.ours, strict=True)]

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
    eager: Case,
    ours: Case,
    rounds: int,
    *,
    mode: str = "auto",
    memory: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> SideBySide:
    """Steady steps of two equal cases: one in eager, one compiled with `mode` and `memory`."""
    say = progress or (lambda text: None)

    def in_eager() -> None:
        eager_step(eager.model, eager.loss_fn, eager.optimizer, eager.batch)

    say("eager alone")
    faults = faults_alone(in_eager, min(rounds, FAULT_ROUNDS))
    say("recording, and choosing what to rebuild")
    step = compile_step(ours.model, ours.loss_fn, ours.optimizer, mode=mode, memory=memory)
    for _ in range(REHEARSALS if step.mode == "exact" else REHEARSALS_FAST):
        step(*ours.batch)
    say(f"timing {rounds} steps of each in turns")
    before, after = interleaved(in_eager, lambda: step(*ours.batch), rounds)
    before = [Sample(s.seconds, faults) for s in before]
    eager.model.zero_grad(set_to_none=True)
    return SideBySide(before, after, memory_of(in_eager), step.report(), gradient_clones(step))


def gradient_clones(step: CompiledStep) -> tuple[int, int]:
    """How many clones the backward makes: as eager ran it when it was recorded, and as it is replayed."""

    def count(program: Program) -> int:
        return sum(op.phase is Phase.BACKWARD and op.name.startswith("clone") for op in program.ops)

    plan = step._last
    assert plan is not None
    return count(plan.original), count(plan.executor.program)


# -- showing -----------------------------------------------------------------------------------------------------


def comparison_table(title: str, result: SideBySide) -> Table:
    """One row per figure, columns eager and takeback; never wider than 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", width=78)
    table.add_column("per step", ratio=1)
    for name in ("eager", "takeback", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _rows(result):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _rows(result: SideBySide) -> Iterator[tuple[str, str, str, str]]:
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
    if any(clones):
        yield "gradient clones", f"{clones[0]:,}", f"{clones[1]:,}", ""
    faults = [statistics.mean(s.page_faults for s in side) for side in (result.eager, result.ours)]
    if any(faults):
        yield "page faults", f"{faults[0]:,.0f}", f"{faults[1]:,.0f}", ""
    times = [[s.seconds * 1e3 for s in side] for side in (result.eager, result.ours)]
    middles = [statistics.median(each) for each in (*times, result.ratios)]
    lows, highs = zip(*map(_middle_half, (*times, result.ratios)), strict=True)
    yield f"time, median of {len(times[0])}", f"{middles[0]:,.1f} ms", f"{middles[1]:,.1f} ms", f"{middles[2]:.2f}x"
    spread = [f"{low:,.0f}-{high:,.0f} ms" for low, high in zip(lows[:2], highs[:2], strict=True)]
    yield "  half of them within", spread[0], spread[1], f"{lows[2]:.2f}-{highs[2]:.2f}x"
    if result.losses:
        loss = f"{result.losses[0]:.3f} to {result.losses[-1]:.3f}"
        same = result.differences.get("losses") == 0
        yield f"loss over {len(result.losses)} steps", loss, "the same bits" if same else "DIFFERS", ""


def _middle_half(numbers: Sequence[float]) -> tuple[float, float]:
    """The quartiles: how far apart equal steps are on this machine now."""
    if len(numbers) < 2:
        return numbers[0], numbers[0]
    low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, high


def verdict(result: SideBySide) -> Text:
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
