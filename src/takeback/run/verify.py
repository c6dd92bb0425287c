"""`verify_every`: runs a step compiled, then in eager from the same state, and compares every tensor bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from takeback.errors import VerifyError
from takeback.run.eager import eager_step


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(p): n for n, p in model.named_parameters()}
    yield from model.named_parameters()
    yield from model.named_buffers()
    for p, table in optimizer.state.items():
        for key, value in table.items():
            if isinstance(value, torch.Tensor):
                yield f"{names.get(id(p), 'parameter')}.{key}", value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal, with NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(
        torch.equal(a, b)
        or (
            a.is_floating_point()
            and torch.equal(a.isnan(), b.isnan())
            and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
        )
    )


def verified(
    step: Callable[[], Any],
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    accumulate: int,
    clip_norm: float | None,
) -> Any:
    """The result of `step()`, after eager gave the same from the same state. Eager's state is what stays."""
    with torch.no_grad():
        before = [(t.detach(), t.detach().clone()) for _, t in _tensors(model, optimizer)]
        random = torch.get_rng_state()
        out = step()
        loss = out[0] if isinstance(out, tuple) else out
        compiled = {name: t.detach().clone() for name, t in _tensors(model, optimizer)}
        for live, old in before:
            live.copy_(old)
    del before
    grads = {p: p.grad for p in model.parameters()}
    torch.set_rng_state(random)
    with torch.enable_grad():
        expected = eager_step(model, loss_fn, optimizer, args, kwargs, accumulate=accumulate, clip_norm=clip_norm)
    for p, grad in grads.items():
        p.grad = grad
    if not same_bits(loss, expected):
        raise VerifyError(f"the compiled step's loss is {loss.item()!r}, eager's {expected.item()!r}. {_ADVICE}")
    for name, now in _tensors(model, optimizer):
        if not same_bits(compiled[name], now.detach()):
            worst = (compiled[name].double() - now.detach().double()).abs().max().item()
            raise VerifyError(f"after the step {name} differs from eager's by up to {worst:g}. {_ADVICE}")
    return out


_ADVICE = (
    "The model and optimizer hold eager's result. Something in the step is not recorded (a clock, a file, Python state "
    "out of takeback's sight) or this is a bug of takeback's; please report it with the step's report."
)
