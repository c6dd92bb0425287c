"""Trains one model twice, compiled and in eager, from the same bits, and compares everything a user could see.

In: a `Case`, which builds the same model each time it is asked, and draws the batch of step i. Every step compares, bit
for bit: loss, aux, gradients, parameters, buffers, optimizer state, the batch and the random state afterwards. At the
end every loss and aux that was ever returned is compared again, so that a result overwritten by a later step shows.

Eager's step is written down here once more, without anything of takeback's: what both had wrong would look equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from takeback import CompiledStep, compile_step
from takeback.compiler.capture.batch import map_tensors, tensors_of

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Between = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """`draw(i)` gives the positional batch of step i, or (args, kwargs) if `has_kwargs`."""

    build: Callable[[], nn.Module]
    loss_fn: Callable[..., Any]
    draw: Callable[[int], Any]
    optimizer: Optimizers = adamw
    has_kwargs: bool = False
    between: Between | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Run:
    """One of the two trainings."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)
    then: list[Tensor] = field(default_factory=list)  #: what each loss and aux was when it was returned


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of zeros and NaN too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits, but any NaN equals any other: which one it is may depend on where it lies."""
    if same_bits(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return False
    lost = a.isnan()
    return torch.equal(lost, b.isnan()) and same_bits(a.detach()[~lost], b.detach()[~lost])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, by name."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    found.update(model.named_buffers())
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}"] = value
    return found


def eager_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
) -> Tensor:
    """The plain recipe that every PyTorch user writes; gradients stay in `.grad`. Gives the detached loss."""
    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    parts: list[Tensor] = []
    for i in range(accumulate):

        def rows(t: Tensor, i: int = i) -> Tensor:
            return t.chunk(accumulate)[i] if t.dim() and accumulate > 1 else t

        given, named = map_tensors((tuple(args), dict(kwargs or {})), rows) if accumulate > 1 else (args, kwargs or {})
        out = loss_fn(model, *given, **named)
        loss = out[0] if isinstance(out, tuple) else out
        if accumulate > 1:
            loss = loss / accumulate
        loss.backward()
        parts.append(loss.detach())
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip_norm)
    optimizer.step()
    return sum(parts[1:], parts[0])


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: Mapping[str, Tensor], eagers: Mapping[str, Tensor], when: str = "") -> None:
    assert ours.keys() == eagers.keys(), f"{when}: {ours.keys() ^ eagers.keys()} is on one side only"
    for name, value in eagers.items():
        if not same(ours[name], value):
            gap = (ours[name].detach().double() - value.detach().double()).abs().max().item() if value.numel() else 0
            raise AssertionError(f"{when}: {name} differs from eager's by up to {gap:g}")


def train_both(
    case: Case, *, steps: int = 6, poison: bool = False, plans: int | None = 1, seed: int = 0, memory: str = "keep"
) -> CompiledStep:
    """Raises unless compiled and eager agree in everything. `plans` is how many recordings are expected. The first step
    records, the next ones rehearse and are compared by takeback itself, from the fourth on steps are steady. `memory`
    is the case's own if its settings have one."""
    eager, ours = _make(case, seed), _make(case, seed)
    assert_same(state_of(ours.model, ours.optimizer), state_of(eager.model, eager.optimizer), "before training")
    keep = case.settings.get("keep_grads", True)
    step = compile_step(
        ours.model,
        case.loss_fn,
        ours.optimizer,
        **{"keep_grads": True, "memory": memory, **case.settings},
        poison=poison,
    )
    for i in range(steps):
        if case.between is not None:
            case.between(i, eager.model, eager.optimizer)
            case.between(i, ours.model, ours.optimizer)
        with case.around():
            torch.manual_seed(1000 + i)
            ours_batch, ours_random = _step_ours(case, step, ours, i)
            torch.manual_seed(1000 + i)
            eager_batch, eager_random = _step_eager(case, eager, i)
        when = f"step {i}"
        seen = len(ours.losses) // (i + 1) * i
        assert_same(_indexed("result", ours.losses[seen:]), _indexed("result", eager.losses[seen:]), when)
        if keep:
            assert_same(gradients_of(ours.model), gradients_of(eager.model), when)
        else:
            assert gradients_of(ours.model) == {}
        assert_same(state_of(ours.model, ours.optimizer), state_of(eager.model, eager.optimizer), when)
        assert_same(_indexed("batch tensor", ours_batch), _indexed("batch tensor", eager_batch), when)
        assert torch.equal(ours_random, eager_random), f"{when}: the random state afterwards is not eager's"
    assert_same(_indexed("result", ours.losses), _indexed("result", ours.then), "after all steps, as returned")
    if plans is not None:
        assert len(step._plans) == plans, f"{len(step._plans)} recordings, expected {plans}"
        assert steps < 2 or step.report().measured is not None, "nothing was ever replayed"
    return step


def _make(case: Case, seed: int) -> _Run:
    torch.manual_seed(seed)
    model = case.build()
    return _Run(model, case.optimizer(model))


def _batch(case: Case, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    drawn = case.draw(i)
    return drawn if case.has_kwargs else (drawn, {})


def _indexed(name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"{name} {i}": t for i, t in enumerate(tensors)}


def _step_ours(case: Case, step: CompiledStep, run: _Run, i: int) -> tuple[list[Tensor], Tensor]:
    with torch.random.fork_rng(devices=[]):
        args, kwargs = _batch(case, i)
    out = step(*args, **kwargs)
    random = torch.get_rng_state()
    returned = tensors_of(out)
    assert not any(t.requires_grad for t in returned), "a result still hangs on the graph"
    run.losses += returned
    run.then += [t.clone() for t in returned]
    return tensors_of((args, kwargs)), random


def _step_eager(case: Case, run: _Run, i: int) -> tuple[list[Tensor], Tensor]:
    with torch.random.fork_rng(devices=[]):
        args, kwargs = _batch(case, i)
    seen: list[Any] = []

    def watched(*a: Any, **k: Any) -> Any:
        out = case.loss_fn(*a, **k)
        seen.append(out[1] if isinstance(out, tuple) else None)
        return out

    names = ("accumulate", "clip_norm")
    loss = eager_step(
        run.model,
        watched,
        run.optimizer,
        args,
        kwargs,
        **{k: v for k, v in case.settings.items() if k in names},
    )
    random = torch.get_rng_state()
    run.losses += [loss.clone(), *tensors_of(map_tensors(seen, lambda t: t.detach().clone()))]
    return tensors_of((args, kwargs)), random
