"""One model twice: trained by `step(*batch, update=False)`, and by the loop of backwards that a user writes in eager.

After every call loss, `.grad`, parameters, buffers, the optimizer's state and the random state are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import takeback as tb
from harness import assert_same, gradients_of, same, state_of

Optimizer = torch.optim.Optimizer
Microbatch = tuple[Any, ...]


class Words(nn.Module):
    """Embeddings that are also the output layer, over sequences of any length; a part that not every batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8, padding_idx=0)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.extra = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, extra: bool) -> Tensor:
        x = self.drop(self.mix(self.embed(tokens)).relu())
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.extra(x) if extra else x
        return x @ self.embed.weight.T


def words_loss(model: nn.Module, tokens: Tensor, extra: bool = False) -> Tensor:
    logits = model(tokens, extra)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0, reduction="sum")


def tokens(seed: int, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(1, 24, (rows, length), generator=generator)
    made[0, length // 2 :] = 0
    return made


def words(
    lengths: Sequence[int], *, extra: Callable[[int], bool] = lambda n: False, first: int = 0
) -> list[Microbatch]:
    return [(tokens(first + n, 3, length), extra(n)) for n, length in enumerate(lengths)]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adagrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)  # one whose own step() is called


@dataclass
class Twins:
    """One model twice. `accumulate` trains both for one update, and compares."""

    build: Callable[[], nn.Module] = Words
    loss_fn: Callable[..., Any] = words_loss
    make: Callable[[nn.Module], Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(self.build())
            self.optimizers.append(self.make(self.models[-1]))
        self.clip_norm = self.options.get("clip_norm")
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
        self.scales = self.options.pop("scales", False)
        more = {"scaler": self.scalers[0]} if self.scales else {}
        self.step = tb.compile_step(
            self.models[0], self.loss_fn, self.optimizers[0], **{"memory": "keep", **more, **self.options}
        )
        self.calls = 0

    def compare(self, when: str, *, grads: bool = True) -> None:
        ours, eager = self.models
        assert_same(state_of(ours, self.optimizers[0]), state_of(eager, self.optimizers[1]), when)
        if grads:
            assert_same(gradients_of(ours), gradients_of(eager), when)
        assert self.scalers[0].get_scale() == self.scalers[1].get_scale()

    def backward(self, batch: Microbatch, *, seed: int) -> Tensor:
        torch.manual_seed(seed)
        out = self.loss_fn(self.models[1], *batch)
        loss = out[0] if isinstance(out, tuple) else out
        (self.scalers[1].scale(loss) if self.scales else loss).backward()
        return loss.detach()

    def eager_update(self, divide: Any = None) -> Tensor | None:
        parameters = [p for p in self.models[1].parameters() if p.grad is not None]
        for p in parameters if divide is not None else ():
            p.grad /= divide
        if self.scales and self.clip_norm is not None:
            self.scalers[1].unscale_(self.optimizers[1])
        norm = nn.utils.clip_grad_norm_(parameters, self.clip_norm) if self.clip_norm is not None else None
        if self.scales:
            self.scalers[1].step(self.optimizers[1])
            self.scalers[1].update()
        else:
            self.optimizers[1].step()
        return norm

    def add(self, batch: Microbatch, **asks: Any) -> None:
        """One call with `update=False`."""
        self.calls += 1
        torch.manual_seed(self.calls)
        loss = self.step(*batch, update=False, **asks)
        drawn = torch.get_rng_state()
        assert same(loss, self.backward(batch, seed=self.calls)), f"loss of call {self.calls}"
        assert torch.equal(drawn, torch.get_rng_state()), f"random state after call {self.calls}"
        self.compare(f"after call {self.calls}")

    def accumulate(self, batches: Sequence[Microbatch], divide: Any = None) -> None:
        for batch in batches[:-1]:
            self.add(batch)
        self.last(batches[-1], divide)

    def last(self, batch: Microbatch, divide: Any = None) -> None:
        """The call with the update."""
        self.calls += 1
        torch.manual_seed(self.calls)
        loss = self.step(*batch, **({} if divide is None else {"divide": divide}))
        assert same(loss, self.backward(batch, seed=self.calls)), f"loss of call {self.calls}"
        norm = self.eager_update(divide)
        if norm is not None:
            assert self.step.grad_norm is not None
            assert same(self.step.grad_norm, norm)
        if not self.options.get("keep_grads"):
            assert gradients_of(self.models[0]) == {}
        self.compare(f"after call {self.calls}, an update", grads=bool(self.options.get("keep_grads")))
        self.models[1].zero_grad()
