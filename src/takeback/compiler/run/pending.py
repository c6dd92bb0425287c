"""The gradients that wait for their update: calls with `update=False` add to them, the next call with an update divides,
clips, updates and drops them.

Between calls they are what `.grad` holds, as in eager: who looks at them, clips them or drops them is heard. What was in
`.grad` before the first call is not theirs, and goes. Guaranteed: a call that fails before it has begun to add leaves
them as they were; one that fails later drops them all, and its error says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch

from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.program import BufferId, Region
from takeback.compiler.run.eager import Recipe
from takeback.compiler.run.group import Group
from takeback.compiler.run.transaction import Transaction
from takeback.errors import CaptureError, OptionError
from takeback.options import Options

T = TypeVar("T")
Divisor: TypeAlias = float | torch.Tensor

_LOST = (
    "takeback: the call failed after it had begun to write the gradients that wait for the update, so all of them were "
    "dropped. Begin the accumulation again."
)


@dataclass(frozen=True)
class Ask:
    """What a call asks for besides its batch."""

    update: bool
    divide: Divisor | None

    @property
    def accumulates(self) -> bool:
        """Whether gradients must outlive the plan that computes them."""
        return not self.update or self.divide is not None


def asked(update: bool | None, divide: Divisor | None, loss_fn: Callable[..., Any], options: Options) -> Ask:
    """Raises for what cannot be meant."""
    for name, value in (("update", update), ("divide", divide)):
        if value is not None and name in _parameters_of(loss_fn):
            raise OptionError(
                f"{name}= is an argument of the step's own, and loss_fn has a parameter of that name, so it is not "
                f"known which is meant. Rename the parameter of loss_fn, or pass it by position."
            )
    if update is not None and not isinstance(update, bool):
        raise OptionError(f"update must be True or False, got {update!r}")
    ask = Ask(update is not False, divide)
    if divide is not None:
        if not ask.update:
            raise OptionError("divide= divides the summed gradients before the update, and update=False leaves it out.")
        number = isinstance(divide, int | float) and not isinstance(divide, bool) and divide > 0
        if not number and not (isinstance(divide, torch.Tensor) and divide.numel() == 1 and divide.dim() == 0):
            raise OptionError(f"divide must be a positive number or a tensor without dimensions, got {divide!r}")
    if ask.accumulates:
        check_accumulates(options)
    return ask


def check_accumulates(options: Options) -> None:
    """Raises where gradients cannot wait for an update."""
    if options.update == "early":
        raise OptionError(
            "update='early' updates each parameter before all gradients are known, but update=False and divide= need "
            "their sum first. Compile the step with update='end'."
        )
    if options.accumulate != 1:
        raise OptionError(
            f"accumulate={options.accumulate} splits the batch of one call, and update=False adds calls up: a step "
            f"does one of them. Compile it with accumulate=1 and hand over smaller microbatches."
        )


def _parameters_of(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(loss_fn).parameters)
    except (TypeError, ValueError):  # some callables of C have none
        return ()


@dataclass(frozen=True)
class Adding:
    """Of a plan's key: its call adds to gradients with these strides, where they are not their parameter's."""

    strides: tuple[tuple[int, tuple[int, ...]], ...]

    def __repr__(self) -> str:
        return "gradients are added up" + (f", {len(self.strides)} of them with other strides" if self.strides else "")


@dataclass
class Microbatch:
    """One call that adds its gradients to those that wait: `before`, by position among the parameters."""

    parameters: Sequence[torch.nn.Parameter]
    before: Mapping[int, torch.Tensor]
    call: Transaction
    begun: bool = field(default=False, init=False)  #: something has been added

    def key(self, leaves: Sequence[torch.Tensor]) -> Hashable:
        """For the key of a plan. Raises where a tensor of the batch is one of the gradients."""
        mine = {g.untyped_storage().data_ptr() for g in self.before.values() if g.numel()}
        for i, leaf in enumerate(leaves):
            if leaf.layout is torch.strided and leaf.numel() and leaf.untyped_storage().data_ptr() in mine:
                raise CaptureError(
                    f"tensor {i} of the batch is a gradient that waits for the update, or a view of it. The call adds "
                    f"to it while the batch is only borrowed. Pass a copy."
                )
        return Adding(tuple(self.strides.items()))

    @property
    def strides(self) -> dict[int, tuple[int, ...]]:
        """Where they are not the parameter's."""
        parameters = self.parameters
        return {i: g.stride() for i, g in self.before.items() if g.stride() != parameters[i].stride()}

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

    def put_back_(self) -> None:
        """`.grad` as it was when the call began. What was written into those tensors is the caller's matter."""
        self.begun = False
        self.leave_({})


def _nothing(parameter: torch.nn.Parameter, home: Region) -> torch.Tensor:
    made = torch.empty_strided(home.shape, home.stride, dtype=home.dtype, device=parameter.device)
    return made.fill_(complex(-0.0, -0.0) if home.dtype.is_complex else -0.0)


class Pending:
    """Of one step."""

    def __init__(
        self, recipe: Recipe, scaling: Scaling | None, group: Group | None, *, keep_grads: bool, in_one_piece: bool
    ) -> None:
        self._recipe, self._scaling, self._group = recipe, scaling, group
        self._keep_grads, self._in_one_piece = keep_grads, in_one_piece
        self._begun = False

    @property
    def under_way(self) -> bool:
        """Whether there are any. The user's zero_grad() ends an accumulation, as in eager."""
        self._begun = self._begun and any(p.grad is not None for p in self._recipe.model.parameters())
        return self._begun

    def run(self, work: Callable[[Microbatch], T]) -> T:
        """One call: whole or not at all."""
        if not self.under_way:
            self._recipe.drop_grads_()
        parameters = self._recipe.parameters
        before = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
        for i, grad in before.items():
            _check_plain(grad, parameters[i])
        call = Transaction()
        made = Microbatch(parameters, before, call)
        try:
            with call:
                call.on_abort(lambda: self._drop_() if made.begun else made.put_back_())
                call.compute()
                self._begun = True
                return work(made)
        except BaseException as error:
            if made.begun and before:
                error.add_note(_LOST)
            raise

    def update_(self, divide: Divisor | None) -> torch.Tensor | None:
        """What eager does when the last backward is done; the norm before clipping, where that was asked for. If it
        raises, there is nothing to go on with."""
        recipe = self._recipe
        if self._group is not None:
            self._group.average_grads_(in_one_piece=self._in_one_piece)
        if divide is not None:
            with torch.no_grad():
                for p in recipe.parameters:
                    if p.grad is not None:
                        p.grad.div_(divide)
        norm = recipe.update_()
        if self._group is not None:
            self._group.commit_()
        self._begun = False
        if not self._keep_grads:
            recipe.drop_grads_()
        return norm

    def update_alone_(self, divide: Divisor | None) -> torch.Tensor | None:
        """The update without a batch."""
        try:
            with Transaction() as call:  # Ctrl-C waits
                call.on_abort(self._drop_)
                return self.update_(divide)
        except BaseException as error:
            error.add_note(_LOST)
            raise

    def _drop_(self) -> None:
        self._begun = False
        self._recipe.drop_grads_()
        if self._scaling is not None:
            self._scaling.forget_()


def _check_plain(grad: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    """Raises for what stands in `.grad`, put there by the user, and a plan cannot add to."""
    wrong = ""
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        wrong = f"is a {type(grad).__name__} of layout {grad.layout}"
    elif grad.requires_grad or grad.is_conj() or grad.is_neg():
        wrong = "hangs on a graph, or is conjugated by a flag only"
    elif grad.stride() != parameter.stride():
        place = Region(BufferId(0), grad.dtype, tuple(grad.shape), grad.stride(), 0)
        wrong = "" if place.packed else f"has strides {grad.stride()}, which leave gaps or overlap"
    if wrong:
        raise CaptureError(
            f"the .grad of a parameter of shape {tuple(parameter.shape)} was replaced while gradients wait for the "
            f"update, and what stands there {wrong}: nothing can be added to it in place. Put a plain tensor there, or "
            f"call zero_grad()."
        )
