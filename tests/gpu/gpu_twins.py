"""Trains one model twice on the GPU, compiled and in eager, and compares everything a user could see, bit for bit.

Batches are drawn on the CPU and moved, so the GPU's generator belongs to the step alone; its state is compared too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import assert_same, eager_step, gradients_of, state_of
from harness import same_bits as same
from takeback.compiler.capture.batch import tensors_of
from takeback.zoo.gpt import GPT, GPTConfig
from takeback.zoo.resnet import ResNet, ResNetConfig

DEVICE = "cuda"
exact_step = functools.partial(tb.compile_step, mode="exact")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """`draw(generator)` gives a batch on the CPU."""

    build: Callable[[], nn.Module]
    loss_fn: Callable[..., Any]
    draw: Callable[[torch.Generator], tuple[Any, ...]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    settings: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(DEVICE)

    def batch(self, i: int) -> tuple[Any, ...]:
        drawn = self.draw(torch.Generator().manual_seed(1000 + i))
        return tuple(t.to(DEVICE) if isinstance(t, Tensor) else t for t in drawn)


def bf16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


# -- models ------------------------------------------------------------------------------------------------------


def labelled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def tokens_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def rows(g: torch.Generator, count: int = 96) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64, generator=g), torch.randint(0, 10, (count,), generator=g)


def images(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 32, 32, generator=g), torch.randint(0, 10, (8,), generator=g)


def channels_last(g: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = images(g)
    return x.contiguous(memory_format=torch.channels_last), y


def convnet(*, inplace: bool = False) -> nn.Module:
    # A strided convolution instead of the pool, whose backward has no deterministic kernel.
    model = ResNet(ResNetConfig("bottleneck", (2, 1), width=16, classes=10, stem=(3, 1), inplace=inplace))
    model.stem[3] = nn.Conv2d(16, 16, 3, 2, 1)
    return model


def gpt(dropout: float = 0.0, *, tied: bool = True) -> nn.Module:
    return GPT(GPTConfig(vocabulary=512, width=128, layers=2, heads=4, context=64, dropout=dropout, tied=tied))


def tokens(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 512, (4, 64), generator=g), torch.randint(0, 512, (4, 64), generator=g)


# -- comparing ---------------------------------------------------------------------------------------------------


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return state_of(model, optimizer) | gradients_of(model)


def train_both(case: Case, *, steps: int = 6, plans: int | None = 1, poison: bool = False) -> tb.CompiledStep:
    """Raises unless compiled and eager agree in everything after every step."""
    ours, eager = case.model(), case.model()
    ours_optimizer, eager_optimizer = case.optimizer(ours), case.optimizer(eager)
    settings = {"keep_grads": True, **case.settings}
    step = exact_step(ours, case.loss_fn, ours_optimizer, **settings, poison=poison)
    recipe = {k: v for k, v in settings.items() if k in ("accumulate", "clip_norm")}
    returned: list[tuple[Tensor, Tensor]] = []
    for i in range(steps):
        with case.around():
            torch.manual_seed(i)
            out = step(*case.batch(i))
            ours_random = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
            torch.manual_seed(i)
            expected = eager_step(eager, case.loss_fn, eager_optimizer, case.batch(i), **recipe)
            eager_random = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
        when = f"step {i}"
        loss = tensors_of(out)[0]
        assert same(loss, expected), f"{when}: loss {loss.item()!r}, eager's {expected.item()!r}"
        assert torch.equal(ours_random, eager_random), f"{when}: the generator is not where eager left it"
        if not settings["keep_grads"]:
            assert all(p.grad is None for p in ours.parameters())
            eager.zero_grad()
        assert_same(everything(ours, ours_optimizer), everything(eager, eager_optimizer), when)
        returned += [(t, t.clone()) for t in tensors_of(out)]
    assert all(same(t, then) for t, then in returned), "a result was overwritten by a later step"
    if plans is not None:
        assert len(step._plans) == plans, f"{len(step._plans)} recordings, expected {plans}"
        assert step.report().measured is not None, "nothing was ever replayed"
    return step
