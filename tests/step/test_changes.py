"""Something that a step reads changes between two steps, one line each: the next step is eager's, or it is refused.

A row of changes.txt is: a name, a piece of Python that sets the scene ($ is a line break), what loss_fn multiplies by,
and the change; a fifth column says that a refusal is right too. Both twins, eager and compiled, live in a module of
their own. The change comes after the plan was replayed.
"""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import takeback as tb
from takeback.errors import CaptureError, VerifyError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


@dataclass(frozen=True)
class Row:
    name: str
    scene: str
    factor: str
    change: str
    refused: bool = False  #: a refusal is right, too


PRELUDE = """
import array, argparse, collections, contextvars, copy, dataclasses, datetime, decimal, enum, fractions, functools
import importlib, itertools, math, operator, os, random, sys, threading, types, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 5.0))
        self.gain = 1.0
    def forward(self, x):
        return self.w * x * self.gain

class Box:
    def __init__(self, **values):
        self.__dict__.update(values)

model = Net()
def make_optimizer(): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
def arguments(step): return (torch.arange(4.0) + step,)
"""

LOSS = """
optimizer = make_optimizer()
def loss_fn(model, x, *more, **named):
    return (model(x) * ({factor}) * 0.01).tanh().sum()
"""


def rows() -> list[Row]:
    found = []
    for line in (Path(__file__).parent / "changes.txt").read_text().splitlines():
        name, scene, factor, change, *rest = (part.strip() for part in line.split("|"))
        found.append(Row(name, scene.replace(" $ ", "\n"), factor, change, bool(rest)))
    return found


class SinIsCos(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


class SinIsCosBelow(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = torch.ops.aten.cos.default if func is torch.ops.aten.sin.default else func
        return wanted(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


class Scene:
    """One twin: a module of its own in which the row's code runs, and another one for it to import."""

    def __init__(self, row: Row, number: int) -> None:
        self.stack = contextlib.ExitStack()
        self.space = self._module(f"row_{number}").__dict__
        self.space |= {"M": self._module(f"row_{number}_config"), "stack": self.stack, "patch": self._patch}
        self.space |= {"SinIsCos": SinIsCos, "SinIsCosBelow": SinIsCosBelow, "default_dtype": _default_dtype}
        torch.manual_seed(0)
        for code in (PRELUDE, row.scene, LOSS.format(factor=row.factor)):
            exec(compile(code, f"<{row.name}>", "exec"), self.space)

    def _module(self, name: str) -> types.ModuleType:
        module = sys.modules[name] = types.ModuleType(name)
        self.stack.callback(sys.modules.pop, name)
        return module

    def _patch(self, place: Any, name: str, value: Any) -> None:
        self.stack.callback(setattr, place, name, getattr(place, name))
        setattr(place, name, value)

    def change(self, row: Row) -> None:
        exec(compile(row.change, f"<{row.name}>", "exec"), self.space)

    def eager(self, step: int) -> torch.Tensor:
        args = self.space["arguments"](step)
        loss: torch.Tensor = self.space["loss_fn"](self.space["model"], *args)
        loss.backward()
        self.space["optimizer"].step()
        self.space["optimizer"].zero_grad()
        return loss.detach()


STEPS, CHANGED_AT = 6, 3  # recorded, replayed and proved, replayed in its last form; then changed


def outcome(row: Row, number: int = 0) -> str:
    """ "right", "refused: …", or what is wrong."""
    with contextlib.closing(_Closing(Scene(row, number))) as eager:
        expected = []
        for i in range(STEPS):
            if i == CHANGED_AT:
                eager.scene.change(row)
            loss = eager.scene.eager(i)
            expected.append((loss, {n: p.detach().clone() for n, p in eager.scene.space["model"].state_dict().items()}))
    with contextlib.closing(_Closing(Scene(row, number))) as compiled:
        space = compiled.scene.space
        step = tb.compile_step(space["model"], space["loss_fn"], space["optimizer"], memory="keep", verify_every=0)
        for i in range(STEPS):
            if i == CHANGED_AT:
                if len(step._plans) != 1:
                    return f"{len(step._plans)} plans where nothing had changed"
                compiled.scene.change(row)
            try:
                loss = step(*space["arguments"](i))
            except (CaptureError, VerifyError) as error:
                return f"refused: {error}"
            if not torch.equal(loss, expected[i][0]):
                return f"stale: the loss of step {i} is {loss.item()}, eager's {expected[i][0].item()}"
            for name, tensor in space["model"].state_dict().items():
                if not torch.equal(tensor, expected[i][1][name]):
                    return f"stale: {name} after step {i} is {tensor.tolist()}, eager's {expected[i][1][name].tolist()}"
    return "right"


@dataclass
class _Closing:
    scene: Scene

    def close(self) -> None:
        self.scene.stack.close()


def test_there_are_enough_rows() -> None:
    assert len({row.name for row in rows()}) >= 150


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_change_takes_effect(row: Row) -> None:
    got = outcome(row)
    assert got == "right" or (row.refused and got.startswith("refused")), got


# -- what changes and is not read ----------------------------------------------------------------------------------


class Bar:
    """A progress bar."""

    def __init__(self) -> None:
        self.n, self.rows = 0, []

    def update(self, row: object) -> None:
        self.n += 1
        self.rows.append(row)


class Trainer:
    """Holds everything, as people's trainers do, its compiled step included. What its loop counts, no step reads."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 2)
        self.config = types.SimpleNamespace(temperature=2.0, name="run")
        self.global_step, self.epoch, self.loss = 0, 0.0, 0.0
        self.losses: list[float] = []
        self.state = {"best": 0.0}
        self.bar = Bar()
        self.step = tb.compile_step(self.model, self.loss_fn, self.opt, memory="keep")

    def loss_fn(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) / self.config.temperature).square().mean()

    def tick(self, loss: torch.Tensor) -> None:
        self.global_step += 1
        self.epoch += 0.1
        self.loss = loss.item()
        self.losses.append(self.loss)
        self.state["best"] = min(self.state["best"], self.loss)
        self.bar.update(self.loss)
        self.config.name += "."
        self.model.global_step = self.global_step
        self.schedule.step()
        setattr(self, f"metric_{self.global_step}", self.loss)


def test_a_trainer_whose_counters_tick_has_one_plan() -> None:
    trainer = Trainer()
    for i in range(6):
        trainer.tick(trainer.step(torch.ones(3, 4) * i))
    assert len(trainer.step._plans) == 1
    trainer.config.temperature = 3.0
    change = trainer.step._plans[0].change([torch.ones(3, 4)])
    assert change == "loss_fn.self.config.temperature: 2.0 is now 3.0"


def test_a_value_that_changes_in_every_step_is_named_in_the_warning() -> None:
    trainer = Trainer()
    for i in range(3):
        trainer.config.temperature = 3 + i
        trainer.step(torch.ones(3, 4))
    trainer.config.temperature = 6
    with pytest.warns(RuntimeWarning, match=r"loss_fn\.self\.config\.temperature: 5 is now 6"):
        trainer.step(torch.ones(3, 4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, each in enumerate(rows()):
        try:
            said = outcome(each, number)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(f"{said.partition(':')[0]:<8} {each.name:<40} {said.partition(':')[2][:100]}", flush=True)
