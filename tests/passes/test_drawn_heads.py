"""Heads that nobody wrote: steps between logits and loss, and the loss, are drawn. Whatever chunk_head makes of one,
its gradients are as near to float64's as with whole logits; where it cuts nothing, it says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import LENGTH, ROWS, VOCABULARY, SmallModel, distance, eager_gradients, run_chunked, words
from torch import Tensor


def _wide(z: Tensor) -> Tensor:
    return z.to(torch.promote_types(z.dtype, torch.float32))


def _of_position(z: Tensor) -> Tensor:
    """One number for each position of a sequence, the same in all sequences."""
    return torch.linspace(0.5, 1.5, z.shape[-2], dtype=z.dtype).view(1, -1, 1)


def _without_some_words(z: Tensor) -> Tensor:
    gone = torch.arange(z.shape[-1]) % 7 == 3
    return z.masked_fill(gone, -20.0)


def _in_place(z: Tensor) -> Tensor:
    z = z * 1.0
    z.mul_(0.5)
    z[..., 1:3] += 0.25
    return z


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": _wide,
    "scale": lambda z: z * 0.7,
    "soft cap": lambda z: torch.tanh(z / 2) * 2,
    "shift columns": lambda z: z + torch.linspace(-1, 1, z.shape[-1], dtype=z.dtype),
    "temperature of a position": lambda z: z * _of_position(z),
    "words left out": _without_some_words,
    "fewer words": lambda z: z[..., 2:],
    "more words": lambda z: F.pad(z, (0, 5), value=-3.0),
    "normed": lambda z: z / z.square().mean(-1, keepdim=True).add(1e-3).sqrt(),
    "centred": lambda z: z - z.mean(-1, keepdim=True),
    "clamped": lambda z: z.clamp(-1.5, 1.5),
    "doubled": lambda z: torch.cat([z[..., :40], z[..., 40:] * 0.5], -1),
    "contiguous": lambda z: (z.transpose(0, 1) * 1.1).contiguous().transpose(0, 1),
    "no last": lambda z: torch.cat([z[:, :-1], z[:, -1:] * 0.5], 1),
    "in place": _in_place,
    "gelu": F.gelu,
}


def _mean(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-100)


def _masked(z: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
    counts = (y % 3 != 0).to(each.dtype)
    return (each * counts).sum() / counts.sum()


def _by_sequence(z: Tensor, y: Tensor) -> Tensor:
    """The mean of the means of all sequences: no sum over single rows."""
    each = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view_as(y)
    return each.mean(1).square().mean()


def _focal(z: Tensor, y: Tensor) -> Tensor:
    logp = z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((1 - logp.exp()) ** 2 * logp).mean()


def _towards_probabilities(z: Tensor, y: Tensor) -> Tensor:
    soft = torch.softmax(torch.sin(torch.arange(z.numel(), dtype=z.dtype)).view_as(z), -1)
    return F.kl_div(z.log_softmax(-1), soft, reduction="sum") / z.shape[0]


def _shifted(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def _classes_second(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), y, label_smoothing=0.05)


def _margin(z: Tensor, y: Tensor) -> Tensor:
    right = z.gather(-1, y.clamp(min=0).unsqueeze(-1))
    return F.relu(z - right + 1).mean() + z.logsumexp(-1).square().mean() * 1e-3


def _squares(z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, torch.cos(torch.arange(z.numel(), dtype=z.dtype)).view_as(z))


LOSSES = [_mean, _masked, _by_sequence, _focal, _towards_probabilities, _shifted, _classes_second, _margin, _squares]


def draw(seed: int) -> tuple[str, Callable[..., Tensor]]:
    """A name and a loss function."""
    choose = random.Random(seed)
    names = [choose.choice(list(STEPS)) for _ in range(choose.randrange(4))]
    loss, narrow = choose.choice(LOSSES), choose.random() < 0.25
    more = choose.random() < 0.3

    def loss_fn(m: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow and m.head.weight.dtype == torch.float32):
            z = m(x)
            for name in names:
                z = STEPS[name](z)
        z = _wide(z)
        y = torch.where(y < 0, y, y % z.shape[-1])
        found = loss(z, y)
        return found + 1e-2 * z.logsumexp(-1).square().mean() if more else found

    return f"{names}, {loss.__name__}, narrow={narrow}, more={more}", loss_fn


def check(seed: int) -> bool:
    """Whether the head was cut."""
    name, loss_fn = draw(seed)
    torch.manual_seed(seed)
    model, (x, y) = SmallModel(bias=seed % 2 == 0), words()
    run = run_chunked(model, loss_fn, (x, y))
    assert run.draft.replaced or run.reasons, f"{name}: neither cut nor refused"
    exact, whole = eager_gradients(model, loss_fn, (x, y), double=True), eager_gradients(model, loss_fn, (x, y))
    for parameter, value in exact.items():
        ours, eagers = distance(run.grads[parameter], value), distance(whole[parameter], value)
        assert ours <= 2 * eagers + 1e-6, f"{name}: {parameter} {ours:.1e}, with whole logits {eagers:.1e}"
    return bool(run.draft.replaced)


def test_drawn_heads_are_cut_or_refused_and_right() -> None:
    assert ROWS * LENGTH * VOCABULARY > 10_000
    assert sum(check(seed) for seed in range(4)) >= 2


@pytest.mark.slow
def test_many_drawn_heads_are_cut_or_refused_and_right() -> None:
    assert sum(check(seed) for seed in range(4, 150)) >= 110
