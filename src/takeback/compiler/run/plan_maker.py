"""Makes plans: a step of the user's is recorded, finished, planned and given to an executor.

In: the user's objects and options. Out: a `Plan` for one key. Which plan is used when is for step.py to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.accumulation import finish_microbatch
from takeback.compiler.capture.assumptions import NumberPlace
from takeback.compiler.capture.finish import Finished, check_early, finish_program, why_own_steps
from takeback.compiler.capture.numbers import bound, numbers_of
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.record_step import Capture, capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.subject import Subject
from takeback.compiler.capture.watch import Watch
from takeback.compiler.layout import Layout
from takeback.compiler.passes import Home
from takeback.compiler.passes.reduce import Sharing
from takeback.compiler.planning import Planned, plan_within, settings_for
from takeback.compiler.program import Program
from takeback.compiler.run import allocator
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.arena import SharedArena
from takeback.compiler.run.arena_executor import ArenaExecutor
from takeback.compiler.run.calibrate import cost_of
from takeback.compiler.run.eager import Batch, Recipe
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.group import Group
from takeback.compiler.run.pending import Microbatch
from takeback.compiler.run.plans import Plan
from takeback.compiler.run.proof import Measure
from takeback.compiler.run.recorded_step import RecordedStep
from takeback.compiler.run.recording import recorder
from takeback.compiler.run.transaction import Transaction
from takeback.options import Options, cache_dir, compiler

_ADDS = "this plan is of a microbatch: each gradient is added to what waits in .grad as soon as it is complete"


class PlanMaker:
    """For one compiled step, on the device of its model."""

    def __init__(self, recipe: Recipe, options: Options, scaling: Scaling | None, group: Group | None) -> None:
        self.recipe, self.options, self.scaling, self.group = recipe, options, scaling, group
        self.device = subjects.device_of(recipe.model)
        on_cpu = self.device.type == "cpu"
        self.native = allocator.load(cache_dir(), compiler()) if on_cpu else None
        self.home = Home.ARENA if on_cpu else Home.ALLOCATOR
        self.arena = SharedArena(self.native)
        self.microbatch_recipe = dataclasses.replace(recipe, clip_norm=None, updates=False)

    @property
    def optimizers(self) -> Optimizers:
        return self.recipe.optimizers

    def check_early(self) -> None:
        """Raises where `update="early"` is asked of an optimizer whose update is not part of the plan."""
        with Transaction():  # a twin of the optimizer takes a step under a recorder: Ctrl-C waits for that
            check_early(self.options, self.optimizers)

    def subject(self, leaves: Sequence[torch.Tensor], *, updates: bool = True) -> Subject:
        """What is to be recorded, as the user's objects are now."""
        return subjects.build(
            self.recipe.model,
            self.recipe.loss_fn,
            self.optimizers,
            leaves,
            accumulate=self.options.accumulate,
            clip_norm=self.options.clip_norm,
            scaling=self.scaling,
            updates=updates,
        )

    def recorded(self, subject: Subject, measure: Measure, numbers: Sequence[NumberPlace]) -> RecordedStep:
        """A recording that is about to be made. `numbers` are traced."""
        return RecordedStep(
            subject,
            self.recipe if subject.updates else self.microbatch_recipe,
            scaling=self.scaling,
            group=self.group,
            measure=measure,
            recording=recorder(self.native, self.device),
            leave=self.native.off if self.native is not None else None,
            in_one_piece=self.home is Home.ARENA,
            revocable=self.options.has_target,  # the plan may turn out impossible when the step has been made
            numbers=numbers,
        )

    def program_now(self, batch: Batch, leaves: Sequence[torch.Tensor], micro: Microbatch | None = None) -> Program:
        """The step as it is now, recorded and taken back."""
        with Transaction() as aside:
            aside.at_end(self.recipe.drop_grads_ if micro is None else micro.put_back_)
            aside.compute()
            got = capture(self.subject(leaves, updates=micro is None), *batch, on_abort=aside.on_abort)
            got.rewind_()
        return got.program

    def plan(
        self,
        key: Hashable,
        subject: Subject,
        got: Capture,
        leaves: Sequence[torch.Tensor],
        micro: Microbatch | None = None,
    ) -> Plan:
        """Of a recording; `micro`: of a call that adds its gradients to those that wait."""
        finished = self._finished(subject, got, leaves, micro)
        sharing = self.group.sharing if self.group is not None and micro is None else None
        planned = self.lay_out(finished, self.options, sharing)
        return Plan(
            key=key,
            watch=Watch(subject, got.assumptions, leaves),
            finished=finished,
            executor=self.executor(planned.layout),
            aux_form=got.aux_form,
            has_aux=got.has_aux,
            names=_names(subject),
            step_s=planned.step_s,
            added_s=planned.added_s,
            numbers=numbers_of(planned.layout.draft.program),
            aside=got.aside,
            held=got.held,
            notes=got.notes if micro is None else (*got.notes, _ADDS),
        )

    def lay_out(self, finished: Finished, options: Options, sharing: Sharing | None = None) -> Planned:
        """A finished program, planned. `sharing`: its gradients are averaged over a group."""
        seconds = cost_of(finished.program)
        settings = settings_for(
            finished.program, options, seconds, home=self.home, sharing=sharing, notes=seconds.notes
        )
        if finished.adds is not None:  # each gradient is added as soon as it is complete
            settings = dataclasses.replace(settings, early=True)
        return plan_within(finished.program, finished.kept, options, settings)

    def _finished(
        self, subject: Subject, got: Capture, leaves: Sequence[torch.Tensor], micro: Microbatch | None
    ) -> Finished:
        if micro is not None:
            return finish_microbatch(
                got.program, _names(subject), strides=micro.strides, copied=micro.copied, given=len(leaves)
            )
        options = self.options
        return finish_program(
            got.program,
            self.optimizers,
            subject.parameters,
            subject.names,
            own_steps=why_own_steps(self.optimizers, self.scaling),
            one_by_one=options.update == "early",
            keep_grads=options.keep_grads,
            scaling=self.scaling,
        )

    def executor(self, layout: Layout) -> Executor:
        """Of a layout, on this step's device."""
        sends = layout.program.flags is not None
        reducer = self.group.reducer if self.group is not None and sends else None
        if self.home is Home.ALLOCATOR:
            return AllocatorExecutor(layout, poison=self.options.poison, reducer=reducer)
        return ArenaExecutor(layout, self.arena, self.native, poison=self.options.poison, reducer=reducer)


def _names(subject: Subject) -> tuple[str, ...]:
    return tuple(subject.names[id(p)] for p in subject.parameters)


def reading_anew(got: Capture, older: Plan, numbers: Sequence[NumberPlace]) -> Capture | None:
    """The recording with these numbers read anew in each step; None where it does more than compute with them."""
    if got.trace is None:
        return None
    program = bound(got.program, got.trace, older.original, [place.then for place in numbers])
    if program is None:
        return None
    got.assumptions.leave_out_(numbers, got.trace.values)
    return dataclasses.replace(got, program=program)
