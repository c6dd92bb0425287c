"""Makes plans: a step of the user's is recorded, finished, planned and given to an executor.

In: the user's objects and options. Out: a `Plan` for one key. Which plan is used when is for step.py to say.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Sequence

import torch

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.assumptions import NumberPlace
from takeback.compiler.capture.finish import check_early, finish_program, why_own_steps
from takeback.compiler.capture.numbers import bound, numbers_of
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.record_step import Capture, capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.subject import Subject
from takeback.compiler.capture.watch import Watch
from takeback.compiler.layout import Layout
from takeback.compiler.passes import Home
from takeback.compiler.planning import plan_within, settings_for
from takeback.compiler.program import Program
from takeback.compiler.run import allocator
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.arena import SharedArena
from takeback.compiler.run.arena_executor import ArenaExecutor
from takeback.compiler.run.calibrate import cost_of
from takeback.compiler.run.eager import Batch, Recipe
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.group import Group
from takeback.compiler.run.plans import Plan
from takeback.compiler.run.proof import Measure
from takeback.compiler.run.recorded_step import RecordedStep
from takeback.compiler.run.recording import recorder
from takeback.compiler.run.spent import Spent, watcher_for
from takeback.compiler.run.transaction import Transaction
from takeback.options import Options, cache_dir, compiler
from takeback.progress import Doing, Work


class PlanMaker:
    """For one compiled step, on the device of its model."""

    def __init__(self, recipe: Recipe, options: Options, scaling: Scaling | None, group: Group | None) -> None:
        self.recipe, self.options, self.scaling, self.group = recipe, options, scaling, group
        on_cpu = subjects.device_of(recipe.model).type == "cpu"
        began = time.perf_counter()
        self.native = allocator.load(cache_dir(), compiler()) if on_cpu else None
        self.loading_s = time.perf_counter() - began  #: compiling it too, where it is not in the cache
        self.home = Home.ARENA if on_cpu else Home.ALLOCATOR
        self.arena = SharedArena(self.native)

    @property
    def optimizers(self) -> Optimizers:
        return self.recipe.optimizers

    def check_early(self) -> None:
        """Raises where `update="early"` is asked of an optimizer whose update is not part of the plan."""
        with Transaction():  # a twin of the optimizer takes a step under a recorder: Ctrl-C waits for that
            check_early(self.options, self.optimizers)

    def subject(self, leaves: Sequence[torch.Tensor]) -> Subject:
        """What is to be recorded, as the user's objects are now."""
        return subjects.build(
            self.recipe.model,
            self.recipe.loss_fn,
            self.optimizers,
            leaves,
            accumulate=self.options.accumulate,
            clip_norm=self.options.clip_norm,
            scaling=self.scaling,
        )

    def recorded(self, subject: Subject, measure: Measure, numbers: Sequence[NumberPlace]) -> RecordedStep:
        """A recording that is about to be made. `numbers` are traced."""
        return RecordedStep(
            subject,
            self.recipe,
            scaling=self.scaling,
            group=self.group,
            measure=measure,
            recording=recorder(self.native, subjects.device_of(self.recipe.model)),
            leave=self.native.off if self.native is not None else None,
            in_one_piece=self.home is Home.ARENA,
            revocable=self.options.has_target,  # the plan may turn out impossible when the step has been made
            numbers=numbers,
        )

    def program_now(self, batch: Batch, leaves: Sequence[torch.Tensor]) -> Program:
        """The step as it is now, recorded and taken back."""
        with Transaction() as aside:
            aside.at_end(self.recipe.drop_grads_)
            aside.compute()
            got = capture(self.subject(leaves), *batch, on_abort=aside.on_abort)
            got.rewind_()
        return got.program

    def plan(self, key: Hashable, subject: Subject, got: Capture, leaves: Sequence[torch.Tensor], work: Work) -> Plan:
        """Of a recording. `work` is told what is being done."""
        options, group = self.options, self.group
        work.begin(Doing.RECORDING)  # of the update
        finished = finish_program(
            got.program,
            self.optimizers,
            subject.parameters,
            subject.names,
            own_steps=why_own_steps(self.optimizers, self.scaling),
            one_by_one=options.update == "early",
            keep_grads=options.keep_grads,
            scaling=self.scaling,
        )
        sharing = group.sharing if group is not None else None
        work.begin(Doing.MEASURING)
        seconds = cost_of(finished.program)
        settings = settings_for(
            finished.program,
            options,
            seconds,
            home=self.home,
            sharing=sharing,
            progress=work.tell,
            notes=seconds.notes,
        )
        planned = plan_within(finished.program, finished.kept, options, settings, watch=watcher_for(work))
        work.begin(Doing.WRITING)
        plan = Plan(
            key=key,
            watch=Watch(subject, got.assumptions, leaves),
            finished=finished,
            executor=self.executor(planned.layout),
            aux_form=got.aux_form,
            has_aux=got.has_aux,
            names=tuple(subject.names[id(p)] for p in subject.parameters),
            step_s=planned.step_s,
            added_s=planned.added_s,
            numbers=numbers_of(planned.layout.draft.program),
            aside=got.aside,
            held=got.held,
            notes=got.notes,
        )
        work.begin(None)
        plan.spent = Spent.of(work.seconds)
        return plan

    def executor(self, layout: Layout) -> Executor:
        """Of a layout, on this step's device."""
        reducer = self.group.reducer if self.group is not None else None
        if self.home is Home.ALLOCATOR:
            return AllocatorExecutor(layout, poison=self.options.poison, reducer=reducer)
        return ArenaExecutor(layout, self.arena, self.native, poison=self.options.poison, reducer=reducer)


def reading_anew(got: Capture, older: Plan, numbers: Sequence[NumberPlace]) -> Capture | None:
    """The recording with these numbers read anew in each step; None where it does more than compute with them."""
    if got.trace is None:
        return None
    program = bound(got.program, got.trace, older.original, [place.then for place in numbers])
    if program is None:
        return None
    got.assumptions.leave_out_(numbers, got.trace.values)
    return dataclasses.replace(got, program=program)
