"""A model in the middle of which a test computes something, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import Case, sgd

Pick = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.value = nn.Parameter(torch.tensor(0.3))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("weight", torch.rand(5) + 0.5)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pick(self, self.first(x)))


def draw(i: int, rows: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    y = torch.randint(5, (rows,), generator=g)
    y[torch.rand(rows, generator=g) > 0.6] = -100
    y[0] = 1
    return torch.randn(rows, 6, generator=g), y


def loss_of(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def case(pick: Pick, loss_fn: Callable[..., Any] = loss_of, **settings: Any) -> Case:
    return Case(lambda: Model(pick), loss_fn, draw, sgd, settings=settings)


def names_in(step: tb.CompiledStep) -> list[str]:
    return [op.name for op in step._last.original.ops]  # type: ignore[union-attr]


def ops_of(step: tb.CompiledStep, target: object) -> list[Any]:
    return [op for op in step._last.executor.program.ops if op.target is target]  # type: ignore[union-attr]


def few_at_first(i: int) -> tuple[Tensor, Tensor]:
    x, y = draw(i, rows=64)
    return (x * 0 + 0.001, y) if i < 3 else (x, y)
