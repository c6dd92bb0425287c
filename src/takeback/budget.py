"""From the setting of `memory` to a layout that keeps it: the passes are run for the goal that the setting stands for.

"keep"     nothing is computed twice
"auto"     the lowest peak for a share of the step's time that eager would have spent on its allocations
"min"      the lowest peak there is
"0.6x"     of eager's peak above what is resident anyway, with the least added time
"12GiB"    for everything: parameters, optimizer state, batch and what the step needs, with the least added time
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from takeback.capture.program import BufferId, Op, Program
from takeback.capture.twin import disproof
from takeback.capture.update import own_step_reason
from takeback.errors import MemoryTargetError, OptionError
from takeback.explain.eager import eager_peak
from takeback.options import Options, cache_dir, memory_target
from takeback.passes import Draft, passes_for, run_passes
from takeback.passes.cost import seconds
from takeback.passes.recompute import Below, Goal, Lowest, Progress, Search, Within
from takeback.run.calibrate import rates
from takeback.run.layout import Layout, lay_out
from takeback.run.replay import undo_bytes
from takeback.run.stream import settle

#: Of the predicted step: what "auto" may spend on rebuilding. On the CPU a step without rebuilding takes 0.79 to 0.93
#: of eager's time (benchmarks/results/cpu.json), because eager faults its memory in anew in every step.
AUTO_SHARE = {"cpu": 0.05, "cuda": 0.02}

_TRIES = 4  #: layouts tried where fragmentation lifts one above its target


@dataclass(frozen=True)
class Planned:
    """A layout that keeps its budget, with what the rebuilding in it is predicted to cost."""

    layout: Layout
    step_s: float  #: predicted, without rebuilding
    added_s: float


def plan_within(
    program: Program,
    kept: frozenset[BufferId],
    options: Options,
    *,
    streams: bool = False,
    progress: Progress | None = None,
) -> Planned:
    """The layout for `options.memory`. Raises `MemoryTargetError` if there is none. `streams`: the device's own
    allocator places the values."""
    cost = cost_of(program)
    draft = Draft(program, kept)
    if options.memory == "keep":
        return _planned(draft, None, cost, options, streams, progress)
    if options.memory in ("auto", "min"):
        goal = Lowest() if options.memory == "min" else Within(AUTO_SHARE.get(program.device_type, 0.0))
        return _planned(draft, goal, cost, options, streams, progress)
    outside = resident_bytes(program) + undo_bytes(program)
    wanted = memory_target(options.memory)
    if isinstance(wanted, float):
        wanted = resident_bytes(program) + int(wanted * eager_peak(program).transient_bytes)
    lowest: int | None = None
    target = wanted - outside
    for _ in range(_TRIES):
        try:
            planned = _planned(draft, Below(target), cost, options, streams, progress)
        except MemoryTargetError as error:
            reached = lowest if lowest is not None else outside + error.lowest_bytes
            raise MemoryTargetError(wanted, reached, _impossible(options.memory, wanted, reached, outside)) from None
        placed = planned.layout.alive_bytes + planned.layout.arena_bytes - planned.layout.lower_bound_bytes
        if outside + placed <= wanted:
            return planned
        lowest = outside + placed if lowest is None else min(lowest, outside + placed)
        target -= outside + placed - wanted
    assert lowest is not None
    raise MemoryTargetError(wanted, lowest, _impossible(options.memory, wanted, lowest, outside))


def check_early(options: Options, optimizer: torch.optim.Optimizer) -> None:
    """Raises where `update="early"` is asked of an optimizer whose update is not part of the plan."""
    reason = (own_step_reason(optimizer) or disproof(optimizer)) if options.update == "early" else None
    if reason is not None:
        raise OptionError(
            f"update='early' needs an update that is part of the plan, but the optimizer's own step() would be "
            f"called: {reason}. Use update='end'."
        )


def search_for(program: Program, kept: frozenset[BufferId], options: Options, progress: Progress | None) -> Search:
    """What knows the whole frontier of a program: peak against added time."""
    draft = run_passes(Draft(program, kept), passes_for(early=options.update == "early")[:-1])
    return Search(draft, cost_of(program), options.solve_s, progress)


def resident_bytes(program: Program) -> int:
    return sum(b.size_bytes for b in program.buffers.values() if b.role.borrowed)


def cost_of(program: Program) -> Callable[[Op], float]:
    """The predicted time of an op on this machine."""
    dtypes = frozenset(r.dtype for op in program.ops for r in op.outputs)
    return functools.partial(seconds, rates=rates(program.device_type, dtypes, cache_dir()))


def _planned(
    draft: Draft,
    goal: Goal | None,
    cost: Callable[[Op], float],
    options: Options,
    streams: bool,
    progress: Progress | None,
) -> Planned:
    early = options.update == "early"
    passes = passes_for(goal, early=early, seconds=cost, limit_s=options.solve_s, progress=progress)
    done = run_passes(draft, passes)
    layout = lay_out(settle(done) if streams else done)
    rebuilt = layout.draft.rebuilt
    added = [op for op in layout.draft.program.ops if any(r.buffer in rebuilt for r in op.outputs)]
    return Planned(layout, sum(map(cost, draft.program.ops)), sum(map(cost, added)))


def _impossible(memory: str, wanted: int, lowest: int, outside: int) -> str:
    return (
        f"memory={memory!r} is {_mib(wanted)} for this step, and the lowest peak that rebuilding reaches is "
        f"{_mib(lowest)}, of which {_mib(outside)} are alive between steps anyway (parameters, optimizer state, "
        f"batch). Ask for memory='min', take a smaller batch, or see `takeback explain --frontier`."
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
