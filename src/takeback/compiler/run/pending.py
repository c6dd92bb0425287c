"""The gradients that wait for their update: calls with `update=False` add to them; the next call with an update adds
its own, and divides, clips, updates and drops them.

Between calls they are what `.grad` holds, as in eager: who looks at them, clips them or drops them is heard. What was
in `.grad` before the first call is not theirs, and goes. Guaranteed: a call that fails before it has begun to add
leaves them as they were; one that fails later drops them all, and its error says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.program import BufferId, Region
from takeback.compiler.run.asked import Ask, Divisor
from takeback.compiler.run.eager import Recipe
from takeback.compiler.run.group import Group
from takeback.compiler.run.transaction import Transaction
from takeback.errors import CaptureError, VerifyError

_LOST = (
    "takeback: the call failed after it had begun to write the gradients that wait for the update, so all of them were "
    "dropped. Begin the accumulation again."
)


@dataclass(frozen=True)
class Adding:
    """Of a plan's key: its call adds to gradients with these strides, where they are not their parameter's, and does
    not add but copy those of `copied`. `refusal`: why there can be no plan."""

    strides: tuple[tuple[int, tuple[int, ...]], ...]
    copied: tuple[int, ...]
    refusal: str | None

    def __repr__(self) -> str:
        return "gradients are added up" + (f", {len(self.strides)} of them with other strides" if self.strides else "")


@dataclass
class Microbatch:
    """One call that adds its gradients to those that wait: `before`, by position among the parameters."""

    parameters: Sequence[torch.nn.Parameter]
    before: Mapping[int, torch.Tensor]
    call: Transaction
    begun: bool = field(default=False, init=False)  #: something has been added
    refusal: str | None = field(default=None, init=False)  #: why this call cannot be planned

    def key(self, leaves: Sequence[torch.Tensor]) -> Hashable:
        """For the key of a plan. `leaves` are the batch's."""
        odd = (unplain(g, self.parameters[i]) for i, g in self.before.items())
        self.refusal = next((reason for reason in odd if reason is not None), None) or self._borrowed(leaves)
        return Adding(tuple(self.strides.items()) if self.refusal is None else (), self.copied, self.refusal)

    def _borrowed(self, leaves: Sequence[torch.Tensor]) -> str | None:
        mine = {g.untyped_storage().data_ptr() for g in self.before.values() if g.numel()}
        for i, leaf in enumerate(leaves):
            if leaf.layout is torch.strided and leaf.numel() and leaf.untyped_storage().data_ptr() in mine:
                return (
                    f"tensor {i} of the batch is a gradient that waits for the update, or a view of it. The call adds "
                    f"to it while the batch is only borrowed. Pass a copy."
                )
        return None

    def check(self) -> None:
        """Raises where `key` has found that the call cannot be planned."""
        if self.refusal is not None:
            raise CaptureError(self.refusal)

    @functools.cached_property
    def strides(self) -> dict[int, tuple[int, ...]]:
        """Where they are not the parameter's."""
        parameters = self.parameters
        return {i: g.stride() for i, g in self.before.items() if g.stride() != parameters[i].stride()}

    @functools.cached_property
    def copied(self) -> tuple[int, ...]:
        """The complex ones for which nothing waits: to these there is nothing to add without changing bits."""
        return tuple(i for i, p in enumerate(self.parameters) if p.is_complex() and i not in self.before)

    def homes(self, adds: Mapping[int, Region]) -> dict[int, torch.Tensor]:
        """What a plan adds to. Where nothing waits: -0.0, to which anything can be added without changing its bits."""
        return {i: self.before[i] if i in self.before else _nothing(self.parameters[i], r) for i, r in adds.items()}

    def begin_(self) -> None:
        """From here on the gradients are being written: Ctrl-C waits for the end of the call."""
        self.call.commit()
        self.begun = True

    def leave_(self, grads: Mapping[int, torch.Tensor]) -> None:
        """They wait in `.grad`, with those that this call had nothing for."""
        for i, p in enumerate(self.parameters):
            p.grad = grads[i] if i in grads else self.before.get(i)

    def abandon_(self) -> None:
        """The same way or another may be tried again, unless something has been added."""
        if not self.begun:
            self.put_back_()

    def put_back_(self) -> None:
        """`.grad` as it was when the call began. What was written into those tensors is the caller's matter."""
        self.begun = False
        self.leave_({})


def _nothing(parameter: torch.nn.Parameter, home: Region) -> torch.Tensor:
    made = torch.empty_strided(home.shape, home.stride, dtype=home.dtype, device=parameter.device)
    return made.fill_(-0.0)


class Pending:
    """Of one step. `update_` averages over the group, divides, clips, updates and drops what is in `.grad`, and gives
    the norm before clipping."""

    def __init__(
        self,
        recipe: Recipe,
        scaling: Scaling | None,
        group: Group | None,
        update_: Callable[[Divisor | None], torch.Tensor | None],
    ) -> None:
        self._recipe, self._scaling, self._group, self._update_ = recipe, scaling, group, update_
        self._begun = False

    @property
    def under_way(self) -> bool:
        """Whether there are any. The user's zero_grad() ends an accumulation, as in eager."""
        self._begun = self._begun and any(p.grad is not None for p in self._recipe.model.parameters())
        return self._begun

    def call(self, add: Callable[[Microbatch], Any], ask: Ask) -> tuple[Any, torch.Tensor | None]:
        """Adds gradients, by `add`, and updates if that is asked for: both or neither. What `add` gives, and the norm
        before clipping."""
        if ask.update:
            self._recipe.optimizers.check_in_force()
        parameters = self._recipe.parameters
        before = {i: p.grad for i, p in enumerate(parameters) if self._begun and p.grad is not None}
        with self._sending(first=not before, last=ask.update):
            if not before:
                self._recipe.drop_grads_()
            call = Transaction()
            made = Microbatch(parameters, before, call)
            try:
                with call:
                    call.on_abort(lambda: self._drop_() if made.begun else made.abandon_())
                    call.compute()
                    self._begun = True
                    out = add(made)
                    norm = self._updated(ask.divide) if ask.update else None
            except BaseException as error:
                if before and made.begun and not isinstance(error, VerifyError):  # which says what has become of them
                    error.add_note(_LOST)
                raise
            if self._group is not None:
                self._group.commit_()
        return out, norm

    def update(self, ask: Ask) -> torch.Tensor | None:
        """The update without a batch. The norm before clipping."""
        if not self.under_way:
            raise CaptureError("there are no gradients to update by: no call with update=False came before.")
        self._recipe.optimizers.check_in_force()
        with self._sending(first=False, last=True):
            try:
                with Transaction() as call:  # Ctrl-C waits
                    call.on_abort(self._drop_)
                    return self._updated(ask.divide)
            except BaseException as error:
                if not isinstance(error, VerifyError):
                    error.add_note(_LOST)
                raise

    def _updated(self, divide: Divisor | None) -> torch.Tensor | None:
        norm = self._update_(divide)
        self._begun = False
        return norm

    def _sending(self, *, first: bool, last: bool) -> contextlib.AbstractContextManager[None]:
        """Between the first and the last call of an accumulation nothing is sent."""
        if self._group is None:
            return contextlib.nullcontext()
        if first or last:
            return self._group.step(first=first)
        self._group.reducer.check()
        return contextlib.nullcontext()

    def _drop_(self) -> None:
        self._begun = False
        self._recipe.drop_grads_()
        if self._scaling is not None:
            self._scaling.forget_()


def unplain(grad: torch.Tensor, parameter: torch.nn.Parameter) -> str | None:
    """Why a plan cannot add to what stands in `.grad`; None if it can."""
    wrong = ""
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        wrong = f"a {type(grad).__name__} of layout {grad.layout}"
    elif grad.requires_grad or grad.is_conj() or grad.is_neg():
        wrong = "a tensor that hangs on a graph, or is conjugated by a flag only"
    elif grad.stride() != parameter.stride():
        place = Region(BufferId(0), grad.dtype, tuple(grad.shape), grad.stride(), 0)
        wrong = "" if place.packed else f"a tensor with strides {grad.stride()}, which leave gaps or overlap"
    if not wrong:
        return None
    return (
        f"the .grad of a parameter of shape {tuple(parameter.shape)}, to which this call would add, is {wrong}. "
        f"Nothing can be added to it in place: put a plain tensor there, or call zero_grad()."
    )
