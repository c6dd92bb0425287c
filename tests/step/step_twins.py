"""Trains the same setup twice, in eager and compiled, and compares every loss, parameter, buffer and state by bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import takeback as tb
from takeback.errors import CaptureError, VerifyError

Snapshot = dict[str, Tensor]


@dataclass
class Setup:
    """One training run: everything that a fresh `make()` builds anew, so that two runs share nothing."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    batches: Callable[[int], tuple[Any, ...]]
    poke: Callable[[int], None] = lambda step: None


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Copies of every parameter, buffer and tensor of the optimizer's state."""
    found = {f"model.{k}": v.detach().clone() for k, v in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for p, table in optimizer.state.items():
        for key, value in table.items():
            if isinstance(value, Tensor):
                found[f"state.{names.get(id(p), '?')}.{key}"] = value.detach().clone()
    return found


def assert_same(now: Snapshot, expected: Snapshot, when: str = "") -> None:
    assert now.keys() == expected.keys(), when
    for name, value in expected.items():
        assert torch.equal(torch.nan_to_num(now[name], 7e7), torch.nan_to_num(value, 7e7)), f"{name} differs {when}"


def eager_step(setup: Setup, batch: Iterable[Any], **kwargs: Any) -> Tensor:
    """The plain recipe every PyTorch user writes."""
    setup.optimizer.zero_grad(set_to_none=True)
    loss = setup.loss_fn(setup.model, *batch, **kwargs)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad(set_to_none=True)
    return loss.detach().clone()


def eager_trace(make: Callable[[], Setup], steps: int) -> list[tuple[Tensor, Snapshot]]:
    torch.manual_seed(0)
    setup = make()
    torch.manual_seed(1)
    trace = []
    for i in range(steps):
        setup.poke(i)
        loss = eager_step(setup, setup.batches(i))
        trace.append((loss, snapshot(setup.model, setup.optimizer)))
    return trace


def compiled_trace(
    make: Callable[[], Setup], expected: list[tuple[Tensor, Snapshot]], **options: Any
) -> tuple[str | None, tb.CompiledStep]:
    """Compares step by step. Gives the message of the refusal, if one came, and the compiled step."""
    torch.manual_seed(0)
    setup = make()
    torch.manual_seed(1)
    step = tb.compile_step(setup.model, setup.loss_fn, setup.optimizer, **{"memory": "keep", **options})
    for i, (loss, state) in enumerate(expected):
        setup.poke(i)
        before = snapshot(setup.model, setup.optimizer)
        try:
            got = step(*setup.batches(i))
        except (CaptureError, VerifyError) as error:
            assert_same(snapshot(setup.model, setup.optimizer), before, f"after the refusal of step {i}")
            return str(error), step
        got = got[0] if isinstance(got, tuple) else got
        assert torch.equal(got, loss), f"loss of step {i} is {got.item()!r}, eager's {loss.item()!r}"
        assert_same(snapshot(setup.model, setup.optimizer), state, f"after step {i}")
    return None, step


def assert_right(make: Callable[[], Setup], steps: int = 6, **options: Any) -> tb.CompiledStep:
    """Every step equals eager's, and none is refused."""
    refused, step = compiled_trace(make, eager_trace(make, steps), **options)
    assert refused is None, refused
    return step


def assert_right_or_refused(make: Callable[[], Setup], steps: int = 6, **options: Any) -> str | None:
    """Every step equals eager's until one is refused, which changes nothing. Gives the refusal."""
    return compiled_trace(make, eager_trace(make, steps), **options)[0]


def mlp(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def xy(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Another batch of the same shape for every step number."""
    g = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, 6, generator=g, dtype=torch.float32), torch.randint(0, 4, (rows,), generator=g)
