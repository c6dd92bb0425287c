"""Parts of a step that torch.compile has compiled run in it as they were written, and a step is not compiled itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import Setup, assert_right, assert_same, mlp, sgd, snapshot, xy
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.capture.uncompiled import NOTE
from takeback.errors import CaptureError

# dynamo itself warns while it traces
pytestmark = [pytest.mark.usefixtures("one_thread", "short_search"), pytest.mark.filterwarnings("ignore")]

slow = pytest.mark.slow


class Counting:
    """A backend that counts the graphs it was given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.inner(x)) * 1.5 + x


def nested(backend: Any = None, *, in_place: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block: Any = Block()
    if backend is not None and in_place:
        block.compile(backend=backend)
    elif backend is not None:
        block = torch.compile(block, backend=backend)
    return nn.Sequential(block, mlp(dropout=0.1))


def trained(model: nn.Module, compiled: bool) -> tuple[dict[str, Tensor], Any]:
    """Six steps, by takeback or in eager."""
    optimizer = sgd(model)
    torch.manual_seed(1)
    step = tb.compile_step(model, cross_entropy, optimizer, memory="keep") if compiled else None
    for i in range(6):
        if step is not None:
            step(*xy(i))
        else:
            optimizer.zero_grad()
            cross_entropy(model, *xy(i)).backward()
            optimizer.step()
    state = snapshot(model, optimizer)
    return {name.replace("_orig_mod.", ""): t for name, t in state.items()}, step


@pytest.mark.parametrize("in_place", [True, pytest.param(False, marks=slow)])
def test_a_compiled_part_has_the_bits_of_eager_and_stays_compiled_elsewhere(in_place: bool) -> None:
    backend = Counting()
    model = nested(backend, in_place=in_place)
    ours, step = trained(model, compiled=True)
    assert backend.graphs == 0
    assert step._replays == 5
    assert NOTE in step.report().notes
    assert_same(ours, trained(nested(), compiled=False)[0])
    model(xy(0)[0])
    assert backend.graphs > 0


@slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_part_compiled_by_a_real_backend_has_the_bits_of_eager(backend: str) -> None:
    model = nested(backend)
    model(xy(0)[0]).sum().backward()  # compiled before the step sees it
    model.zero_grad()
    ours, step = trained(nested(backend), compiled=True)
    assert NOTE in step.report().notes
    assert_same(ours, trained(nested(), compiled=False)[0])


def test_a_compiled_function_in_the_loss_has_the_bits_of_eager() -> None:
    """It runs as it was written in takeback's own comparisons, too."""
    backend = Counting()

    def make() -> Setup:
        def smooth(out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out * 0.7, y)

        inner = torch.compile(smooth, backend=backend)
        model = mlp()
        return Setup(model, lambda m, x, y: inner(m(x), y), sgd(model), xy)

    step = assert_right(make, verify_every=2)
    assert NOTE in step.report().notes


def test_no_note_where_nothing_is_compiled() -> None:
    assert NOTE not in trained(nested(), compiled=True)[1].report().notes


@pytest.mark.parametrize(
    ("warm", "around"),
    [(False, False), (True, True), pytest.param(True, False, marks=slow), pytest.param(False, True, marks=slow)],
)
def test_a_step_is_not_compiled_itself(warm: bool, around: bool) -> None:
    model = mlp()
    optimizer = sgd(model)
    step = tb.compile_step(model, cross_entropy, optimizer, memory="keep")
    for i in range(3 if warm else 0):
        step(*xy(i))
    before = snapshot(model, optimizer)
    target = (lambda x, y: step(x * 1.0, y)) if around else step
    compiled = torch.compile(target, backend=Counting())
    with pytest.raises(CaptureError, match="call the step as it is"):
        compiled(*xy(3))
    assert_same(snapshot(model, optimizer), before)
    step(*xy(3))
