"""Trains the same parameters twice on the same gradients, with an optimizer of takeback.optim and with torch.optim's
fused one, and compares parameters and states bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import takeback as tb
from harness import same_bits
from takeback import optim

Groups = Callable[[Sequence[nn.Parameter]], list[dict[str, Any]]]

OURS = {"SGD": optim.SGD, "Adam": optim.Adam, "AdamW": optim.AdamW}
THEIRS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}

SHAPES: tuple[tuple[int, ...], ...] = ((33, 7), (7,), (), (64, 64), (4, 3, 3, 3), (1000,), (130, 65), (1, 1), (6, 5, 2))

#: Settings of each optimizer that take another way through the arithmetic.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd decay": ("SGD", {"lr": 0.1, "weight_decay": 0.02}),
    "sgd momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "sgd momentum decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}),
    "sgd dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}),
    "sgd nesterov": ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "sgd nesterov decay": ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02}),
    "sgd maximize": ("SGD", {"lr": 0.1, "maximize": True}),
    "sgd momentum maximize": ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "sgd nesterov decay maximize": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02, "maximize": True},
    ),
    "adam": ("Adam", {"lr": 1e-2}),
    "adam decay": ("Adam", {"lr": 1e-2, "weight_decay": 0.02}),
    "adam amsgrad": ("Adam", {"lr": 1e-2, "amsgrad": True}),
    "adam maximize decay": ("Adam", {"lr": 1e-2, "maximize": True, "weight_decay": 0.02}),
    "adamw": ("AdamW", {"lr": 1e-2}),
    "adamw without decay": ("AdamW", {"lr": 1e-2, "weight_decay": 0.0}),
    "adamw betas eps": ("AdamW", {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    "adamw amsgrad": ("AdamW", {"lr": 1e-2, "amsgrad": True}),
    "adamw maximize": ("AdamW", {"lr": 1e-2, "maximize": True}),
}


class Twins:
    """`mine` and `theirs` hold equal parameters; `step` gives both the same gradients."""

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        *,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        device: str = "cpu",
        groups: Groups | None = None,
        grad_dtype: torch.dtype | None = None,
        kernel: str = "auto",
        reference: dict[str, Any] | None = None,
    ) -> None:
        self.random = torch.Generator().manual_seed(7)
        self.mine, self.theirs = [], []
        for i, shape in enumerate(shapes):
            value = torch.randn(shape, generator=self.random).to(dtypes[i % len(dtypes)]).to(device)
            if value.dim() == 4:
                value = value.to(memory_format=torch.channels_last)
            self.mine.append(nn.Parameter(value.clone()))
            self.theirs.append(nn.Parameter(value.clone()))
        self.buf = tb.GradBuffer(self.mine, dtype=grad_dtype)
        self.ours = OURS[name](self.buf, groups(self.mine) if groups else None, **settings, kernel=kernel)
        self.reference = self.fused(name, settings if reference is None else reference, groups)

    def fused(self, name: str, settings: dict[str, Any], groups: Groups | None = None) -> torch.optim.Optimizer:
        low = any(p.dtype.itemsize == 2 and p.device.type == "cpu" for p in self.theirs)
        how = {"fused": True}
        if name == "SGD" and low:
            how = {"foreach": False}  # torch's fused SGD does not update these: pytorch issue 191763
        return THEIRS[name](groups(self.theirs) if groups else self.theirs, **settings, **how)

    def gradients(self, without: Sequence[int] = (), scale: float = 1.0) -> None:
        """New random gradients for both; None for the parameters in `without`."""
        for i, (slot, other) in enumerate(zip(self.buf.slots, self.theirs, strict=True)):
            if i in without:
                slot.param.grad = other.grad = None
                continue
            drawn = (torch.randn(other.shape, generator=self.random) * scale).to(other.device)
            with torch.no_grad():
                slot.view.copy_(drawn)
            slot.param.grad = slot.view
            other.grad = torch.empty_like(other).copy_(slot.view)

    def step(self, without: Sequence[int] = ()) -> None:
        self.gradients(without)
        self.ours.step()
        self.reference.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.check()

    def check(self) -> None:
        """Parameters and states have the same bits, and all state lies in flat tensors."""
        for i, (mine, other) in enumerate(zip(self.mine, self.theirs, strict=True)):
            assert same_bits(mine, other), f"parameter {i}"
            state, expected = self.ours.state.get(mine, {}), self.reference.state.get(other, {})
            assert state.keys() == expected.keys(), f"state of parameter {i}"
            for name, value in expected.items():
                assert same_bits(state[name], value), f"{name} of parameter {i}"
                assert state[name].stride() == value.stride()
        storages = {
            (name, value.untyped_storage().data_ptr())
            for state in self.ours.state.values()
            for name, value in state.items()
        }
        parts = {(p.device, p.dtype) for p in self.mine if self.ours.state.get(p)}
        assert len(storages) == len(parts) * len({name for name, _ in storages})
