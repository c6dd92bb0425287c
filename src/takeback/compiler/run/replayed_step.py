"""One replayed step, from the batch to what the caller gets: the executor computes, then the user's objects change.

The planned update is run unless a scaler skips it; an optimizer's own step() is called where its update is not in the
plan, and all of them where the ranks of a group have gradients for other parameters than the plan's update assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from takeback.compiler.capture.aux_objects import close_objects
from takeback.compiler.capture.batch import map_leaves
from takeback.compiler.capture.optimizers import Optimizers, step_
from takeback.compiler.capture.record_step import AuxSlot
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.update import Updates
from takeback.compiler.program import Region
from takeback.compiler.run.eager import clip_
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.group import Group
from takeback.compiler.run.together import Together


@dataclass(frozen=True)
class Results:
    """What a step leaves to its caller."""

    loss: torch.Tensor
    aux: Any
    has_aux: bool  #: loss_fn returned (loss, aux)
    grad_norm: torch.Tensor | None  #: before clipping, where that was asked for

    @property
    def returned(self) -> Any:
        return (self.loss, self.aux) if self.has_aux else self.loss


def given_results(
    executor: Executor,
    leaves: Sequence[torch.Tensor],
    aux_form: Any,
    *,
    has_aux: bool,
    sharing: Sequence[Together] = (),
) -> Results:
    """Loss and aux of a replay, before the executor lets go of them: copies of what is the plan's, the very bytes of
    what is the caller's. `aux_form` is aux with an `AuxSlot` for every tensor and every number that is read anew.
    `sharing`: those that share memory in eager."""
    program = executor.program
    shared = {i: tensor for each in sharing for i, tensor in each.give(executor, leaves).items()}

    def returned(position: int, region: Region) -> torch.Tensor:
        if position in shared:
            return shared[position]
        borrowed = position > 0 and program.buffers[region.buffer].role.borrowed
        return executor.tensor(region, leaves) if borrowed else executor.give(region, leaves)

    loss, *aux = (returned(i, region) for i, region in enumerate((program.loss, *program.aux)))
    form = close_objects(map_leaves(aux_form, AuxSlot, lambda slot: slot.value(aux)))
    return Results(loss, form, has_aux, None)


@dataclass
class ReplayedStep:
    """`run` it, then `take` what it gave. `own` are the optimizers whose own step() is called."""

    executor: Executor
    optimizers: Optimizers
    own: Sequence[torch.optim.Optimizer]
    parameters: Sequence[torch.nn.Parameter]
    leaves: Sequence[torch.Tensor]
    update: Updates | None
    group: Group | None
    scaling: Scaling | None
    clip_norm: float | None
    _grads: dict[int, Region] = field(init=False)  #: those that were used
    _replaced: bool = field(init=False, default=False)  #: the planned update was left for the optimizer's own
    _grad_norm: torch.Tensor | None = field(init=False, default=None)  #: where it was clipped here

    def __post_init__(self) -> None:
        self._grads = dict(self.executor.program.grads)

    def run(self, *, inspect: Callable[[], None] | None, log: bool) -> bool:
        """The whole step. Gives whether the planned update was run."""
        planned, scaling = self.update is not None, self.scaling
        skips = planned and scaling is not None and not scaling.in_kernel
        finishes = bool(self.own) or self.group is not None or scaling is not None
        updated = self.executor.run(
            self.leaves,
            self.update.scalars() if self.update is not None else (),
            self._finish if finishes else None,
            inspect=inspect,
            reduced=self._reduced if self.group is not None else None,
            skips=self._skips if skips else None,
            log=log,
        )
        # A replay calls kernels below the level that counts writes, and autograd goes by that count.
        torch.autograd.graph.increment_version([self.parameters[i] for i in self._grads])
        if updated and self.update is not None:
            self.update.note_()
        return updated

    def take(self, aux_form: Any, *, has_aux: bool, keep_grads: bool, sharing: Sequence[Together] = ()) -> Results:
        """Tensors for the caller, who owns them. `.grad` is set, to a copy of the plan's or to None."""
        executor, norm = self.executor, self._grad_norm
        results = given_results(executor, self.leaves, aux_form, has_aux=has_aux, sharing=sharing)
        if not self._replaced and executor.program.grad_norm is not None:
            norm = executor.give(executor.program.grad_norm, self.leaves)
        for i, p in enumerate(self.parameters):
            region = self._grads.get(i) if keep_grads else None
            p.grad = executor.give(region, self.leaves) if region is not None else None
        executor.release_()
        return replace(results, grad_norm=norm)

    def _skips(self) -> bool:
        """Whether a scaler leaves the update out; kernels that take found_inf see to that themselves."""
        return bool(self.executor.found_inf(self.leaves).item())

    def _reduced(self) -> Callable[[], None] | None:
        """Waits for the group. What is returned is run in place of the planned update."""
        program = self.executor.program
        assert self.group is not None
        assert program.flags is not None
        mine = self.group.mine(self._grads)
        used = self.group.finish(self.executor.tensor(program.flags, self.leaves), mine)
        if used == mine:
            return None
        self._replaced = True
        self._grads = {i: program.slices[i] for i in sorted(used)}
        return self._finish

    def _finish(self) -> None:
        if self.own or self._replaced:
            self._own_step(self.optimizers.members if self._replaced else self.own)
        elif self.scaling is not None:
            self.scaling.update_(self.executor.found_inf(self.leaves))
        if self.group is not None:
            self.group.commit_()

    def _own_step(self, own: Sequence[torch.optim.Optimizer]) -> None:
        """The optimizers' own step on the planned gradients. One that is not torch's might keep them, and gets copies.
        What the executor has no more is no gradient of theirs; nor are those that a planned update has used."""
        keeps = not all(type(o).__module__.startswith("torch.optim") for o in own)
        theirs = {id(p) for o in own for group in o.param_groups for p in group["params"]}
        alone = len(own) == len(self.optimizers.members)
        try:
            for i, p in enumerate(self.parameters):
                here = i in self._grads and self.executor.still_has(self._grads[i]) and (alone or id(p) in theirs)
                grad = self.executor.tensor(self._grads[i], self.leaves) if here else None
                p.grad = grad.clone() if keeps and grad is not None else grad
            if self._replaced:
                self._grad_norm = clip_(self.parameters, self.clip_norm)
            if self.scaling is None:
                for optimizer in own:
                    step_(optimizer)
            else:
                self.scaling.step_(self.executor.found_inf(self.leaves))
        finally:
            for p in self.parameters:
                p.grad = None  # they look into the plan's bytes
