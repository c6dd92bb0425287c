"""Graphs on which an in-place op can destroy what somebody else still reads: try your op on them.

In: an `OpUnderTest`, which is an op and the same function in plain torch. Out: for each hazard an `Outcome`. A hazard
builds one graph twice, around the op and around the plain form with equal weights, and compares outputs, gradients of
all leaves and parameters, and buffers; what the user holds (the output, a view of it, a gradient that a hook kept or
that was passed to backward, weights, constants) must keep its bits. To raise is acceptable, to differ silently is
WRONG.

Who reads after whom is controlled, not hoped for: of the nodes that are ready, autograd runs the one created last.

trial        an op under test, and one run of a graph around it
judging      two trials in, what differs out
gradients, hooks, outputs, inputs, backwards, modes, checkpoints, transforms, streams, processes
             the hazards, by kind
report       all of them for one op, as a table
"""

from __future__ import annotations

import contextlib

import torch

from takeback.hazards import (
    backwards,
    checkpoints,
    gradients,
    hooks,
    inputs,
    modes,
    outputs,
    processes,
    streams,
    transforms,
)
from takeback.hazards.judging import GuardMaker, Hazard, HazardKind, compare, judge
from takeback.hazards.processes import run_ddp
from takeback.hazards.trial import OpUnderTest, Outcome, Trial, Verdict

KINDS: tuple[HazardKind, ...] = (
    gradients.kind,
    hooks.kind,
    outputs.kind,
    inputs.kind,
    backwards.kind,
    modes.kind,
    checkpoints.kind,
    transforms.kind,
    streams.kind,
    processes.kind,
)
HAZARDS: tuple[Hazard, ...] = tuple(each for kind in KINDS for each in kind.hazards)


def chosen(only: str = "", *, quick: bool = False) -> list[Hazard]:
    """Those whose name contains `only`, in any case of letters; without the slow ones if `quick`."""
    return [each for each in HAZARDS if only.lower() in each.name.lower() and not (quick and each.slow)]


def run(
    subject: OpUnderTest,
    device: str | torch.device = "cpu",
    *,
    guard: GuardMaker = contextlib.nullcontext,
    quick: bool = False,
    only: str = "",
) -> dict[str, Outcome]:
    """The outcome of every hazard that is `chosen`."""
    return {each.name: judge(each, subject, device, guard) for each in chosen(only, quick=quick)}


__all__ = [
    "HAZARDS",
    "KINDS",
    "Hazard",
    "HazardKind",
    "OpUnderTest",
    "Outcome",
    "Trial",
    "Verdict",
    "chosen",
    "compare",
    "judge",
    "run",
    "run_ddp",
]
