"""From the recorded forward and backward to the program that is planned: the optimizer's update is written into it, or
the reason why its own `step()` is called stands beside it. Recording and predicting both finish a program here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.twin import disproof
from takeback.compiler.capture.update import Update, lacks_state, own_step_reason, write_update
from takeback.compiler.program import BufferId, Program
from takeback.errors import OptionError
from takeback.options import Options

_AWAITS_STATE = "the scaler skipped the optimizer's first step, so there is no state yet; planned once there is"


@dataclass(frozen=True)
class OwnStep:
    """The optimizer's own step() is called, outside of the plan."""

    optimizer: str  #: its class
    reason: str


@dataclass(frozen=True)
class Finished:
    """A program ready for the passes."""

    program: Program
    update: Update | None  #: None where the optimizer's own step() is called
    kept: frozenset[BufferId]  #: what must last to the end of the step
    own_step: OwnStep | None
    awaits_state: bool = False  #: it is called only until the optimizer has its state


def why_own_step(optimizer: torch.optim.Optimizer, scaling: Scaling | None = None) -> str | None:
    """Why this optimizer's update cannot be part of a plan; None if it can: it was proved on a twin."""
    reason = own_step_reason(optimizer) or (scaling.own_step_reason() if scaling is not None else None)
    return reason or disproof(optimizer, scaling)


def check_early(options: Options, optimizer: torch.optim.Optimizer) -> None:
    """Raises where `update="early"` is asked of an optimizer whose update is not part of the plan."""
    reason = why_own_step(optimizer) if options.update == "early" else None
    if reason is not None:
        raise OptionError(
            f"update='early' needs an update that is part of the plan, but the optimizer's own step() would be "
            f"called: {reason}. Use update='end'."
        )


def finish_program(
    program: Program,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    names: Mapping[int, str],
    *,
    own_step: str | None,
    one_by_one: bool = False,
    keep_grads: bool = False,
    scaling: Scaling | None = None,
) -> Finished:
    """`own_step` is what `why_own_step` said of the user's optimizer. `names` are those of the parameters, by id.
    `one_by_one`: each parameter may be updated at a time of its own. `keep_grads`: the caller wants the gradients."""
    updated = [parameters[i] for i in program.grads]
    awaits = own_step is None and scaling is not None and lacks_state(optimizer, updated)
    reason = _AWAITS_STATE if awaits else own_step
    update: Update | None = None
    if reason is None:
        program, update = write_update(program, optimizer, parameters, names, one_by_one=one_by_one, scaling=scaling)
    kept = {r.buffer for r in program.grads.values()} if keep_grads or update is None else set()
    if program.found_inf is not None:
        kept.add(program.found_inf.buffer)
    own = OwnStep(type(optimizer).__name__, reason) if reason is not None else None
    return Finished(program, update, frozenset(kept), own, awaits)
