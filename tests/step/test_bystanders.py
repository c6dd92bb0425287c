"""What Python runs beside a step while it is recorded: a profiler goes on, and what the garbage collector calls is not
the step's."""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from takeback import compile_step

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def called_afterwards() -> None:
    pass


def two_steps() -> None:
    model = nn.Linear(8, 4)
    step = compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        step(torch.randn(6, 8))
    assert len(step._plans) == 1
    called_afterwards()


def test_cprofile_sees_what_runs_after_a_recording() -> None:
    profile = cProfile.Profile()
    profile.runcall(two_steps)
    assert sys.getprofile() is None
    names = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert "called_afterwards" in names


def test_a_profiler_in_python_sees_the_recorded_step_and_what_follows() -> None:
    names: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        names.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        two_steps()
    finally:
        sys.setprofile(None)
    assert {"loss_fn", "called_afterwards"} <= names


collections_seen = 0


def count(phase: str, info: dict[str, int]) -> None:
    global collections_seen
    collections_seen += 1


class Finalized:
    """Garbage, which counts itself when it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        count("stop", {})


def test_what_the_garbage_collector_calls_is_neither_read_nor_changed_by_the_step() -> None:
    def with_a_collection(model: nn.Module, x: Tensor) -> Tensor:
        Finalized()
        gc.collect()  # as it may come at any allocation
        return loss_fn(model, x)

    model = nn.Linear(8, 4)
    step = compile_step(model, with_a_collection, torch.optim.SGD(model.parameters(), lr=0.1))
    callbacks = list(gc.callbacks)
    gc.callbacks.append(count)
    try:
        for _ in range(3):
            step(torch.randn(6, 8))
            gc.collect()
    finally:
        gc.callbacks.remove(count)
    assert len(step._plans) == 1
    assert gc.callbacks == callbacks
