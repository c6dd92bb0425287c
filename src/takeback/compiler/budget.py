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

from takeback.compiler.capture.twin import disproof
from takeback.compiler.capture.update import own_step_reason
from takeback.compiler.explain.report import transient_bytes
from takeback.compiler.ownership.eager_peak import eager_peak
from takeback.compiler.ownership.resident import resident_bytes
from takeback.compiler.ownership.writes import undo_bytes
from takeback.compiler.passes import Draft, passes_for, run_passes
from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.cost import seconds
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.pack import pack
from takeback.compiler.passes.recompute import Goal, Lowest, Progress, Search, Within
from takeback.compiler.passes.reduce import Sharing
from takeback.compiler.program import BufferId, Op, Program
from takeback.compiler.run.calibrate import rates
from takeback.compiler.run.layout import Layout, lay_out
from takeback.compiler.run.stream import settle
from takeback.errors import MemoryTargetError, OptionError
from takeback.options import Options, cache_dir, memory_target

#: Of the predicted step: what "auto" may spend on rebuilding. On the CPU a step without rebuilding takes 0.79 to 0.93
#: of eager's time (benchmarks/results/cpu.json), because eager faults its memory in anew in every step.
AUTO_SHARE = {"cpu": 0.055, "cuda": 0.02}


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
    sharing: Sharing | None = None,
    progress: Progress | None = None,
) -> Planned:
    """The layout for `options.memory`. Raises `MemoryTargetError` if there is none. `streams`: the device's own
    allocator places the values. `sharing`: the gradients are averaged over a group."""
    cost = cost_of(program)
    draft = Draft(program, kept)
    if options.memory == "keep":
        return _planned(draft, None, cost, options, streams, sharing, progress)
    if options.memory in ("auto", "min"):
        goal = Lowest() if options.memory == "min" else Within(AUTO_SHARE.get(program.device_type, 0.0))
        return _planned(draft, goal, cost, options, streams, sharing, progress)
    return _below(draft, cost, options, streams, sharing, progress)


def _below(
    draft: Draft,
    cost: Callable[[Op], float],
    options: Options,
    streams: bool,
    sharing: Sharing | None,
    progress: Progress | None,
) -> Planned:
    """The cheapest point of the frontier whose layout, as placed, keeps the target."""
    program = draft.program
    resident = resident_bytes(program)
    outside = resident + undo_bytes(program)
    wanted = memory_target(options.memory)
    if isinstance(wanted, float):
        wanted = resident + int(wanted * eager_peak(program).transient_bytes)
    kept_grads = sum(r.numel * r.dtype.itemsize for r in program.grads.values()) if options.keep_grads else 0
    search = search_for(program, draft.kept, options, progress, sharing)
    room = wanted - outside
    # Placing may lift a point above the target; then the next lower one is tried, at last the lowest of all.
    points = search.frontier() if search.keep.peak_bytes > room else (search.keep,)
    lowest = min(points, key=lambda p: p.peak_bytes)
    reached: list[int] = []
    for point in [p for p in points if p.peak_bytes <= room] or [lowest]:
        layout = _place(apply(search.draft, point.choice), options, streams)
        reached.append(outside + transient_bytes(layout, kept_grads, streamed=streams))
        if reached[-1] <= wanted:
            return _account(draft, layout, cost)
    text = _impossible(options, wanted, min(reached), outside, cut_short=search.cut_short)
    raise MemoryTargetError(wanted, min(reached), text)


def check_early(options: Options, optimizer: torch.optim.Optimizer) -> None:
    """Raises where `update="early"` is asked of an optimizer whose update is not part of the plan."""
    reason = (own_step_reason(optimizer) or disproof(optimizer)) if options.update == "early" else None
    if reason is not None:
        raise OptionError(
            f"update='early' needs an update that is part of the plan, but the optimizer's own step() would be "
            f"called: {reason}. Use update='end'."
        )


def search_for(
    program: Program,
    kept: frozenset[BufferId],
    options: Options,
    progress: Progress | None,
    sharing: Sharing | None = None,
) -> Search:
    """What knows the whole frontier of a program: peak against added time."""
    passes = passes_for(early=options.update == "early", sharing=sharing, places=False)
    draft = run_passes(Draft(program, kept), passes)
    return Search(draft, cost_of(program), options.solve_s, progress)


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
    sharing: Sharing | None,
    progress: Progress | None,
) -> Planned:
    early = options.update == "early"
    passes = passes_for(
        goal, early=early, sharing=sharing, places=False, seconds=cost, limit_s=options.solve_s, progress=progress
    )
    return _account(draft, _place(run_passes(draft, passes), options, streams), cost)


def _place(draft: Draft, options: Options, streams: bool) -> Layout:
    """What comes after everything about the program is decided: the placement table, and the layout."""
    placed = overwrite(draft)
    if streams:
        return lay_out(settle(placed))
    return lay_out(placed if options.update == "early" else pack(placed))


def _account(draft: Draft, layout: Layout, cost: Callable[[Op], float]) -> Planned:
    rebuilt = layout.draft.rebuilt
    added = [op for op in layout.draft.program.ops if any(r.buffer in rebuilt for r in op.outputs)]
    return Planned(layout, sum(map(cost, draft.program.ops)), sum(map(cost, added)))


def _impossible(options: Options, wanted: int, lowest: int, outside: int, *, cut_short: bool) -> str:
    more = f" The search was cut short: a larger solve_s than {options.solve_s:g} may find a lower one." * cut_short
    return (
        f"memory={options.memory!r} is {_mib(wanted)} for this step, and the lowest peak that rebuilding reaches is "
        f"{_mib(lowest)}, of which {_mib(outside)} are alive between steps anyway (parameters, optimizer state, "
        f"batch).{more} Ask for memory='min', take a smaller batch, or see `takeback explain --frontier`."
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
