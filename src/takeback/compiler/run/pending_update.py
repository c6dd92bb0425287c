"""The update by the gradients that have waited, as a plan of its own: divide, unscale, clip, and the optimizer's step.

The first one runs in eager and is recorded; later ones replay it while the same parameters have gradients and the
optimizer updates them the same way. Where an optimizer's own step() must be called, all of it stays eager's. That the
ops are the optimizer's is proved on a twin (capture/twin.py); with `verify_every=n` replays are compared with eager.
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
from takeback.compiler.layout import transient_bytes
from takeback.compiler.passes import Home
from takeback.compiler.run.asked import Divisor
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.pending import unplain
from takeback.compiler.run.plan_maker import PlanMaker
from takeback.compiler.run.proof import Proof, differing, in_words, keep, same
from takeback.compiler.run.recording import recorder
from takeback.compiler.run.replayed_step import ReplayedStep
from takeback.compiler.run.snapshot import Snapshot
from takeback.compiler.run.verify import advice
from takeback.errors import CaptureError, VerifyError

_MOST = 8  #: updates that are kept, one for each set of parameters with gradients


@dataclass
class UpdatePlan:
    """`addresses` of the parameters it updates."""

    key: Hashable
    finished: Finished
    executor: Executor
    addresses: tuple[tuple[torch.nn.Parameter, int], ...]
    rehearsed: bool = False

    def applies(self, key: Hashable) -> bool:
        """Whether eager would update the same way now."""
        return (
            self.key == key
            and self.finished.update is not None
            and self.finished.update.still_applies()
            and all(p.data_ptr() == address for p, address in self.addresses)
        )


@dataclass(frozen=True)
class _Summed:
    """What one update is made by: the gradients, by position among the parameters, and what divides them."""

    parameters: Sequence[torch.nn.Parameter]
    grads: Mapping[int, torch.Tensor]
    divisor: torch.Tensor | None

    @property
    def handed(self) -> list[torch.Tensor]:
        return [*self.grads.values(), *((self.divisor,) if self.divisor is not None else ())]

    def key(self) -> Hashable:
        return tuple((i, tensor_key(g)) for i, g in self.grads.items()), tuple(map(tensor_key, self.handed[-1:]))


class PendingUpdate:
    """Of one step: `run_` it."""

    def __init__(self, maker: PlanMaker, proof: Proof) -> None:
        self._maker, self._proof = maker, proof
        self._replays = 0
        self.plans: tuple[UpdatePlan, ...] = ()  #: the last one that was used comes first
        self._unplanned = ""  #: why the last update had no plan

    def describe(self) -> str:
        """For the report."""
        if not self.plans or self._unplanned:
            return f"the update has no plan: {self._unplanned}" if self._unplanned else ""
        layout = self.plans[0].executor.layout
        ops, size = len(layout.program.ops), transient_bytes(layout) / 2**20
        return f"the update is a plan of its own: {ops:,} ops, {size:,.1f} MiB above what is resident"

    def run_(self, divide: Divisor | None, *, keep_grads: bool) -> torch.Tensor | None:
        """Updates by what is in `.grad`, averaged over the group if there is one, of which nothing is left unless it is
        to be kept. The norm before clipping, where that was asked for."""
        group, recipe = self._maker.group, self._maker.recipe
        if group is not None:
            group.average_grads_(in_one_piece=self._maker.home is Home.ARENA)
        parameters = recipe.parameters
        # On the CPU, also with gradients on a GPU: a number of Python's is one too.
        divisor = torch.tensor(divide, dtype=torch.float64) if isinstance(divide, int | float) else divide
        divisor = divisor.detach() if divisor is not None else None
        summed = _Summed(parameters, {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}, divisor)
        norm = self._update_(summed)
        if not keep_grads:
            recipe.drop_grads_()
        if group is not None:
            group.commit_()
        return norm

    def _update_(self, summed: _Summed) -> torch.Tensor | None:
        maker = self._maker
        key = (summed.key(), summed.divisor is None, maker.scaling.prepare_() if maker.scaling is not None else None)
        for plan in self.plans:
            if plan.applies(key):
                self.plans = (plan, *(p for p in self.plans if p is not plan))
                self._replays += 1
                due = self._proof.is_due(proved=True, replays=self._replays)
                return self._beside_eager(plan, summed) if due else self._replay(plan, summed)
        subject, self._unplanned = self._subject(summed)
        return self._in_eager(summed) if subject is None else self._record(key, subject, summed)

    def _in_eager(self, summed: _Summed) -> torch.Tensor | None:
        with torch.no_grad():
            divide_(summed.grads, summed.divisor)
        return self._maker.recipe.update_()

    def _subject(self, summed: _Summed) -> tuple[Subject | None, str]:
        """What is to be recorded, or why the update cannot be planned."""
        maker, grads = self._maker, summed.grads
        own = next((why for why in why_own_steps(maker.optimizers, maker.scaling) if why is not None), None)
        if own is not None:
            return None, f"the optimizer's own step() is called, because {own}"
        odd = (unplain(g, summed.parameters[i]) for i, g in grads.items())
        reason = next((why for why in odd if why is not None), None)
        if reason is not None:
            return None, reason
        storages = [g.untyped_storage().data_ptr() for g in grads.values() if g.numel()]
        if len(set(storages)) < len(storages):
            return None, "two gradients lie in one storage, as the slices of a flat buffer do"
        try:
            return maker.subject(()), ""
        except CaptureError as error:  # the microbatches ran plainly in eager, for the same reason
            return None, str(error)

    def _record(self, key: Hashable, subject: Subject, summed: _Summed) -> torch.Tensor | None:
        """In eager, for real; then a plan is made of it."""
        maker, scaling, parameters = self._maker, self._maker.scaling, subject.parameters
        recorded = record_update(subject, summed.grads, summed.divisor, recorder(maker.native, maker.device))
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
            one_kernel=maker.one_kernel,
            scaling=scaling,
        )
        if finished.own_steps:
            self._unplanned = finished.own_steps[0].reason
            return recorded.grad_norm
        # Nothing in an update could be rebuilt, and what it needs comes when the activations are gone.
        layout = maker.lay_out(finished, dataclasses.replace(maker.options, memory="keep")).layout
        addresses = tuple((parameters[i], parameters[i].data_ptr()) for i in summed.grads)
        made = UpdatePlan(key, finished, maker.executor(layout), addresses)
        self.plans = (made, *(p for p in self.plans if p.key != key))[: maker.options.max_plans or _MOST]
        return recorded.grad_norm

    def _replay(self, plan: UpdatePlan, summed: _Summed) -> torch.Tensor | None:
        maker, rehearse = self._maker, not plan.rehearsed
        replayed = ReplayedStep(
            plan.executor,
            maker.optimizers,
            (),
            summed.parameters,
            summed.handed,
            update=plan.finished.update,
            group=None,
            scaling=maker.scaling,
            clip_norm=maker.options.clip_norm,
        )
        updated = replayed.run(inspect=None, log=rehearse)
        norm = replayed.take((), has_aux=False, keep_grads=False).grad_norm
        for i, grad in summed.grads.items():
            summed.parameters[i].grad = grad
        if rehearse and updated:
            plan.rehearsed = True
            layout = plan.executor.rehearsed()
            if layout is not None:
                plan.executor = maker.executor(layout)
        return norm

    def _beside_eager(self, plan: UpdatePlan, summed: _Summed) -> torch.Tensor | None:
        """A replay, and then eager from the same state, which is what stays. It needs copies of parameters, gradients
        and the optimizer's state."""
        maker = self._maker
        named = dict(maker.recipe.model.named_parameters())
        scaler = dict(maker.scaling.tensors) if maker.scaling is not None else {}
        before = Snapshot(summed.parameters, maker.optimizers, [*summed.grads.values(), *scaler.values()])

        def state() -> dict[str, torch.Tensor]:
            tables = enumerate(table for _, table in maker.optimizers.states)
            kept = {f"{key} {n} of the optimizer": v for n, table in tables for key, v in table.items()}
            return named | scaler | {key: v for key, v in kept.items() if isinstance(v, torch.Tensor)}

        norm = self._replay(plan, summed)
        compiled = keep(self._proof.measure, state())
        with torch.no_grad():
            before.restore_()
        expected = self._in_eager(summed)
        different = differing(self._proof.measure, compiled, state())
        if norm is not None and expected is not None and not same(self._proof.measure, expected, norm):
            different = ("the norm of the gradients", *different)
        if different:
            raise VerifyError(
                f"the update of a plan was compared with eager, and {different[0]} "
                f"{in_words(self._proof.measure)}. The model and optimizer hold eager's result. "
                f"{advice(plan.executor.program, self._proof.measure)}"
            )
        return expected
