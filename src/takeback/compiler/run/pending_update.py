"""The update by the gradients that have waited, as a plan of its own: divide, unscale, clip, and the optimizer's step.

The first one runs in eager and is recorded; later ones replay it while the same parameters have gradients and the
optimizer updates them the same way. Where an optimizer's own step() must be called, all of it stays eager's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from takeback.compiler.capture.batch import tensor_key
from takeback.compiler.capture.finish import Finished, finish_program, why_own_steps
from takeback.compiler.capture.record_update import divide_, record_update
from takeback.compiler.capture.subject import Subject
from takeback.compiler.passes import Home
from takeback.compiler.run.asked import Divisor
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.pending import unplain
from takeback.compiler.run.plan_maker import PlanMaker
from takeback.compiler.run.recording import recorder
from takeback.compiler.run.replayed_step import ReplayedStep
from takeback.errors import CaptureError


@dataclass(frozen=True)
class UpdatePlan:
    """`addresses` of the parameters it updates."""

    key: Hashable
    finished: Finished
    executor: Executor
    addresses: tuple[tuple[torch.nn.Parameter, int], ...]

    def applies(self, key: Hashable) -> bool:
        """Whether eager would update the same way now."""
        return (
            self.key == key
            and self.finished.update is not None
            and self.finished.update.still_applies()
            and all(p.data_ptr() == address for p, address in self.addresses)
        )


class PendingUpdate:
    """Of one step: `run_` it."""

    def __init__(self, maker: PlanMaker) -> None:
        self._maker = maker
        self.plan: UpdatePlan | None = None
        self._rehearsed = False

    def run_(self, divide: Divisor | None, *, keep_grads: bool) -> torch.Tensor | None:
        """Updates by what is in `.grad`, averaged over the group if there is one, of which nothing is left unless it is
        to be kept. The norm before clipping, where that was asked for."""
        group = self._maker.group
        if group is not None:
            group.average_grads_(in_one_piece=self._maker.home is Home.ARENA)
        norm = self._run_(divide, keep_grads=keep_grads)
        if group is not None:
            group.commit_()
        return norm

    def _run_(self, divide: Divisor | None, *, keep_grads: bool) -> torch.Tensor | None:
        maker = self._maker
        parameters = maker.recipe.parameters
        grads = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
        # On the CPU, also with gradients on a GPU: a number of Python's is one too.
        divisor = torch.tensor(divide, dtype=torch.float64) if isinstance(divide, int | float) else divide
        divisor = divisor.detach() if divisor is not None else None
        scaled = maker.scaling.prepare_() if maker.scaling is not None else None
        key = (
            tuple((i, tensor_key(g)) for i, g in grads.items()),
            tensor_key(divisor) if divisor is not None else None,
            scaled,
        )
        if self.plan is not None and self.plan.applies(key):
            return self._replay(self.plan, parameters, grads, divisor, keep_grads=keep_grads)
        subject = self._subject(parameters, grads)
        if subject is not None:
            norm = self._record(key, subject, grads, divisor)
        else:
            with torch.no_grad():
                divide_(grads, divisor)
            norm = maker.recipe.update_()
        if not keep_grads:
            maker.recipe.drop_grads_()
        return norm

    def _subject(self, parameters: Sequence[torch.nn.Parameter], grads: Mapping[int, torch.Tensor]) -> Subject | None:
        """None where the update cannot be planned: an optimizer's own step() is called, or gradients are not tensors of
        their own (sparse ones, slices of the user's flat buffer)."""
        maker = self._maker
        if any(reason is not None for reason in why_own_steps(maker.optimizers, maker.scaling)):
            return None
        if any(unplain(g, parameters[i]) for i, g in grads.items()):
            return None
        storages = [g.untyped_storage().data_ptr() for g in grads.values() if g.numel()]
        if len(set(storages)) < len(storages):
            return None
        try:
            return maker.subject(())
        except CaptureError:  # the microbatches ran plainly in eager, for a reason that was given there
            return None

    def _record(
        self, key: Hashable, subject: Subject, grads: Mapping[int, torch.Tensor], divisor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """In eager, for real; then a plan is made of it."""
        maker, scaling, parameters = self._maker, self._maker.scaling, subject.parameters
        recorded = record_update(subject, grads, divisor, recorder(maker.native, maker.device))
        if scaling is None:
            maker.optimizers.step_()
        else:
            scaling.step_(scaling.found_inf)
        finished = finish_program(
            recorded.program,
            maker.optimizers,
            parameters,
            subject.names,
            own_steps=(None,) * len(maker.optimizers.members),
            scaling=scaling,
        )
        self.plan = None
        if not finished.own_steps:  # else a scaler has skipped the first one, and there is no state yet
            # Nothing in an update could be rebuilt, and what it needs comes when the activations are gone.
            layout = maker.lay_out(finished, dataclasses.replace(maker.options, memory="keep")).layout
            addresses = tuple((parameters[i], parameters[i].data_ptr()) for i in grads)
            self.plan = UpdatePlan(key, finished, maker.executor(layout), addresses)
            self._rehearsed = False
        return recorded.grad_norm

    def _replay(
        self,
        plan: UpdatePlan,
        parameters: Sequence[torch.nn.Parameter],
        grads: Mapping[int, torch.Tensor],
        divisor: torch.Tensor | None,
        *,
        keep_grads: bool,
    ) -> torch.Tensor | None:
        maker, log = self._maker, not self._rehearsed
        replayed = ReplayedStep(
            plan.executor,
            maker.optimizers,
            (),
            parameters,
            [*grads.values(), *((divisor,) if divisor is not None else ())],
            update=plan.finished.update,
            group=None,
            scaling=maker.scaling,
            clip_norm=maker.options.clip_norm,
        )
        updated = replayed.run(inspect=None, log=log)
        norm = replayed.take((), has_aux=False, keep_grads=False).grad_norm
        if keep_grads:
            for i, grad in grads.items():
                parameters[i].grad = grad
        if log and updated:
            self._rehearsed = True
            layout = plan.executor.rehearsed()
            if layout is not None:
                self.plan = dataclasses.replace(plan, executor=maker.executor(layout))
        return norm
