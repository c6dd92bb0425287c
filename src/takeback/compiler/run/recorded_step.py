"""One recorded step, from the batch to what the caller gets: it runs in eager under the recorder and is proved, then
the user's objects change, then a plan is made of the recording. All of it is one transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from takeback.compiler.capture.assumptions import Varying
from takeback.compiler.capture.leaks import disarm_
from takeback.compiler.capture.record_step import Capture, Recordings, capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.subject import Subject
from takeback.compiler.passes.siblings import are_siblings
from takeback.compiler.run.eager import Batch, Recipe, clip_
from takeback.compiler.run.group import Group
from takeback.compiler.run.inductor import in_a_line
from takeback.compiler.run.plans import Plan
from takeback.compiler.run.proof import Measure
from takeback.compiler.run.proof_file import ProvedRecordings
from takeback.compiler.run.replayed_step import Results
from takeback.compiler.run.room import Vigil, is_out_of_memory
from takeback.compiler.run.snapshot import Snapshot
from takeback.compiler.run.together import together
from takeback.compiler.run.transaction import Transaction
from takeback.compiler.run.verify import prove_recording
from takeback.errors import CaptureError, PlanError
from takeback.progress import Doing, Work

_PROVED_EARLIER = (
    "that the recording is eager's step was shown by an earlier process, for the same ops on this machine; the plan's "
    "first replay is compared with eager in this one"
)


@dataclass(frozen=True)
class RecordedStep:
    """`run` it. `revocable`: also when the step has been made it can be taken back, at the price of copies of the
    parameters and the optimizer's state."""

    subject: Subject
    recipe: Recipe
    scaling: Scaling | None
    group: Group | None
    measure: Measure
    recording: Recordings | None
    leave: Callable[[], None] | None  #: ends what `recording` began, where Ctrl-C struck before it ended by itself
    in_one_piece: bool  #: a bucket of gradients is one flat tensor, as in the plan's arena
    revocable: bool

    proofs: ProvedRecordings = field(default_factory=lambda: ProvedRecordings(None))
    varying: Varying = field(default_factory=Varying)  #: to be traced
    kin: Sequence[Plan] = ()  #: of the same step for other shapes, one of each family
    once: bool = False  #: a step that keeps something the first time it runs is refused
    work: Work = field(default_factory=lambda: Work(""))  #: is told what is being done

    def run(
        self,
        batch: Batch,
        then: Callable[[Capture, Plan | None], None],
        *,
        keep_grads: bool,
        begins: Callable[[], None] = lambda: None,
    ) -> Results:
        """What eager gave. `begins` is called before the update, `then` after the commit, with the recording and the
        plan of which it is a sibling: if it raises, the step is taken back where it is revocable, and stays where it is
        not."""
        recipe, scaling, group = self.recipe, self.scaling, self.group
        with Transaction() as step:
            if self.revocable:
                step.on_abort(self._snapshot().restore_)
            if group is not None:
                step.on_abort(group.take_back_)
            step.on_abort(recipe.drop_grads_)
            step.at_end(disarm_)
            if self.leave is not None:
                step.at_end(self.leave)
            step.compute()
            got = self.capture(batch, step.on_abort)
            sibling = self.sibling_of(got)
            got = self.proved(got, sibling, batch)
            norm = got.grad_norm
            if group is not None:
                group.average_grads_(in_one_piece=self.in_one_piece)
                norm = clip_(self.subject.parameters, recipe.clip_norm)
            step.commit()
            begins()
            if scaling is None:
                recipe.optimizers.step_()
            else:
                scaling.step_(scaling.found_inf)
            if group is not None:
                group.commit_()
            if not self.revocable:
                step.done()
                step.on_abort(recipe.drop_grads_)
            no_room: str | None = None
            try:
                then(got, sibling)
            except CaptureError as error:  # which says of a step that it was not made
                raise PlanError(f"the step was made, but no plan of it: {error}") from error
            except (RuntimeError, MemoryError) as error:
                if self.revocable or not is_out_of_memory(error):
                    raise
                no_room = in_a_line(error)
            if no_room is not None:  # out of that block: the error's traceback holds what was recorded
                raise PlanError(
                    f"the step was made, but no plan of it, for which there is no memory ({no_room}). Do not make this "
                    f"step again; the next call records anew."
                )
            if not keep_grads:
                recipe.drop_grads_()
        return Results(loss_of(got), got.aux, got.has_aux, norm)

    def capture(self, batch: Batch, on_abort: Callable[[Callable[[], None]], None]) -> Capture:
        """The recording itself."""
        kin = self.kin[0].kin if self.kin else None
        self.work.begin(Doing.RECORDING)
        vigil = Vigil() if all(p.device.type == "cpu" for p in self.subject.parameters) else None
        got = capture(
            self.subject,
            *batch,
            recording=self.recording,
            on_abort=on_abort,
            varying=self.varying,
            kin=kin,
            took_=vigil.took_ if vigil is not None else None,
            once=self.once,
        )
        on_abort(got.rewind_)
        self.work.begin(None)
        return got

    def sibling_of(self, got: Capture) -> Plan | None:
        """The plan for other shapes that calls the same ops."""
        return next((plan for plan in self.kin if are_siblings(plan.recorded, got.program)), None)

    def proved(
        self,
        got: Capture,
        sibling: Plan | None,
        batch: Batch,
        watched: contextlib.AbstractContextManager[None] | None = None,
    ) -> Capture:
        """The recording, once it is shown that its ops give the same bits each time, and while they are recorded: now,
        `watched` by somebody, by its sibling, or by an earlier process. On a GPU a kernel may use atomics for some
        sizes only."""
        grouped = self.group is not None and self.subject.updates  # it wants gradients as they are before clipping
        if sibling is not None and got.program.device_type == "cpu" and not grouped:
            return got
        self.work.begin(Doing.PROVING)
        how = (self.measure, self.recipe.clip_norm, self.scaling is not None, self.subject.accumulate, watched is None)
        key = self.proofs.key_of(got.program, *map(repr, how)) if not grouped else None
        if key in self.proofs:
            got = replace(got, notes=(*got.notes, _PROVED_EARLIER))
        else:
            with watched or contextlib.nullcontext():
                prove_recording(self.recipe, batch, got, self.measure, scaling=self.scaling, unclipped=grouped)
            self.proofs.add_(key)
        self.work.begin(None)
        return got

    def _snapshot(self) -> Snapshot:
        held = [t for _, t in self.scaling.tensors] if self.scaling is not None else ()
        return Snapshot(self.subject.parameters, self.recipe.optimizers, held)


def loss_of(got: Capture) -> torch.Tensor:
    """The loss for the caller: a copy, or the very bytes where aux has them as well."""
    shared = any(0 in each.members for each in together(got.program))
    return got.loss if shared else got.loss.clone()
