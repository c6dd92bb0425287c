"""A step is recorded while a profiler of Python's is on, and the profiler goes on afterwards."""

from __future__ import annotations

import cProfile
import pstats
import sys
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from takeback import compile_step

pytestmark = pytest.mark.usefixtures("one_thread")


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
