"""Trains a program twice, in eager as its author would write it and compiled, on new batches, and compares everything.

A `Training` is what a fresh `make()` builds: modules to compare, and one function that makes step i. Half of the
compiled steps must be replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import takeback as tb
from harness import same_bits


@dataclass
class Training:
    """`step(i)` makes the i-th step and gives its loss; `compiled` are the steps that were compiled for it."""

    modules: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    step: Callable[[int], Any]
    compiled: Sequence[tb.CompiledStep] = ()
    seen: list[Tensor] = field(default_factory=list)


def state(training: Training) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for m, module in enumerate(training.modules):
        found |= {f"{m}.{name}": t for name, t in (*module.named_parameters(), *module.named_buffers())}
    for o, optimizer in enumerate(training.optimizers):
        for p, (_, table) in enumerate(optimizer.state.items()):
            found |= {f"optimizer {o}, {p}.{k}": v for k, v in table.items() if isinstance(v, Tensor)}
    return {name: t.detach().clone() for name, t in found.items()}


def assert_equal_trainings(make: Callable[[bool], Training], steps: int = 6) -> Training:
    """`make(compiled)`. Every loss and, after every step, all parameters, buffers and states have eager's bits."""
    trainings, losses, states = [], [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        training = make(compiled)
        torch.manual_seed(1)
        trainings.append(training)
        losses.append([training.step(i).detach().clone() for i in range(steps - 1)])
        states.append(state(training))
        losses[-1].append(training.step(steps - 1).detach().clone())
        states.append(state(training))
    for i, (eager, ours) in enumerate(zip(*losses, strict=True)):
        assert same_bits(eager, ours), f"loss {i} is {ours.item()}, eager's {eager.item()}"
    for eager_state, our_state in ((states[0], states[2]), (states[1], states[3])):
        assert eager_state.keys() == our_state.keys()
        for name, tensor in eager_state.items():
            assert same_bits(tensor, our_state[name]), name
    for step in trainings[1].compiled:
        assert step._replays >= steps // 2, f"only {step._replays} of {steps} steps were replayed"
    return trainings[1]


def batch(i: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 + i)
    return torch.randn(rows, 6, generator=g), torch.randint(0, 4, (rows,), generator=g)


def simple(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizers: Any,
    compiled: bool,
    *,
    draw: Callable[[int], tuple[Any, ...]] = batch,
    clip_norm: float | None = None,
    others: Sequence[nn.Module] = (),
    **options: Any,
) -> Training:
    """The usual step of one model, with one optimizer or a list of them."""
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    inner = [getattr(o, "optimizer", o) for o in listed]
    if compiled:
        step = tb.compile_step(model, loss_fn, optimizers, **{"memory": "keep", "clip_norm": clip_norm, **options})

        def ours(i: int) -> Any:
            out = step(*draw(i))
            return out[0] if isinstance(out, tuple) else out

        return Training([model, *others], inner, ours, [step])

    def eager(i: int) -> Any:
        for o in listed:
            o.zero_grad(set_to_none=True)
        out = loss_fn(model, *draw(i))
        loss = out[0] if isinstance(out, tuple) else out
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for o in listed:
            o.step()
        return loss

    return Training([model, *others], inner, eager)
