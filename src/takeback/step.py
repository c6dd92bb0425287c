"""What compile_step() makes: the whole pipeline on one screen. Read this first.

capture   the first step runs for real and is recorded as a program                        compiler/capture
passes    decide what is moved, rebuilt and overwritten                                    compiler/passes/pipeline.py
plan      every value gets its bytes for its lifetime, validated and borrow-checked        compiler/planning.py
run       straight-line code replays the step as one transaction; each new plan is
          compared with eager once                                                         compiler/run
explain   the report accounts for every byte                                               compiler/explain
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.batch import batch_in_words, objects_of, outline_of, take_call_apart, tensors_of
from takeback.compiler.capture.batch_grads import as_before
from takeback.compiler.capture.buffers import TouchesBoth
from takeback.compiler.capture.derived import Derived, settle_
from takeback.compiler.capture.given import take_
from takeback.compiler.capture.modes import ambient
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.record_step import Capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.uncompiled import check_not_compiled
from takeback.compiler.capture.unplannable import RunsOtherwiseFirst
from takeback.compiler.explain.kernels import kernel_accounts
from takeback.compiler.explain.plans import account_of
from takeback.compiler.explain.report import Report, build_report, title_of
from takeback.compiler.explain.what_if import advised
from takeback.compiler.program import Op
from takeback.compiler.run.asked import Ask, asked
from takeback.compiler.run.codegen import HeldValueChanged
from takeback.compiler.run.eager import Batch, Recipe
from takeback.compiler.run.earnings import NO_ROOM, Earnings
from takeback.compiler.run.execution import Execution
from takeback.compiler.run.fitting import LOWER, needed_bytes
from takeback.compiler.run.foreseen_step import ForeseenStep
from takeback.compiler.run.group import Group
from takeback.compiler.run.microbatch import (
    plain_microbatch,
    record_microbatch,
)
from takeback.compiler.run.pending import Microbatch, Pending
from takeback.compiler.run.pending_update import PendingUpdate
from takeback.compiler.run.plain_step import plain_step
from takeback.compiler.run.plan_maker import PlanMaker, reading_anew
from takeback.compiler.run.plans import Plan, PlanCache
from takeback.compiler.run.proof import NEAR, Bits, Every, Once, Proof, Schedule, Thinning
from takeback.compiler.run.rebound import Rebound
from takeback.compiler.run.replayed_step import Results
from takeback.compiler.run.replayer import Replayer
from takeback.compiler.run.room import is_out_of_memory, what_it_said
from takeback.compiler.run.turn import Turn
from takeback.compiler.run.unplanned import StepCounts, Unplanned
from takeback.errors import CaptureError, NoRoomError
from takeback.options import Options

_FIRST = (
    "the step makes something of random numbers the first time it runs, gives an empty tensor its size, or what it "
    "keeps then changes its results"
)


class CompiledStep:
    """A training step with one owner per buffer. Made by `compile_step`."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any],
        optimizers: Optimizers,
        options: Options,
    ) -> None:
        self.options = options
        self.grad_norm: torch.Tensor | None = None
        self._model, self._loss_fn, self._optimizers = model, loss_fn, optimizers
        self._plans = PlanCache(options.max_plans)
        # Who asks for less memory than "auto" gives wants it from the first batch of each shape on.
        self._earnings = Earnings(explicit=options.max_plans is not None or options.memory not in ("auto", "keep"))
        self._turn = Turn()
        self._news = subjects.NewPlans(earned=_earns(options))
        self._ran_first = False  #: plainly, because the step draws otherwise the first time
        self._derived: tuple[Derived, ...] = ()
        self._unplanned = Unplanned()
        self._rebound = Rebound()
        self._group = Group(model, options.group) if options.group is not None else None
        clips = options.clip_norm is not None
        self._scaling = Scaling(options.scaler, optimizers.only, clips=clips) if options.scales else None
        # With a scaler steps with NaNs are right ones.
        fast = options.is_fast(subjects.device_of(model).type)
        measure = NEAR if fast else Bits(one_nan=options.scales)
        self._proof = Proof(measure=measure, schedule=_schedule(options.verify_every))
        self._recipe = Recipe(
            model,
            loss_fn,
            optimizers,
            accumulate=options.accumulate,
            clip_norm=options.clip_norm,
            scaler=self._scaling.scaler if self._scaling is not None else None,
        )
        self._maker = PlanMaker(self._recipe, options, self._scaling, self._group)
        self._maker.affords, self._maker.affords_kernels = self._earnings.affords, self._earnings.affords_kernels
        self._replayer = Replayer(self._maker, self._plans, self._proof)
        self._update = PendingUpdate(self._maker, self._proof)
        update_ = functools.partial(self._update.run_, keep_grads=options.keep_grads)
        self._pending = Pending(self._recipe, self._scaling, self._group, update_)
        self._maker.check_early()

    @property
    def mode(self) -> str:
        """In which mode it runs: "exact" or "fast"; `mode="auto"` goes by the model's device."""
        return self.options.mode_on(self._maker.device.type)

    @property
    def _replays(self) -> int:
        return self._replayer.count

    @property
    def _last(self) -> Plan | None:
        return self._plans.last

    def __call__(
        self, *args: Any, update: bool | None = None, divide: float | torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """One step: what loss_fn returns for this batch. `update=False`: its gradients are added to those that wait for
        the update, in `.grad`; the next call without it adds its own, divides all by `divide`, a number or a tensor
        without dimensions, clips, updates and drops them. See docs/accumulation.md."""
        self._check_mode()
        ask = asked(update, divide, loss_fn=self._loss_fn, options=self.options, device=self._maker.device)
        before, start = (self._plans.made, self._replays), time.perf_counter()
        kernels_s = self._maker.kernels_s
        try:
            return self._turn(functools.partial(self._in_turn, (args, kwargs), ask))
        finally:
            kernels_s = self._maker.kernels_s - kernels_s
            self._earnings.compiled_(kernels_s)
            self._earnings.spent_(time.perf_counter() - start - kernels_s, on_plan=self._is_new_since(*before))
            torch.clear_autocast_cache()  # casts of weights as they were before the update; see docs/assumptions.md

    def update(self, *, divide: float | torch.Tensor | None = None) -> None:
        """The update alone, by the gradients that calls with `update=False` have left: for a loop that learns only then
        that there is no further microbatch."""
        self._check_mode()
        ask = asked(None, divide, loss_fn=self._loss_fn, options=self.options, device=self._maker.device)
        try:
            self.grad_norm = self._turn(functools.partial(self._pending.update, ask))
        finally:
            torch.clear_autocast_cache()

    def _is_new_since(self, made: int, replays: int) -> bool:
        """Whether a plan was made, or replayed for the first time: that binds it to its bytes, shows what its kernels
        take, and may be compared with eager."""
        plans = self._plans
        first = self._replays > replays and plans.last is not None and plans.last.replays == 1
        return plans.made > made or first

    def _check_mode(self) -> None:
        check_not_compiled()
        if self._maker.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError("a compiled step cannot be captured in a CUDA graph: its update's numbers are Python's.")
        if torch.is_inference_mode_enabled():
            raise CaptureError("the step is called under torch.inference_mode(), where nothing can be trained.")

    def _in_turn(self, batch: Batch, ask: Ask) -> Any:
        if ask.accumulates or self._pending.under_way:
            out, self.grad_norm = self._pending.call(functools.partial(self._call, batch), ask)
            return out
        with self._group.step() if self._group is not None else contextlib.nullcontext():
            return self._call(batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as what it was made of, without plans: the copy records its own."""
        if self.options.group is not None:
            raise CaptureError(
                "a step with group= cannot be copied or pickled: a process group belongs to its processes. Compile a "
                "new step for the copied or loaded model."
            )
        return CompiledStep, (self._model, self._loss_fn, self._optimizers, self.options)

    def _call(self, batch: Batch, micro: Microbatch | None = None) -> Any:
        """`micro`: the call adds its gradients to those that wait, and updates nothing."""
        with self._rebound.call():
            return self._rebound.checked(self._called(batch, micro))

    def _called(self, batch: Batch, micro: Microbatch | None) -> Any:
        if micro is None:
            self._optimizers.check_in_force()
        settle_(self._derived)  # an evaluation since the last step has put other tensors there
        leaves, batch_key, given = take_call_apart(batch, self._maker.arguments)
        take_(self._maker.given, given)
        self._rebound.not_in_batch_(leaves)
        scaled = self._scaling.prepare_() if self._scaling is not None else None
        key = (batch_key, ambient(), scaled, micro.key(leaves) if micro is not None else None)
        missed: Op | None = None
        changed: str | None = None
        outdated: Plan | None = None
        too_large: Plan | None = None
        for plan in self._plans.under(key):
            change = plan.change(leaves)
            if change is None and self._rebound.conflicts_(plan):
                change = plan.change(leaves)
            if change is not None:
                changed, outdated = changed or change, outdated or plan
                continue
            try:
                results = self._replayer.use(plan, batch, leaves, micro)
            except HeldValueChanged as held:
                missed = plan.executor.program.ops[held.position]
            except NoRoomError:
                lower = plan.foreseen is not None and self.options.memory == "auto"
                if (plan.is_proved and not lower) or micro is not None or plan.executor.committing:
                    raise
                too_large = plan
                break
            else:
                self.grad_norm = results.grad_norm
                self._unplanned.planned_(new=False)
                self._news.steady()
                self._rebound.steady()
                if plan.for_change:
                    self._earnings.used_(plan.replays)
                return results.returned
        if outdated is not None:
            self._rebound.outdated_(outdated, leaves)
        outline = (outline_of(batch, self._maker.arguments), *key[1:])
        if too_large is not None:  # or eager was recorded, but has no room beside it
            self._plans.drop_(too_large)
            most, refused = None, "there is none to compare a plan with it"
            if too_large.foreseen is not None:
                most = int(LOWER * needed_bytes(self._maker, too_large.planned))
                refused = "a plan that was to take less was refused memory"
            return self._foresee(key, outline, batch, leaves, refused, most).returned
        reason = self._waits(key, outline, leaves, changed) if missed is None else None
        waits = reason is not None and micro is None
        if reason is None and self.options.unplanned == "raise":
            return self._record(key, outline, batch, leaves, missed, changed, micro)
        reason = reason or self._unplanned.waits_(key)
        if reason is None:
            try:
                return self._record(key, outline, batch, leaves, missed, changed, micro)
            except CaptureError as error:
                reason = self._unplanned.refused_(key, error)
                self._news.steady()  # no plan was made
        if waits:
            made = self._where_there_is_room(batch, outline)
            if isinstance(made, str):  # eager has no room for it, and a plan may have
                return self._foresee(key, outline, batch, leaves, made).returned
            return self._ran_plainly(made, reason)
        return self._ran_plainly(self._plainly(batch, micro), reason)

    def _plainly(self, batch: Batch, micro: Microbatch | None) -> Results:
        self._rebound.end_()
        if micro is not None:
            return plain_microbatch(self._recipe, batch, micro)
        return plain_step(self._recipe, batch, keep_grads=self.options.keep_grads)

    def _ran_plainly(self, results: Results, reason: str) -> Any:
        self._unplanned.ran_plainly_(reason)
        self._plans.passed_()
        self.grad_norm = results.grad_norm
        return results.returned

    def _where_there_is_room(self, batch: Batch, outline: Hashable) -> Results | str:
        """A plain step of a shape that has not earned a plan; or what eager was told, where it was refused memory and
        everything is as before."""
        begun: list[bool] = []
        self._rebound.end_()
        like = next((p.original for p in (*self._plans.of_outline(outline), *self._plans)), None)
        try:
            with as_before(tensors_of(batch)):
                return plain_step(
                    self._recipe,
                    batch,
                    keep_grads=self.options.keep_grads,
                    like=like,
                    begins=lambda: begun.append(True),
                )
        except (RuntimeError, MemoryError) as error:
            if begun or not is_out_of_memory(error):
                raise
            return what_it_said(error)

    def _waits(
        self, key: tuple[Hashable, ...], outline: Hashable, leaves: Sequence[torch.Tensor], changed: str | None
    ) -> str | None:
        """Why a batch, for which there is no plan, runs plainly in eager; None if it gets one. `changed`: what is not
        as the plans for this key assume."""
        if not _earns(self.options):
            return None
        siblings = self._plans.of_outline(outline)
        if changed is not None or not siblings:
            return self._earnings.waits_for_change()
        largest = sum(leaf.numel() for leaf in leaves) > max((p.batch_elements for p in siblings), default=0)
        reason = self._earnings.waits(len(siblings), has_room=self._plans.has_room(), largest=largest)
        if reason is NO_ROOM:
            self._earnings.warn_(subjects.difference(siblings[0].key, key), len(self._plans))
        return reason

    @property
    def counts(self) -> StepCounts:
        """How many steps were planned, how many ran plainly, and why."""
        return self._unplanned.counts

    def report(self) -> Report:
        """What lives where in the plan used last, what was copied and why."""
        plan = self._last
        if plan is None:
            why = self.counts.describe() or "run the step once"
            raise CaptureError(f"there is no plan to report on yet: {why}.")
        plans = (plan, *(p for p in self._plans if p is not plan))
        report = build_report(
            plan.executor.layout,
            plan.original,
            self._execution(plan),
            own_steps=plan.finished.own_steps,
            skipped=plan.skipped,
            unsampled=plan.unsampled,
            unplanned=self.counts.describe(),
            step_s=plan.step_s,
            added_s=plan.added_s,
            notes=(*plan.notes, *self._update_notes(plan)),
            state_bytes=self._state_bytes(plan),
            plans=[account_of(p, self._execution(p), self._state_bytes(p)) for p in plans],
            loading_s=self._maker.loading_s,
            title=title_of(self._model, plan.made_for, self.options, self._maker.device),
            mode=self.mode,
            kernels=kernel_accounts(plan.executor.program, self._maker.kernels),
        )
        return advised(report, plan, self._maker, self._execution(plan))

    def _execution(self, plan: Plan) -> Execution:
        return plan.executor.describe(
            keep_grads=self.options.keep_grads and plan.finished.adds is None,
            group=self._group.describe() if self._group is not None else "",
            measured=plan.rehearsals > 0,
        )

    def _state_bytes(self, plan: Plan) -> int:
        return self._optimizers.state_bytes(self._maker.device) if plan.finished.adds is not None else 0

    def _update_notes(self, plan: Plan) -> Iterator[str]:
        if plan.finished.adds is not None and self._update.describe():
            yield self._update.describe()

    # -- a new plan --------------------------------------------------------------------------------------------

    def _record(
        self,
        key: tuple[Hashable, ...],
        outline: Hashable,
        batch: Batch,
        leaves: Sequence[torch.Tensor],
        missed: Op | None,
        changed: str | None,
        micro: Microbatch | None,
    ) -> Any:
        """`missed`: the op that read another value into Python than any plan holds. `changed`: what else is not as the
        plan for this key assumes."""
        if missed is not None:
            self._plans.missed_(missed, key)
            self._news.read_(missed.site)
        subjects.check_surroundings()
        if micro is not None:
            micro.check()
        subject = replace(self._maker.subject(leaves, updates=micro is None), replaced=self._rebound.storages)
        self._derived = subject.derived
        self._maker.check_early()
        older, varying = self._plans.but_for_values(key, leaves)
        kin = self._plans.kin(outline, leaves) if older is None else ()
        if not kin or missed is not None or changed is not None:  # plans for other shapes alone are earned
            self._news.note(key, changed)
        for_change = (
            missed is None and (changed is not None or not self._plans.of_outline(outline)) and self._plans.made
        )

        begun: list[bool] = []  #: the update: the step is not to be made a second time

        def add_(got: Capture, sibling: Plan | None) -> None:
            self._derived = got.aside.derived
            anew = reading_anew(got, older, varying) if older is not None else None
            if older is not None and anew is not None:
                self._plans.drop_(older)
            plan = self._maker.plan(key, outline, subject, anew or got, leaves, sibling, micro)
            plan.made_for, plan.for_objects = made_for, for_objects
            if for_change and anew is None:
                plan.for_change = True
                self._earnings.changed_()
            self._plans.add_(plan, self._rebound.tensors)

        made_for, for_objects = batch_in_words(batch), bool(objects_of(batch))
        work = self._maker.start(f"new plan for {made_for}")
        with work.inside, work:
            recorded = self._maker.recorded(subject, self._proof.measure, varying, kin)
            refused: str | None = None
            first = again = False
            try:
                if micro is None:
                    kept = self.options.keep_grads
                    results = recorded.run(batch, add_, keep_grads=kept, begins=lambda: begun.append(True))
                else:
                    results = record_microbatch(recorded, batch, micro, then=add_)
            except TouchesBoth:
                again = True
            except RunsOtherwiseFirst:
                if self._ran_first or self._group is not None:
                    raise
                first = True
            except (RuntimeError, MemoryError) as error:
                if micro is not None or begun or not is_out_of_memory(error):
                    raise
                refused = what_it_said(error)
        if again:  # with the user's own tensors
            self._rebound.end_(for_good=True)
            return self._record(key, outline, batch, leaves, missed, changed, micro)
        if first:  # it has been taken back: what eager's first run makes and keeps, the next recording finds
            with as_before(leaves):
                ran = self._ran_plainly(self._plainly(batch, micro), _FIRST)
            self._ran_first = True
            return ran
        if refused is not None:  # out of that block: the error's traceback holds what eager had in memory
            return self._foresee(key, outline, batch, leaves, refused).returned
        self.grad_norm = results.grad_norm
        self._unplanned.planned_(new=True)
        return results.returned

    def _foresee(
        self,
        key: Hashable,
        outline: Hashable,
        batch: Batch,
        leaves: Sequence[torch.Tensor],
        refused: str,
        most_bytes: int | None = None,
    ) -> Results:
        """A step that eager has no room for. `refused`: what it was told. `most_bytes`: what its plan may take."""
        self._rebound.end_()
        given = (self._maker, self._plans, self._replayer, self._proof)
        work = self._maker.start(f"new plan for {batch_in_words(batch)}")
        with work.inside, work:
            results = ForeseenStep(*given, key, outline, batch, leaves, refused, most_bytes).run()
        self.grad_norm = results.grad_norm
        self._unplanned.planned_(new=True)
        return results


def _earns(options: Options) -> bool:
    """Whether plans are earned. Ranks decide alike; and who debugs wants to see plans."""
    return options.group is None and not options.poison and not options.verify_every


def _schedule(verify_every: int | None) -> Schedule:
    if verify_every is None:
        return Thinning()
    return Every(verify_every) if verify_every else Once()
