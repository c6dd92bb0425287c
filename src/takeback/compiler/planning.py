"""From the setting of `memory` to a layout that keeps it: the passes are run for the goal that the setting stands for.

"keep"     nothing is computed twice
"auto"     the lowest peak worth its time, for a share of the step that eager would have spent on its allocations
"min"      the lowest peak there is
"0.6x"     of eager's peak above what is resident anyway, with the least added time
"12GiB"    for everything: parameters, optimizer state, batch and what the step needs, with the least added time

Planning decides, and runs nothing: it knows programs, passes and integers, not executors or reports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from takeback.compiler.layout import Layout, lay_out, transient_bytes
from takeback.compiler.ownership.eager_peak import eager_peak
from takeback.compiler.ownership.resident import resident_bytes
from takeback.compiler.ownership.writes import undo_bytes
from takeback.compiler.passes.cost import again_s
from takeback.compiler.passes.draft import Choice, Draft, Home
from takeback.compiler.passes.pipeline import PassSettings, Watcher, run_passes
from takeback.compiler.passes.postpone import postpone
from takeback.compiler.passes.recompute import Again, Below, Chooser, Goal, Keep, Lowest, Progress, Remembered, Within
from takeback.compiler.passes.reduce import Sharing
from takeback.compiler.plan import PlacingOrder, Solution
from takeback.compiler.plan.rebuild_solve import WORTH
from takeback.compiler.program import BufferId, Cluster, Op, Program, Scratch
from takeback.errors import MemoryTargetError
from takeback.options import Options, memory_target

#: Of the predicted step: what "auto" may spend on rebuilding. On the CPU a step without rebuilding takes 0.79 to 0.93
#: of eager's time (benchmarks/results/cpu.json), because eager faults its memory in anew in every step.
AUTO_SHARE = {"cpu": 0.055, "cuda": 0.02}
#: The same of a step on generated kernels, which takes 0.4 to 0.8 of eager's time on a GPU. There a percent of the time
#: must buy more of the peak: what is cheap is soon had, and who wants more asks for it.
AUTO_SHARE_FAST = {"cpu": 0.055, "cuda": 0.045}
AUTO_WORTH_FAST = {"cpu": WORTH, "cuda": 4.0}


@dataclass(frozen=True)
class Earlier:
    """What an earlier process decided for the very same program and settings (run/plan_file.py keeps it). Nothing of
    it is taken on trust: the choice is tried again, the offsets pass the validator, and both the borrow check."""

    choice: Choice
    peak_bytes: int | None  #: None where nothing was searched for
    notes: tuple[str, ...]
    scratch: Mapping[int, tuple[Scratch, ...]]  #: what a replay had shown, by position in the planned program
    solution: Solution | None  #: None where there is no arena

    def goal(self, otherwise: Goal) -> Goal:
        """With that choice, if it is one."""
        if self.peak_bytes is None:
            return otherwise
        return Remembered(self.choice, self.peak_bytes, self.notes, otherwise)

    def foreseen(self, draft: Draft) -> Draft:
        """With the scratch that ops were seen to take."""
        ops = list(draft.program.ops)
        for position, scratch in self.scratch.items():
            if not 0 <= position < len(ops):
                return draft
            results = {r.buffer for r in ops[position].outputs}
            if any(s.result is not None and s.result not in results for s in scratch):
                return draft
            ops[position] = replace(ops[position], scratch=scratch)
        return replace(draft, program=replace(draft.program, ops=tuple(ops)))


@dataclass(frozen=True)
class Planned:
    """A layout that keeps its budget, with what the rebuilding in it is predicted to cost."""

    layout: Layout
    program: Program
    seconds: Callable[[Op], float]  #: that an op takes, as predicted
    from_earlier: bool = False  #: what an earlier process decided was right here, all of it
    drafted: Program | None = None  #: what was planned, before the scratch that an earlier process saw
    file_key: str | None = None  #: under which run/plan_file.py keeps it

    @property
    def unrehearsed(self) -> Program:
        """The planned program with the scratch that was recorded."""
        return self.drafted or self.layout.program

    @functools.cached_property
    def step_s(self) -> float:
        """Predicted, without rebuilding."""
        planned = self.layout.program.ops
        if any(isinstance(op.target, Cluster) for op in planned):  # what runs is not, op by op, what was recorded
            return sum(map(self.seconds, planned)) - self.added_s
        return sum(map(self.seconds, self.program.ops))

    @functools.cached_property
    def added_s(self) -> float:
        return again_s(self.layout.program.ops, self.layout.draft.rebuilt, self.seconds)


def auto_goal(device_type: str, options: Options) -> Within:
    """What "auto" may spend on rebuilding."""
    if not options.is_fast(device_type):
        return Within(AUTO_SHARE.get(device_type, 0.0))
    return Within(AUTO_SHARE_FAST.get(device_type, 0.0), AUTO_WORTH_FAST.get(device_type, WORTH))


def settings_for(
    program: Program,
    options: Options,
    seconds: Callable[[Op], float],
    *,
    home: Home = Home.ARENA,
    sharing: Sharing | None = None,
    progress: Progress | None = None,
    notes: tuple[str, ...] = (),
) -> PassSettings:
    """What the passes are told for these options. A target's goal is set by `plan_within`, which knows the room.
    `notes`: what is to be known of `seconds`, on which the choice of what to rebuild depends."""
    goals: dict[str, Goal] = {
        "keep": Keep(),
        "min": Lowest(),
        "auto": auto_goal(program.device_type, options),
    }
    return PassSettings(
        home=home,
        fast=options.is_fast(program.device_type),
        early=options.update == "early",
        sharing=sharing,
        goal=goals.get(options.memory, Keep()),
        chooser=Chooser(seconds, options.solve_s, progress),
        notes=() if options.memory == "keep" else notes,
    )


def plan_within(
    program: Program,
    kept: frozenset[BufferId],
    options: Options,
    settings: PassSettings,
    *,
    watch: Watcher | None = None,
    sibling: Layout | None = None,
    earlier: Earlier | None = None,
) -> Planned:
    """The layout for `options.memory`. Raises `MemoryTargetError` if there is none. `watch` is told of every pass.
    `sibling` is the layout of the same step for other shapes, whose choices are taken over; `earlier` what was decided
    for this very step."""
    if earlier is not None:
        planned = _as_earlier(program, kept, options, settings, earlier)
        if planned is not None:
            return planned
    if options.has_target:
        return _below(program, kept, options, settings, watch, sibling)
    told = [_again(program, settings, sibling)]
    if sibling is None and settings.fast and isinstance(settings.goal, Lowest):
        told.append(replace(settings, waits=False))
    layouts = [lay_out(run_passes(program, kept, each, watch=watch), like=_placing(sibling)) for each in told]
    return _account(program, min(layouts, key=lambda layout: transient_bytes(layout, 0)), settings)


def _as_earlier(
    program: Program, kept: frozenset[BufferId], options: Options, settings: PassSettings, earlier: Earlier
) -> Planned | None:
    """The layout that an earlier process came to; None where it cannot be, or is not within the target."""
    searches = options.has_target or not isinstance(settings.goal, Keep)
    if searches != (earlier.peak_bytes is not None):
        return None
    told = replace(settings, goal=earlier.goal(Keep()))
    draft = run_passes(program, kept, told)
    if draft.planned_peak_bytes != earlier.peak_bytes and settings.fast and searches:  # the other way was lower
        draft = run_passes(program, kept, replace(told, waits=not told.waits))
    if draft.planned_peak_bytes != earlier.peak_bytes:
        return None  # it was no choice for this program
    layout = lay_out(earlier.foreseen(draft), known=earlier.solution)
    clusters = any(isinstance(op.target, Cluster) for op in draft.program.ops)  # what these ask for is not kept
    if layout.arena is not None and layout.arena.solution is not earlier.solution and not clusters:
        return None
    if options.has_target:
        wanted, outside, kept_grads = _target(program, options)
        if outside + transient_bytes(layout, kept_grads) > wanted:
            return None
    return replace(_account(program, layout, settings), from_earlier=True, drafted=draft.program)


def _target(program: Program, options: Options) -> tuple[int, int, int]:
    """The bytes that a target stands for, how many are alive outside of the plan, and how many gradients are kept."""
    wanted = memory_target(options.memory)
    resident = resident_bytes(program)
    if isinstance(wanted, float):
        wanted = resident + int(wanted * eager_peak(program).transient_bytes)
    kept_grads = sum(r.numel * r.dtype.itemsize for r in program.grads.values()) if options.keep_grads else 0
    return wanted, resident + undo_bytes(program), kept_grads


def _again(program: Program, settings: PassSettings, sibling: Layout | None) -> PassSettings:
    """Settings to take over what was chosen for a sibling. Where it cannot be, a smaller program is left as it is: the
    largest batch decides how much memory the training takes."""
    if sibling is None:
        return settings
    chosen = sibling.draft.chosen
    otherwise = Keep() if sums_up(program) <= sums_up(sibling.program) else settings.goal
    goal = settings.goal if chosen is None else Again(chosen, otherwise)
    return replace(settings, goal=goal, known=True, waits=postpone.__name__ in sibling.draft.passes)


def sums_up(program: Program) -> int:
    """Bytes of everything that a step makes: tells the larger of two siblings."""
    return sum(b.size_bytes for b in program.buffers.values() if not b.role.borrowed)


def _placing(sibling: Layout | None) -> PlacingOrder | None:
    return sibling.arena.placing if sibling is not None and sibling.arena is not None else None


def _below(
    program: Program,
    kept: frozenset[BufferId],
    options: Options,
    settings: PassSettings,
    watch: Watcher | None,
    sibling: Layout | None,
) -> Planned:
    """The cheapest layout below the target. Placing may lift one above it; then the next lower peak is tried. What a
    sibling's choice comes to is tried first."""
    wanted, outside, kept_grads = _target(program, options)
    room = wanted - outside
    lowest: int | None = None
    while True:
        told = _again(program, replace(settings, goal=Below(room)), sibling)
        draft = run_passes(program, kept, told, watch=watch)
        layout = lay_out(draft, like=_placing(sibling))
        reached = outside + transient_bytes(layout, kept_grads)
        if reached <= wanted:
            return _account(program, layout, settings)
        if sibling is not None:
            sibling = None
            continue
        lowest = reached if lowest is None else min(lowest, reached)
        if draft.planned_peak_bytes is None or draft.planned_peak_bytes > room:  # the lowest there is was above it
            if settings.waits and settings.fast:
                settings, room = replace(settings, waits=False), wanted - outside
                continue
            raise MemoryTargetError(wanted, lowest, _impossible(options, wanted, lowest, outside, draft.notes))
        room = draft.planned_peak_bytes - 1


def _account(program: Program, layout: Layout, settings: PassSettings) -> Planned:
    assert settings.chooser is not None
    return Planned(layout, program, settings.chooser.seconds)


def _impossible(options: Options, wanted: int, lowest: int, outside: int, notes: tuple[str, ...]) -> str:
    more = "".join(f" {note}" for note in notes)
    return (
        f"memory={options.memory!r} is {_mib(wanted)} for this step, and the lowest peak that rebuilding reaches is "
        f"{_mib(lowest)}, of which {_mib(outside)} are alive between steps anyway (parameters, optimizer state, "
        f"batch).{more} Ask for memory='min', take a smaller batch, or see `takeback explain --frontier`."
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
