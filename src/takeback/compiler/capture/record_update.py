"""Records what comes between the last backward and the optimizer's step: the gradients that have waited are divided,
unscaled and clipped, as eager does it, for real.

In: the gradients, which are in `.grad`. Out: a `Program` of these ops alone; gradients and divisor are handed over with
each call, in this order, and it has no loss. The optimizer's step is for the caller to make, and to append.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from takeback.compiler.capture.record_step import Recordings
from takeback.compiler.capture.recorder import Recorder
from takeback.compiler.capture.subject import Subject
from takeback.compiler.program import Phase, Program, Role


@dataclass(frozen=True)
class RecordedUpdate:
    """What the ops gave, besides the gradients."""

    program: Program
    grad_norm: torch.Tensor | None


def record_update(
    subject: Subject, grads: Mapping[int, torch.Tensor], divisor: torch.Tensor | None, recording: Recordings | None
) -> RecordedUpdate:
    """`grads` by position among the subject's parameters; no two of them share memory."""
    handed = [*grads.values(), *((divisor,) if divisor is not None else ())]
    scaling = subject.scaling
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(recording()) if recording is not None else None
        recorder = Recorder(subject.known(), handed, log)
        # With a scaler, whether there is an update is decided after this; else nothing can send the step back.
        recorder.phase = Phase.UPDATE if scaling is None else Phase.BACKWARD
        with recorder, torch.no_grad():
            divide_(grads, divisor)
            if scaling is not None:
                scaling.begin_()
                scaling.unscale_()
            norm: torch.Tensor | None = None
            if subject.clip_norm is not None:
                clipped = [subject.parameters[i] for i in grads]
                norm = torch.nn.utils.clip_grad_norm_(clipped, subject.clip_norm)
    recorder.mark_end_of_backward()
    program = recorder.program(
        recorder.table.constant(torch.zeros(())),
        (),
        {i: recorder.region(g) for i, g in grads.items()},
        recorder.region(norm) if norm is not None else None,
        log.events if log is not None else (),
    )
    buffers = dict(program.buffers)
    for i, region in program.grads.items():
        name = f"{subject.names[id(subject.parameters[i])]}.grad"
        buffers[region.buffer] = replace(buffers[region.buffer], role=Role.GRADIENT, name=name)
    found_inf = recorder.region(scaling.found_inf) if scaling is not None else None
    return RecordedUpdate(replace(program, buffers=buffers, found_inf=found_inf), norm)


def divide_(grads: Mapping[int, torch.Tensor], divisor: torch.Tensor | None) -> None:
    """As eager's `p.grad.div_(divisor)` for each."""
    if divisor is not None:
        for grad in grads.values():
            grad.div_(divisor)
