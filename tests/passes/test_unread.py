"""A read into Python that can only ever give the same is left out; every other one stays, and the check of meaning
finds a pass that leaves out too much."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.ownership.meaning import MeaningError, check_meaning
from takeback.compiler.program import Program


def planned(loss_fn: object, *batch: Tensor) -> tuple[Program, Program]:
    """The step as it was recorded and as it is run."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        expected = loss_fn(twin, *batch)  # type: ignore[operator]
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert torch.equal(step(*batch), expected)
    return step._plans[0].original, step._plans[0].executor.program


def reads(program: Program) -> int:
    return sum(op.expected is not None for op in program.ops)


def counts_up(model: nn.Module, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[0]) + 0
    return model(x).square().mean() * (2.0 if bool((positions.diff() == 1).all()) else 1.0)


def test_what_follows_from_numbers_alone_is_not_read_and_not_made() -> None:
    recorded, run = planned(counts_up, torch.ones(4, 3))
    assert (reads(recorded), reads(run)) == (1, 0)
    assert not any(op.name.startswith("arange") for op in run.ops)


def used_as_well(model: nn.Module, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[0], dtype=torch.float32)
    scale = 2.0 if bool((positions >= 0).all()) else 1.0
    return (model(x) * positions[:, None]).square().mean() * scale


def test_what_something_else_reads_stays() -> None:
    recorded, run = planned(used_as_well, torch.ones(4, 3))
    assert (reads(recorded), reads(run)) == (1, 0)
    assert any(op.name.startswith("arange") for op in run.ops)


def of_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() * (2.0 if bool((x > 0).all()) else 1.0)


def of_a_parameter(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, nn.Linear)
    return model(x).square().mean() * (2.0 if bool((model.weight.detach().abs() < 9).all()) else 1.0)


def written_by_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    flags = torch.zeros(4)
    flags[1:2] += x[0, :1]
    return model(x).square().mean() * (2.0 if bool((flags >= 0).all()) else 1.0)


@pytest.mark.parametrize("loss_fn", [of_the_batch, of_a_parameter, written_by_the_batch])
def test_what_may_change_is_read_in_every_step(loss_fn: object) -> None:
    recorded, run = planned(loss_fn, torch.ones(4, 3))
    assert (reads(recorded), reads(run)) == (1, 1)


def test_random_numbers_are_read_in_every_step() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2.0 if bool((torch.rand(3) >= 0).all()) else 1.0)

    model = nn.Linear(3, 2)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        step(torch.ones(4, 3))
    assert reads(step._plans[0].executor.program) == 1


@pytest.mark.parametrize("loss_fn", [of_the_batch, of_a_parameter, written_by_the_batch])
def test_the_check_of_meaning_misses_a_read_that_matters(loss_fn: object) -> None:
    recorded, run = planned(loss_fn, torch.ones(4, 3))
    less = replace(run, ops=tuple(op for op in run.ops if op.expected is None))
    with pytest.raises(MeaningError, match="reads other values into Python"):
        check_meaning(recorded, less)
