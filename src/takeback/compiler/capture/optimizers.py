"""The optimizers of one step, in the order in which they update, taken out of what only wraps them.

In: what the user gave as `optimizer`. Out: `Optimizers`, whose members have disjoint parameters. Guaranteed: a wrapper
that leaves out an update, as gradient accumulation does, is refused before its gradients are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from takeback.errors import CaptureError, OptionError

_ACCUMULATES = (
    "A compiled step that updates drops its gradients, so those of a microbatch whose update is left out would be lost "
    "in silence. Say it to the step: step(*batch, update=False) adds its gradients up, and with Accelerate that is "
    "step(*batch, update=accelerator.sync_gradients); see docs/accumulation.md. Or call it with the whole batch and "
    "compile_step(..., accumulate=n), outside of accumulate()."
)


_HALF = (
    "takeback: the optimizer's own step() failed after it had begun to write, so that some parameters may have been "
    "updated, and some not."
)


@dataclass(frozen=True)
class Optimizers:
    """`members` are what is planned or stepped; `given` is what the user passed, wrappers included."""

    members: tuple[Optimizer, ...]
    given: tuple[Optimizer, ...]

    @property
    def only(self) -> Optimizer:
        """Where there cannot be several: with a scaler."""
        [member] = self.members
        return member

    @property
    def states(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """The state of each parameter that has one."""
        return ((p, table) for member in self.members for p, table in member.state.items())

    def state_bytes(self, device: torch.device) -> int:
        """What all of it takes on a device."""
        found = (value for _, table in self.states for value in table.values())
        return sum(t.untyped_storage().nbytes() for t in found if isinstance(t, torch.Tensor) and t.device == device)

    def step_(self) -> None:
        """The update in eager."""
        for member in self.members:
            step_(member)

    def check_in_force(self) -> None:
        """Raises while a wrapper would leave out the update of this step: it says so beforehand (Accelerate), or it
        does so in `step_`."""
        for wrapper in self.given:
            state = getattr(wrapper, "gradient_state", None) if inner_of(wrapper) is not None else None
            if state is not None and not getattr(state, "sync_gradients", True):
                raise CaptureError(
                    f"gradient accumulation is in force: {_named(wrapper)} leaves out step() for this microbatch. "
                    f"{_ACCUMULATES}"
                )


def optimizers_of(given: Any, scaler: object | None = None) -> Optimizers:
    """Raises for what no step can be made of. `scaler` is the one that compile_step was given."""
    if isinstance(given, Optimizers):
        return given
    listed = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not listed:
        raise CaptureError("the list of optimizers is empty: a step needs one.")
    for optimizer in listed:
        if not isinstance(optimizer, Optimizer):
            raise CaptureError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}, or a list of optimizers."
            )
    members = tuple(_unwrapped(optimizer, scaler) for optimizer in listed)
    for member in members:
        if isinstance(member, torch.optim.LBFGS):
            raise CaptureError(
                "LBFGS evaluates the loss several times in one step through a closure, so it is not one forward, "
                "backward and update. Use it in eager."
            )
        if len(members) > 1 and inner_of(member) is not None:
            raise CaptureError(
                f"{_named(member)} is one of several optimizers; if it leaves out its update, the others' is made "
                f"already. Pass the optimizer inside it, or this one alone."
            )
    if len(members) > 1 and scaler is not None:
        raise OptionError(
            "scaler= and several optimizers do not go together yet: eager skips the update of each by its own "
            "gradients. Make one optimizer with a parameter group for each, or use bfloat16 without a scaler."
        )
    return Optimizers(members, listed)


def check_disjoint(members: Sequence[Optimizer]) -> None:
    """Raises where a parameter has two optimizers."""
    owner: dict[int, int] = {}
    for i, member in enumerate(members):
        for p in (p for group in member.param_groups for p in group["params"]):
            if owner.setdefault(id(p), i) != i:
                raise CaptureError(
                    f"optimizers {owner[id(p)]} ({type(members[owner[id(p)]]).__name__}) and {i} "
                    f"({type(member).__name__}) both have a parameter of shape {tuple(p.shape)}. Each parameter may "
                    f"have one optimizer: give each the parameters that are its own."
                )


def inner_of(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer that this one wraps: one it holds, with the same parameter groups; None if it wraps none."""
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value is not optimizer:
            mine, its = optimizer.param_groups, value.param_groups
            if len(mine) == len(its) and all(a is b for a, b in zip(mine, its, strict=True)):
                return value
    return None


def _unwrapped(optimizer: Optimizer, scaler: object | None) -> Optimizer:
    """What Accelerate wraps: its step() is the inner one's, unless gradients are being accumulated or a scaler is
    used (checked on accelerate 1.15). Any other wrapper is left as it is: its step() may do more."""
    inner = inner_of(optimizer)
    if inner is None:
        return optimizer
    kind = type(optimizer)
    known = kind.__module__.startswith("accelerate.") and kind.__name__ == "AcceleratedOptimizer"
    its_scaler = getattr(optimizer, "scaler", None)
    if its_scaler is not None and not (known and its_scaler is scaler):
        way = "Pass it as well: compile_step(..., scaler=accelerator.scaler)" if known else "Pass the optimizer inside"
        raise CaptureError(
            f"{_named(optimizer)} has a scaler, and would unscale gradients that nobody scaled. {way}, and takeback "
            f"scales, unscales and updates the scale."
        )
    return _unwrapped(inner, scaler) if known else optimizer


def step_(optimizer: Optimizer) -> None:
    """The optimizer's own step(). Raises where it is a wrapper's, and the one inside was not stepped. Where it fails
    before it has written anything, the state that it has made is dropped: half of it would be taken for all. Where it
    fails later, the error is given a note that says so."""
    inner = optimizer
    while (deeper := inner_of(inner)) is not None:
        inner = deeper
    parameters = [p for group in inner.param_groups for p in group["params"]]
    stateless = [p for p in parameters if p not in inner.state]
    kept = [v for table in inner.state.values() for v in table.values() if isinstance(v, torch.Tensor)]
    versions = [t._version for t in (*parameters, *kept)]
    try:
        _step_(optimizer, inner)
    except BaseException as error:
        if versions == [t._version for t in (*parameters, *kept)]:
            for p in stateless:
                inner.state.pop(p, None)
        else:
            error.add_note(_HALF)
        raise


def _step_(optimizer: Optimizer, inner: Optimizer) -> None:
    if inner is optimizer:
        optimizer.step()
        return
    calls: list[bool] = []
    handle = inner.register_step_pre_hook(lambda *_: calls.append(True))
    try:
        optimizer.step()
    finally:
        handle.remove()
    if not calls:
        raise CaptureError(f"{_named(optimizer)} left out the update of this step. {_ACCUMULATES}")


def _named(wrapper: Optimizer) -> str:
    inner = inner_of(wrapper)
    of = f", which wraps {type(inner).__name__}," if inner is not None else ""
    return f"the optimizer {type(wrapper).__module__}.{type(wrapper).__qualname__}{of}"
