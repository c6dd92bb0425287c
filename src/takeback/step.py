"""compile_step(): the whole pipeline on one screen. Read this first.

capture   the first step runs for real and is recorded as a program                        capture/
passes    decide what is moved, rebuilt and overwritten                                    passes/pipeline.py
plan      every buffer and all scratch get an offset, validated and borrow-checked         run/layout.py, plan/
run       straight-line code replays the step inside one arena; each new plan is compared
          with eager once                                                                  run/
explain   the report accounts for every byte                                               explain/
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.budget import Planned, check_early, plan_within
from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.batch import map_leaves, take_apart
from takeback.compiler.capture.record_step import AuxSlot, Capture, capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.subject import Subject
from takeback.compiler.capture.twin import disproof
from takeback.compiler.capture.update import Update, lacks_state, own_step_reason, write_update
from takeback.compiler.capture.watch import Watch, ambient
from takeback.compiler.explain.report import Measured, Report, build_report
from takeback.compiler.passes import Refusal
from takeback.compiler.program import Op, Program, Region
from takeback.compiler.run import allocator
from takeback.compiler.run.arena import SharedArena
from takeback.compiler.run.codegen import HeldValueChanged
from takeback.compiler.run.commit import Gate
from takeback.compiler.run.ending import Ending, clip_
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.group import Group
from takeback.compiler.run.layout import Layout
from takeback.compiler.run.recording import recorder
from takeback.compiler.run.replay import Replay, undo_bytes
from takeback.compiler.run.snapshot import Snapshot
from takeback.compiler.run.stream import StreamExecutor
from takeback.compiler.run.verify import Recipe, compare, eager_digest, prove_recording, verified
from takeback.errors import CaptureError, MemoryTargetError
from takeback.options import Options, cache_dir, compiler


def compile_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    *,
    mode: str = "exact",
    memory: str = "auto",
    update: str = "end",
    accumulate: int = 1,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: object | None = None,
    keep_grads: bool = False,
    verify_every: int = 0,
    max_plans: int = 8,
    poison: bool = False,
    solve_s: float = 8.0,
) -> CompiledStep:
    """Compiles `loss_fn(model, *batch, **kw) -> loss or (loss, aux)` and the optimizer's update into one planned step.

    Call the result like a function: `loss = step(*batch)`. The first call with a batch of new shapes runs in eager and
    is recorded; every later one replays the plan, with eager's bits.

    mode          "exact": the same kernels as eager, bit-identical results
    memory        "auto": as low as rebuilding goes without the step becoming slower than eager; "min": as low as it
                  goes; "0.6x" of eager's peak above resident memory, or "12GiB" in all, with the least added time;
                  "keep": nothing is computed twice
    update        "end": the optimizer runs after the backward; "early": each parameter is updated as soon as its
                  gradient is complete, so that gradients hardly exist at the same time
    accumulate    splits the batch along dimension 0 into this many microbatches, and averages their losses
    clip_norm     clips gradients by their global norm, as torch.nn.utils.clip_grad_norm_ does; see step.grad_norm
    scaler        a torch.amp.GradScaler: scales the loss for the backward, unscales the gradients, skips the update if
                  one is not finite, and updates the scale. The returned loss and step.grad_norm are unscaled
    group         a torch.distributed process group, each of whose ranks calls the step with its own part of the batch:
                  gradients are averaged as DistributedDataParallel averages them; see docs/parallel.md
    keep_grads    leaves a copy of the gradients in `.grad` after each step; otherwise `.grad` is None
    verify_every  every n-th replay is repeated in eager on the same state, and a difference raises VerifyError
    max_plans     how many plans (shapes, train/eval, ...) are kept; the least recently used goes first
    poison        a debugging aid: bytes are filled with NaN as soon as their value is dead
    solve_s       how long the choice of what to rebuild may take, in seconds
    """
    options = Options(
        mode,
        memory,
        update,
        accumulate,
        clip_norm,
        scaler,
        group,
        keep_grads,
        verify_every,
        max_plans,
        poison,
        solve_s,
    )
    subjects.check(model, loss_fn, optimizer)
    return CompiledStep(model, loss_fn, optimizer, options)


@dataclass
class Plan:
    """One recorded and planned step, and what must hold for it to be used."""

    key: Hashable
    watch: Watch
    update: Update | None
    executor: Replay
    planned: Planned
    original: Program
    aux_form: Any
    has_aux: bool
    refusals: tuple[Refusal, ...]
    names: tuple[str, ...]
    proved: bool = False  #: compared with eager, bit for bit
    awaits_state: bool = False  #: its update is not planned because the scaler skipped the optimizer's first step
    rehearsals: int = 0

    def holds(self, leaves: Sequence[torch.Tensor]) -> bool:
        if self.update is not None and not self.update.still_applies():
            return False
        if self.executor.written_leaves and len({t.untyped_storage().data_ptr() for t in leaves}) < len(leaves):
            return False  # the step writes a batch tensor, and others may share its memory this time: recorded anew
        return self.watch.change(leaves) is None


class CompiledStep:
    """A training step with one owner per buffer. Made by `compile_step`."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        options: Options,
    ) -> None:
        self.options = options
        self.grad_norm: torch.Tensor | None = None
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        check_early(options, optimizer)
        on_cpu = subjects.device_of(model).type == "cpu"
        self._native = allocator.load(cache_dir(), compiler()) if on_cpu else None
        self._streams = not on_cpu  #: values are placed by the device's own allocator, not in an arena
        self._arena = SharedArena(self._native)
        self._plans: list[Plan] = []  # most recently used first
        self._last: Plan | None = None
        self._replays = 0
        self._held_misses = 0  #: recordings in a row because no plan held the values that the step read into Python
        self._news = subjects.NewPlans()
        self._group = Group(model, options.group) if options.group is not None else None
        clips = options.clip_norm is not None
        self._scaling = Scaling(options.scaler, optimizer, clips=clips) if options.scales else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            raise CaptureError("the step is called under torch.inference_mode(), where nothing can be trained.")
        with self._group.step() if self._group is not None else contextlib.nullcontext():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, batch_key = take_apart((args, kwargs))
        key = (batch_key, ambient(), self._scaling.prepare_() if self._scaling is not None else None)
        missed: Op | None = None
        for plan in tuple(self._plans):
            if plan.key == key and plan.holds(leaves):
                try:
                    return self._use(plan, leaves, args, kwargs)
                except HeldValueChanged as change:
                    missed = plan.executor.program.ops[change.position]
        if missed is not None:
            self._blame(missed)
        return self._record(key, args, kwargs, leaves)

    def _use(self, plan: Plan, leaves: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A replay, compared with eager where that is due."""
        options = self.options
        self._replays += 1
        due = options.verify_every and self._replays % options.verify_every == 0
        if plan.proved and not due:
            return self._replay(plan, leaves)
        recipe = self._recipe(args, kwargs)
        # An optimizer's own step may keep state in Python, so it is not run twice: gradients are what is compared.
        # Where the update begins before they are all there, the parameters after it are. With a group, the update has
        # gradients of other ranks in it: what is compared is this rank's, before they are averaged.
        if plan.update is None or self._group is not None or (not plan.proved and options.update == "end"):
            expected = eager_digest(recipe, plan.executor, leaves)
            return self._replay(plan, leaves, lambda: self._proved(plan, expected, leaves))
        executor = plan.executor
        out = verified(functools.partial(self._replay, plan, leaves), recipe, executor, leaves)
        plan.proved = plan.executor is executor  # a rehearsal may have put another in its place
        return out

    @staticmethod
    def _proved(plan: Plan, expected: Mapping[str, int], leaves: Sequence[torch.Tensor]) -> None:
        compare(expected, plan.executor, leaves, plan.names)
        plan.proved = True

    def _recipe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
        options = self.options
        return Recipe(
            self._model,
            self._loss_fn,
            self._optimizer,
            args,
            kwargs,
            options.accumulate,
            options.clip_norm,
            self._scaling,
        )

    def report(self) -> Report:
        """What lives where in the plan used last, what was copied and why."""
        if self._last is None:
            raise CaptureError("there is no plan to report on yet: run the step once.")
        plan, counters = self._last, self._last.executor.counters
        program = plan.executor.program
        measured = None
        if plan.rehearsals:
            names = [f.name for f in dataclasses.fields(Measured)]
            measured = Measured(**{name: getattr(counters, name) for name in names})
        kept = sum(r.numel * r.dtype.itemsize for r in program.grads.values()) if self.options.keep_grads else 0
        return build_report(
            plan.executor.layout,
            plan.original,
            refusals=plan.refusals,
            undo_bytes=undo_bytes(program),
            kept_grad_bytes=kept,
            measured=measured,
            placed=self._native is not None,
            group=self._group.describe() if self._group is not None else "",
            streamed=isinstance(plan.executor, StreamExecutor),
            step_s=plan.planned.step_s,
            added_s=plan.planned.added_s,
        )

    # -- a new plan --------------------------------------------------------------------------------------------

    def _record(
        self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[torch.Tensor]
    ) -> Any:
        subject = subjects.build(
            self._model,
            self._loss_fn,
            self._optimizer,
            leaves,
            accumulate=self.options.accumulate,
            clip_norm=self.options.clip_norm,
            scaling=self._scaling,
        )
        self._news.note(key)
        check_early(self.options, self._optimizer)
        held = [t for _, t in self._scaling.tensors] if self._scaling is not None else ()
        before = Snapshot(subject.parameters, self._optimizer, held) if self.options.has_target else None
        with Gate() as gate:
            got: Capture | None = None
            try:
                gate.open = True
                got = capture(subject, args, kwargs, recording=recorder(self._native, subjects.device_of(self._model)))
                prove_recording(self._recipe(args, kwargs), got, unclipped=self._group is not None)
                norm = got.grad_norm
                if self._group is not None:
                    self._group.average_grads_(streams=self._streams)
                    norm = clip_(subject.parameters, self.options.clip_norm)
                gate.open = False
                # From here on the step is being committed, and Ctrl-C waits.
                if self._scaling is None:
                    self._optimizer.step()
                else:
                    self._scaling.step_(self._scaling.found_inf)
                if self._group is not None:
                    self._group.commit_()
            except BaseException:
                gate.open = False
                if got is not None:
                    got.rewind_()
                for p in subject.parameters:
                    p.grad = None
                raise
            try:
                self._make_plan(key, subject, got, leaves)
            except MemoryTargetError:
                assert before is not None
                if self._group is not None:
                    self._group.take_back_()
                before.restore_()
                got.rewind_()
                for p in subject.parameters:
                    p.grad = None
                raise
            self._drop_grads(subject.parameters)
        self.grad_norm = norm
        loss = got.loss.clone()
        return (loss, got.aux) if got.has_aux else loss

    def _make_plan(self, key: Hashable, subject: Subject, got: Capture, leaves: Sequence[torch.Tensor]) -> None:
        program, refusals = got.program, []
        update: Update | None = None
        scaling = self._scaling
        reason = own_step_reason(self._optimizer) or (scaling.own_step_reason() if scaling is not None else None)
        reason = reason or disproof(self._optimizer, scaling)
        updated = [subject.parameters[i] for i in program.grads]
        awaits = scaling is not None and reason is None and lacks_state(self._optimizer, updated)
        if awaits:
            reason = "the scaler skipped the optimizer's first step, so there is no state yet; planned once there is"
        if reason is None:
            early = self.options.update == "early"
            program, update = write_update(
                program, self._optimizer, subject.parameters, subject.names, one_by_one=early, scaling=scaling
            )
        else:
            refusals.append(Refusal("plan the update", type(self._optimizer).__name__, program.loss.buffer, 0, reason))
        keep = self.options.keep_grads or update is None
        kept = frozenset(r.buffer for r in program.grads.values()) if keep else frozenset()
        kept |= frozenset((program.found_inf.buffer,) if program.found_inf is not None else ())
        sharing = self._group.sharing if self._group is not None else None
        planned = plan_within(program, kept, self.options, streams=self._streams, sharing=sharing)
        executor = self._executor(planned.layout)
        watch = Watch(subject, got.assumptions, leaves)
        names = tuple(subject.names[id(p)] for p in subject.parameters)
        plan = Plan(key, watch, update, executor, planned, program, got.aux_form, got.has_aux, tuple(refusals), names)
        plan.awaits_state = awaits
        self._plans.insert(0, plan)
        del self._plans[self.options.max_plans :]
        self._last = plan

    def _executor(self, layout: Layout) -> Replay:
        reducer = self._group.reducer if self._group is not None else None
        if self._streams:
            return StreamExecutor(layout, poison=self.options.poison, reducer=reducer)
        return Executor(layout, self._arena, self._native, poison=self.options.poison, reducer=reducer)

    # -- the steady step ---------------------------------------------------------------------------------------

    def _replay(self, plan: Plan, leaves: Sequence[torch.Tensor], inspect: Callable[[], None] | None = None) -> Any:
        executor = plan.executor
        rehearse = plan.rehearsals < 2
        scalars = plan.update.scalars() if plan.update is not None else ()
        program = executor.program
        ending = Ending(
            executor,
            self._optimizer,
            plan.watch.parameters,
            leaves,
            planned=plan.update is not None,
            group=self._group,
            scaling=self._scaling,
            clip_norm=self.options.clip_norm,
        )
        updated = ending.run(scalars, inspect=inspect, log=rehearse)
        loss = executor.give(program.loss, leaves)
        aux = [self._returned(executor, r, leaves) for r in program.aux]
        if ending.replaced:
            self.grad_norm = ending.grad_norm
        elif program.grad_norm is not None:
            self.grad_norm = executor.give(program.grad_norm, leaves)
        for i, p in enumerate(plan.watch.parameters):
            region = ending.grads.get(i) if self.options.keep_grads else None
            p.grad = executor.give(region, leaves) if region is not None else None
        executor.release_()
        if rehearse and updated:
            self._rehearsed(plan)
        if self._plans[0] is not plan:
            self._plans.remove(plan)
            self._plans.insert(0, plan)
        if plan.awaits_state and not lacks_state(self._optimizer, [plan.watch.parameters[i] for i in program.grads]):
            self._plans.remove(plan)  # there is state now: the next step is recorded with its update in the plan
        self._last = plan
        self._held_misses = 0
        self._news.steady()
        return (loss, map_leaves(plan.aux_form, AuxSlot, lambda slot: aux[slot.index])) if plan.has_aux else loss

    @staticmethod
    def _returned(executor: Replay, region: Region, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor for the caller: a copy of what is in the arena, the very bytes of what is the caller's."""
        borrowed = executor.program.buffers[region.buffer].role.borrowed
        return executor.tensor(region, leaves) if borrowed else executor.give(region, leaves)

    def _drop_grads(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if not self.options.keep_grads:
            for p in parameters:
                p.grad = None

    def _rehearsed(self, plan: Plan) -> None:
        """The first replay shows what the chosen kernels really ask of the allocator; the plan is corrected by it."""
        plan.rehearsals += 1
        layout = plan.executor.rehearsed()
        if layout is None:
            plan.rehearsals = 2
        else:
            plan.executor = self._executor(layout)
            plan.proved = False  # other places: compared with eager once more

    def _blame(self, op: Op) -> None:
        """A value that the step reads into Python keeps changing: right each time, but never compiled."""
        self._held_misses += 1
        if self._held_misses >= self.options.max_plans:
            where = op.site.describe() if op.site else "an unknown line"
            raise CaptureError(
                f"the step reads a tensor into Python at {where}, and the value was a new one {self._held_misses} "
                f"times in a row. takeback holds such a value with a guard and records anew when it changes, which "
                f"never ends here. Keep it in a tensor (torch.where instead of if), or pass it as an argument."
            )
