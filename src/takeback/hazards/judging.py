"""Builds a hazard's graph twice, around the op and around its plain form, and says what differs.

In: a function that builds a graph on a `Trial` and runs its backward. Out: an `Outcome`. To raise is acceptable, to
differ silently is WRONG.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from takeback.hazards.trial import OpUnderTest, Outcome, Skip, Trial, Verdict

FLOOR = 0.1  #: an error is relative to the largest value of the plain result, or to this if that is smaller

GuardMaker = Callable[[], AbstractContextManager[Any]]
Graph = Callable[[Trial], None]
JudgeOne = Callable[[OpUnderTest, torch.device, GuardMaker], Outcome]


@dataclass(frozen=True)
class Hazard:
    """One situation; `slow` where it starts a compiler or processes."""

    name: str
    judge: JudgeOne
    slow: bool = False


class HazardKind:
    """Hazards of one kind, in the order in which their functions are written."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.hazards: list[Hazard] = []

    def hazard(self, name: str, *, slow: bool = False, cuda: bool = False) -> Callable[[Graph], Graph]:
        """Registers a function that builds the graph of one trial and runs its backward."""

        def register(graph: Graph) -> Graph:
            def judge(subject: OpUnderTest, device: torch.device, guard: GuardMaker) -> Outcome:
                if cuda and device.type != "cuda":
                    return Outcome(Verdict.SKIPPED, "needs a GPU")
                return compare_trials(subject, device, graph, guard)

            self.hazards.append(Hazard(name, judge, slow))
            return graph

        return register


def compare_trials(subject: OpUnderTest, device: torch.device, graph: Graph, guard: GuardMaker) -> Outcome:
    """The graph around the plain form, then around the op, and what differs."""
    plain, ours = Trial(subject, device, plain=True), Trial(subject, device, plain=False)
    raised: Exception | None = None
    try:
        _run(plain, graph, contextlib.nullcontext)
    except Skip as skip:
        return Outcome(Verdict.SKIPPED, str(skip))
    except Exception as error:
        raised = error
    try:
        _run(ours, graph, guard)
    except Skip as skip:
        return Outcome(Verdict.SKIPPED, str(skip))
    except Exception as error:
        if raised is None:
            return _raised(error)
    if raised is not None:
        return Outcome(Verdict.SKIPPED, f"plain torch raises {first_line(raised)}", missed=True)
    outcome = compare(plain, ours)
    if outcome.verdict is Verdict.WRONG and subject.writes_input and ours.read_later:
        # The input was given up: who reads it afterwards may find the result there instead, consistently.
        written = Trial(subject, device, plain=True)
        written.writes = True
        with contextlib.suppress(RuntimeError):  # torch refuses: then the op had to be right, or to raise
            _run(written, graph, contextlib.nullcontext)
            return compare(written, ours)
    return outcome


def compare(plain: Trial, ours: Trial) -> Outcome:
    found = []
    if missing := sorted(plain.seen.keys() ^ ours.seen.keys()):
        return Outcome(Verdict.WRONG, f"only in one of the two: {missing}", float("inf"))
    for name, expected in plain.seen.items():
        error = difference(ours.seen[name], expected, loose=plain.loose and "parameter" in name)
        if error > plain.tolerance:
            found.append((error, name))
    for name, now, then in ours.kept:
        if not _same_bits(now, then):
            found.append((difference(now, then), f"{name} was changed"))
    if not found:
        return Outcome(Verdict.RIGHT)
    found.sort(key=lambda each: -each[0])
    error, name = found[0]
    return Outcome(
        Verdict.WRONG, f"{name}, off by {error:.2g}{f', and {len(found) - 1} more' * (len(found) > 1)}", error
    )


def difference(ours: Tensor | None, expected: Tensor | None, loose: bool = False) -> float:
    """The largest difference, relative to the largest expected value; infinite for another shape, dtype or NaN."""
    if ours is None or expected is None:
        return 0.0 if ours is expected else float("inf")
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return float("inf")
    a, b = ours.detach().double().cpu(), expected.detach().double().cpu()
    if not loose and (b.isnan() != a.isnan()).any():
        return float("inf")
    known = ~(a.isnan() | b.isnan())
    if not known.any():
        return 0.0
    return float((a[known] - b[known]).abs().max() / max(float(b[known].abs().max()), FLOOR))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _run(trial: Trial, graph: Graph, guard: GuardMaker) -> None:
    with guard():
        graph(trial)
        if trial.device.type == "cuda":
            torch.cuda.synchronize(trial.device)
    trial.finish()


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _raised(error: Exception) -> Outcome:
    if type(error).__name__ != "OverwriteError":
        return Outcome(Verdict.RAISED, first_line(error))
    return Outcome(Verdict.RAISED, f"OverwriteError: {' '.join(str(error).split())}", guard=True)


def judge(
    each: Hazard, subject: OpUnderTest, device: str | torch.device, guard: GuardMaker = contextlib.nullcontext
) -> Outcome:
    """The outcome of one hazard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of anomaly mode, compilers, profilers: the gradients are the question here
        return each.judge(subject, torch.device(device), guard)
