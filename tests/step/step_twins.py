"""Trains the same setup twice, in eager and compiled, until a step is refused, which must change nothing; what is
compared, and how, is in tests/harness.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import harness
import takeback as tb
from harness import assert_same, same
from takeback.compiler.capture.batch import tensors_of
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
    found = {f"model.{name}": t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    names = {id(p): n for n, p in model.named_parameters()}
    for p, table in optimizer.state.items():
        for key, value in table.items():
            if isinstance(value, Tensor):
                found[f"state.{names.get(id(p), '?')}.{key}"] = value.detach().clone()
    return found


def eager_step(setup: Setup, batch: Iterable[Any], **kwargs: Any) -> Tensor:
    """One step in eager, whose gradients are dropped."""
    loss = harness.eager_step(setup.model, setup.loss_fn, setup.optimizer, tuple(batch), kwargs)
    setup.model.zero_grad(set_to_none=True)
    return loss.clone()


@dataclass(frozen=True)
class Seen:
    """What a step left: its loss, the model and optimizer, the batch, and the random state."""

    loss: Tensor
    state: Snapshot
    batch: Snapshot
    random: Tensor


def _seen(setup: Setup, loss: Tensor, batch: tuple[Any, ...]) -> Seen:
    tensors = {f"batch tensor {i}": t.detach().clone() for i, t in enumerate(tensors_of(batch))}
    return Seen(loss, snapshot(setup.model, setup.optimizer), tensors, torch.get_rng_state())


def eager_trace(make: Callable[[], Setup], steps: int) -> list[Seen]:
    torch.manual_seed(0)
    setup = make()
    torch.manual_seed(1)
    trace = []
    for i in range(steps):
        setup.poke(i)
        batch = setup.batches(i)
        trace.append(_seen(setup, eager_step(setup, batch), batch))
    return trace


def compiled_trace(
    make: Callable[[], Setup], expected: list[Seen], **options: Any
) -> tuple[str | None, tb.CompiledStep]:
    """Compares step by step, and every loss again at the end. Gives the message of the refusal, if one came, and the
    compiled step."""
    torch.manual_seed(0)
    setup = make()
    torch.manual_seed(1)
    step = tb.compile_step(setup.model, setup.loss_fn, setup.optimizer, **{"memory": "keep", **options})
    losses: list[Tensor] = []
    for i, eager in enumerate(expected):
        setup.poke(i)
        before = snapshot(setup.model, setup.optimizer)
        batch = setup.batches(i)
        try:
            got = step(*batch)
        except (CaptureError, VerifyError) as error:
            assert_same(snapshot(setup.model, setup.optimizer), before, f"after the refusal of step {i}")
            return str(error), step
        losses.append(got[0] if isinstance(got, tuple) else got)
        ours = _seen(setup, losses[-1], batch)
        assert same(ours.loss, eager.loss), f"loss of step {i} is {ours.loss.item()!r}, eager's {eager.loss.item()!r}"
        assert_same(ours.state, eager.state, f"after step {i}")
        assert_same(ours.batch, eager.batch, f"after step {i}")
        assert torch.equal(ours.random, eager.random), f"the random state after step {i} is not eager's"
    for i, (loss, eager) in enumerate(zip(losses, expected, strict=True)):
        assert same(loss, eager.loss), f"the loss of step {i} was changed by a later one"
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
