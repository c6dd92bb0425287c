"""From the recorded forward and backward to the program that is planned: the optimizer's update is written into it, or
the reason why its own `step()` is called stands beside it. Recording and predicting both finish a program here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.twin import differs_in_one_kernel, disproof
from takeback.compiler.capture.update import Update, Updates, lacks_state, own_step_reason, write_update
from takeback.compiler.program import BufferId, Program, Region
from takeback.errors import OptionError
from takeback.options import Options

_AWAITS_STATE = "the scaler skipped the optimizer's first step, so there is no state yet; planned once there is"


@dataclass(frozen=True)
class OwnStep:
    """An optimizer's own step() is called, outside of the plan."""

    position: int  #: among the step's optimizers
    optimizer: str  #: its class
    reason: str


@dataclass(frozen=True)
class Finished:
    """A program ready for the passes."""

    program: Program
    update: Updates | None  #: of the optimizers whose own step() is not called; None if there are none
    kept: frozenset[BufferId]  #: what must last to the end of the step
    own_steps: tuple[OwnStep, ...]
    awaits_state: bool = False  #: it is called only until the optimizer has its state
    adds: Mapping[int, Region] | None = None  #: of a microbatch: what each gradient is added to, by parameter


def why_own_steps(
    optimizers: Optimizers, scaling: Scaling | None = None, *, twins_on: str | None = None
) -> tuple[str | None, ...]:
    """For each optimizer why its update cannot be part of a plan; None if it can: it was proved on a twin, which is on
    the device of its parameters, or on that of `twins_on`."""
    return tuple(_why(member, scaling, twins_on) for member in optimizers.members)


def _why(optimizer: torch.optim.Optimizer, scaling: Scaling | None, twins_on: str | None) -> str | None:
    reason = own_step_reason(optimizer) or (scaling.own_step_reason() if scaling is not None else None)
    return reason or disproof(optimizer, scaling, twins_on)


def in_one_kernel(optimizers: Optimizers, *, twins_on: str | None = None) -> bool:
    """Whether torch's kernels that update in one pass do what the user's optimizers do whose update is written, but for
    rounding: shown on twins."""
    written = [member for member in optimizers.members if own_step_reason(member) is None]
    return all(differs_in_one_kernel(member, twins_on) is None for member in written)


def check_early(options: Options, optimizers: Optimizers, *, twins_on: str | None = None) -> None:
    """Raises where `update="early"` is asked of an optimizer whose update is not part of the plan."""
    reasons = why_own_steps(optimizers, twins_on=twins_on) if options.update == "early" else ()
    for reason in reasons:
        if reason is not None:
            raise OptionError(
                f"update='early' needs an update that is part of the plan, but the optimizer's own step() would be "
                f"called: {reason}. Use update='end'."
            )


def finish_program(
    program: Program,
    optimizers: Optimizers,
    parameters: Sequence[torch.nn.Parameter],
    names: Mapping[int, str],
    *,
    own_steps: Sequence[str | None],
    one_by_one: bool = False,
    one_kernel: bool = False,
    keep_grads: bool = False,
    scaling: Scaling | None = None,
) -> Finished:
    """`own_steps` is what `why_own_steps` said of the user's optimizers. `names` are those of the parameters, by id.
    `one_by_one`: each parameter may be updated at a time of its own. `one_kernel`: in torch's kernel for it, if it has
    one, whatever path eager takes. `keep_grads`: the caller wants the gradients."""
    updated = [parameters[i] for i in program.grads]
    awaits = own_steps == (None,) and scaling is not None and lacks_state(optimizers.only, updated)
    reasons = (_AWAITS_STATE,) if awaits else own_steps
    updates: list[Update] = []
    planned: set[int] = set()
    for member, reason in zip(optimizers.members, reasons, strict=True):
        if reason is not None:
            continue
        planned.update(id(p) for group in member.param_groups for p in group["params"])
        formulas = sum(len(update.formulas) for update in updates)
        program, update = write_update(
            program,
            member,
            parameters,
            names,
            one_by_one=one_by_one,
            one_kernel=one_kernel,
            scaling=scaling,
            formulas=formulas,
        )
        updates.append(update)
    own = tuple(
        OwnStep(i, type(member).__name__, reason)
        for i, (member, reason) in enumerate(zip(optimizers.members, reasons, strict=True))
        if reason is not None
    )
    # A parameter that has no optimizer now may be given to one whose own step() is called.
    kept = {r.buffer for i, r in program.grads.items() if keep_grads or (own and id(parameters[i]) not in planned)}
    if program.found_inf is not None:
        kept.add(program.found_inf.buffer)
    return Finished(program, Updates(tuple(updates)) if updates else None, frozenset(kept), own, awaits)
