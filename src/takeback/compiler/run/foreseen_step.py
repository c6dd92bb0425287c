"""A step that does not fit into memory in eager: planned without recording it as a whole, and replayed at once.

In: a batch whose recording ran out of memory, and was taken back. Out: what the step gives.

1. A few rows of the batch (capture/excerpt.py) are recorded for real, compared with eager, and taken back.
2. Fake tensors show the program of the whole batch (capture/foresee.py); where they do not show, for those few rows,
   the very program that was recorded, the step is refused.
3. It is planned for the memory that is there: "auto" goes as low as it must.
4. The plan's choices are made for the few rows too, and replayed beside eager: loss, gradients and statistics have
   the same bits (in mode fast: are as near). Both are taken back.
5. The whole step is replayed. Nothing compares it with eager, which has no room for it; the report says so.

Where the optimizer has no state yet, its own step() makes it after that first replay, as in eager, and a second plan
has the update. Guaranteed: whatever is raised before the replay commits, nothing of the user's has changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from takeback.compiler.capture.batch import batch_in_words, tensors_of
from takeback.compiler.capture.excerpt import Excerpt, excerpts
from takeback.compiler.capture.finish import why_own_steps
from takeback.compiler.capture.foresee import foresee
from takeback.compiler.capture.leaks import disarm_
from takeback.compiler.capture.record_step import Capture
from takeback.compiler.capture.update import lacks_state, missing_state_bytes
from takeback.compiler.passes.siblings import aligned
from takeback.compiler.program import Program
from takeback.compiler.run.codegen import HeldValueChanged
from takeback.compiler.run.eager import Batch
from takeback.compiler.run.fitting import LOWER, Fitting, needed_bytes
from takeback.compiler.run.plan_maker import PlanMaker
from takeback.compiler.run.plans import Foreseen, Plan, PlanCache
from takeback.compiler.run.probe import probe_scratch
from takeback.compiler.run.proof import Proof, in_words
from takeback.compiler.run.replayed_step import Results
from takeback.compiler.run.replayer import Replayer
from takeback.compiler.run.room import is_out_of_memory, let_go_, room_on
from takeback.compiler.run.transaction import Transaction
from takeback.compiler.run.verify import BesideEager
from takeback.errors import CaptureError, NoRoomError, TakebackError
from takeback.progress import Doing

_BOTH = "a step that does not fit in eager is planned from a few rows of its batch, and that does not go together with "
_ATTEMPTS = 3  #: of "auto"


@dataclass(frozen=True)
class ForeseenStep:
    """`run` it, after a recording of the same batch ran out of memory for the reason `refused`."""

    maker: PlanMaker
    plans: PlanCache
    replayer: Replayer
    proof: Proof
    key: Hashable
    outline: Hashable
    batch: Batch
    leaves: Sequence[torch.Tensor]
    refused: str
    most_bytes: int | None = None  #: what a plan may take: one that took more was refused memory

    def run(self) -> Results:
        """Raises `NoRoomError`, with everything as before, where it cannot be done."""
        reasons: list[str] = []
        if self.maker.group is not None:
            reasons.append(_BOTH + "group=, where all ranks must decide alike")
        elif self.maker.scaling is not None:
            reasons.append(_BOTH + "scaler=; use bfloat16 without one")
        ways = excerpts(self.batch, self.maker.options.accumulate) if not reasons else ()
        for excerpt in ways:
            let_go_(self.maker.device)
            try:
                return self._on(excerpt)
            except NoRoomError:
                raise
            except HeldValueChanged:
                reasons.append(f"{excerpt.describe()} have other values than the whole batch where the step reads them")
            except CaptureError as error:
                reasons.append(str(error))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reasons.append(f"{excerpt.describe()} do not fit either ({_line(error)})")
        let_go_(self.maker.device)
        why = reasons[0] if reasons else "its batch has no rows of which an excerpt could be taken"
        raise NoRoomError(
            f"the step runs out of memory in eager ({self.refused}), and could not be planned without running it: "
            f"{why} Nothing has been changed. Compile it with a batch that fits, or take a smaller one.",
            room_bytes=self._room_bytes(),
        )

    def _room_bytes(self) -> int | None:
        room = room_on(self.maker.device)
        return room.size_bytes if room is not None else None

    def _on(self, excerpt: Excerpt) -> Results:
        maker = self.maker
        part: Batch = excerpt.of(self.batch)
        got = self._recorded(excerpt, part)
        maker.work.begin(Doing.RECORDING)
        whole = foresee(maker.subject(tensors_of(part)), part, got, self.batch)
        held = {id(t) for t in whole.assumptions.tensors}
        if any(id(leaf) in held for leaf in self.leaves):
            raise CaptureError("the model or loss_fn holds a tensor of the batch.")
        trial = _FromExcerpt(self, excerpt, part, got, replace(whole, program=self._with_scratch(whole.program)))
        why = why_own_steps(maker.optimizers, maker.scaling)
        updated = [maker.subject(self.leaves).parameters[i] for i in whole.program.grads]
        planned = [m for m, reason in zip(maker.optimizers.members, why, strict=True) if reason is None]
        stateless = any(lacks_state(member, updated) for member in planned)
        missing = sum(missing_state_bytes(member, updated) for member in planned)
        plan, results = self._first(trial, stateless=stateless, later_bytes=missing)
        if stateless:
            self.plans.drop_(plan)
            self._with_update_(trial)
        return results

    def _with_update_(self, trial: _FromExcerpt) -> None:
        """A plan for the steps to come. This one has been made: where none can be made, the next call says why, before
        it does anything."""
        parameters = self.maker.recipe.parameters
        grads = [p.grad for p in parameters]  # the caller's, where he keeps them
        try:
            trial.plan(stateless=False, later_bytes=0)
        except (TakebackError, RuntimeError, MemoryError) as error:
            if not isinstance(error, TakebackError) and not is_out_of_memory(error):
                raise
        finally:
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad

    def _first(self, trial: _FromExcerpt, *, stateless: bool, later_bytes: int) -> tuple[Plan, Results]:
        """The first replay. Where it is refused memory, allocators lose more than was thought: "auto" goes lower."""
        most = self.most_bytes
        for attempt in range(_ATTEMPTS if self.maker.options.memory == "auto" else 1, 0, -1):
            plan = trial.plan(stateless=stateless, later_bytes=later_bytes, most_bytes=most)
            try:
                return plan, self.replayer.use(plan, self.batch, self.leaves, None)
            except BaseException as error:
                self.plans.drop_(plan)
                if not isinstance(error, NoRoomError) or attempt == 1 or plan.executor.committing:
                    raise
            most = int(LOWER * needed_bytes(self.maker, plan.planned))
            let_go_(self.maker.device)
        raise AssertionError("the last attempt returns or raises")

    def _with_scratch(self, program: Program) -> Program:
        """On the CPU kernels are asked what they take inside, one by one, where they fit; else it is in proportion to
        what they took for the excerpt, and a rehearsal corrects it."""
        native = self.maker.native
        return probe_scratch(program, native, lenient=True) if native is not None else program

    def _recorded(self, excerpt: Excerpt, part: Batch) -> Capture:
        """The recording of `part`, compared with eager and taken back."""
        try:
            return self._record(part)
        except CaptureError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The user's own code may not take so few rows.
            raise CaptureError(f"with {excerpt.describe()} it raises {type(error).__name__}: {_line(error)}.") from None

    def _record(self, part: Batch) -> Capture:
        maker = self.maker
        # What a step keeps when it first runs would be of the excerpt's size.
        recorded = replace(maker.recorded(maker.subject(tensors_of(part)), self.proof.measure), once=True)
        with Transaction() as aside:
            aside.at_end(maker.recipe.drop_grads_)
            aside.at_end(disarm_)
            if recorded.leave is not None:
                aside.at_end(recorded.leave)
            aside.compute()
            got = recorded.capture(part, aside.on_abort)
            got = recorded.proved(got, None, part)
            got.rewind_()
        return replace(got, loss=got.loss.detach().cpu(), aux=None)


@dataclass(frozen=True)
class _FromExcerpt:
    """One excerpt, of which everything is known but whether it plans."""

    step: ForeseenStep
    excerpt: Excerpt
    part: Batch
    got: Capture
    whole: Capture

    def plan(self, *, stateless: bool, later_bytes: int, most_bytes: int | None = None) -> Plan:
        """A plan for the whole batch, proved on the excerpt, and among the step's plans. `later_bytes`: of state that
        the optimizers will make. The search takes memory as well, so that what was left before may not be there."""
        try:
            return self._plan(Fitting(self.step.maker, self.step.refused, later_bytes, most_bytes), stateless=stateless)
        except MemoryError:
            let_go_(self.step.maker.device)
        return self._plan(Fitting(self.step.maker, self.step.refused, later_bytes, most_bytes), stateless=stateless)

    def _plan(self, fitting: Fitting, *, stateless: bool) -> Plan:
        step, maker = self.step, self.step.maker
        subject = maker.subject(step.leaves)
        plan = maker.plan(
            step.key,
            step.outline,
            subject,
            self.whole,
            step.leaves,
            None,
            fitted=fitting.fitted,
            stateless=stateless,
        )
        plan.made_for = batch_in_words(step.batch)
        if maker.fast:
            maker.arena.release_()
            maker.kernels.compare_beforehand_(plan.executor.program)
            let_go_(maker.device)
        alike = self._prove(plan, stateless=stateless)
        plan.proved = plan.family.proved = True
        room = fitting.room
        plan.foreseen = Foreseen(self.excerpt, self.got.program, room.size_bytes if room is not None else None)
        plan.notes = (*plan.notes, *fitting.notes, self._note(alike))
        step.plans.add_(plan)
        return plan

    def _prove(self, plan: Plan, *, stateless: bool) -> bool:
        """The plan's choices on the excerpt, replayed beside eager; both are taken back. Gives whether they are the
        same choices, op for op: for other sizes some cannot be taken over."""
        maker, leaves = self.step.maker, tensors_of(self.part)
        subject = maker.subject(leaves)
        known = {own.position: own.reason for own in plan.finished.own_steps}
        own_steps = tuple(known.get(i) for i in range(len(maker.optimizers.members)))
        finished = maker.finished(subject, self.got, own_steps)
        options = replace(
            maker.options, update="end", memory="auto" if maker.options.has_target else maker.options.memory
        )
        layout = maker.lay_out(finished, options, None, plan.executor.layout).layout
        executor = maker.executor(layout, plan.family.codes)
        beside = BesideEager(
            self.step.proof.of(self.got.program),
            recipe=maker.recipe,
            batch=self.part,
            scaling=None,
            executor=executor,
            leaves=leaves,
            names=plan.names,
            aside=plan.aside,
        )
        maker.work.begin(Doing.PROVING)
        executor.kernels.plain = True  # each generated kernel is compared by itself when it is first used
        try:
            beside.taken_back()
        finally:
            executor.kernels.plain = False
            executor.settle_()
            maker.work.begin(None)
        return aligned(layout.program.ops, plan.executor.layout.program.ops) is not None

    def _note(self, alike: bool) -> str:
        measure = self.step.proof.of(self.got.program).measure
        choices = "its choices" if alike else "what of its choices can be had for so few rows"
        return (
            f"eager has no room for this step ({self.step.refused}), so it was not recorded: its program is what fake "
            f"tensors show, which for {self.excerpt.describe()} is, op for op, what was recorded; {choices} were "
            f"compared with eager on these rows, where nothing {in_words(measure)}. No step on the whole batch has "
            f"been compared with eager's; from time to time its loss is, where eager's forward fits"
        )


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
