"""Attributes that a forward sets to a tensor of its own: a value of the step under a name that outlives it. The old
`weight_norm` and `spectral_norm` of torch do so before each forward, and models that replace a buffer (`self.ema =
0.9 * self.ema + ...`) where others write it in place.

In: modules. Out: their derived attributes, each with a tensor of its own, the holder, which stands there between steps
and takes the value that eager would have left. So a plan knows the module by the same tensor in every step, and what is
written to it is part of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_HOLDERS: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Derived:
    """One such attribute."""

    module: torch.nn.Module
    name: str

    @property
    def _table(self) -> dict[str, Any]:
        buffers: dict[str, Any] = self.module._buffers
        return buffers if self.name in buffers else self.module.__dict__

    @property
    def _holder(self) -> torch.Tensor:
        return _HOLDERS[self.module][self.name]

    def write_(self) -> None:
        """Writes to the holder what a forward has put there, and puts the holder back."""
        now = self._table[self.name]
        if now is not self._holder and _have_one_form(self._holder, now):
            self._holder.copy_(now.detach())
            self.put_back_()

    def put_back_(self) -> None:
        """Puts the holder back, with the value that it has."""
        self._table[self.name] = self._holder

    def settle_(self) -> None:
        """Puts a holder there, with the value that is there now."""
        holders = _HOLDERS.setdefault(self.module, {})
        now, holder = self._table[self.name], holders.get(self.name)
        if now is holder or not isinstance(now, torch.Tensor):
            return
        if holder is None or not _have_one_form(holder, now):
            holder = holders[self.name] = now.detach().clone()
        else:
            holder.copy_(now.detach())
        self._table[self.name] = holder


def derived_of(modules: Iterable[torch.nn.Module]) -> tuple[Derived, ...]:
    """The derived attributes of these modules, as far as they are known; checked on 2.11 and 2.13."""
    return tuple(dict.fromkeys(found for module in modules for found in _of(module)))


def _of(module: torch.nn.Module) -> Iterator[Derived]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm) and isinstance(module.__dict__.get(hook.name), torch.Tensor):
            yield Derived(module, hook.name)
    for name in _HOLDERS.get(module, {}):
        if isinstance(module._buffers.get(name), torch.Tensor):
            yield Derived(module, name)


def settle_(derived: Iterable[Derived]) -> None:
    for attribute in derived:
        attribute.settle_()


def put_holders_back_(derived: Iterable[Derived]) -> None:
    for attribute in derived:
        attribute.put_back_()


class Buffers:
    """The registered buffers of modules, as they are now."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._then = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]

    def replaced(self) -> tuple[Derived, ...]:
        """Those in whose place is another tensor of the same form now, which carries no graph into the next step."""
        return tuple(
            Derived(module, name)
            for module, name, then in self._then
            if (now := module._buffers.get(name)) is not then and _have_one_form(then, now) and not now.requires_grad
        )

    def put_back_(self) -> None:
        for module, name, then in self._then:
            if name in module._buffers:
                module._buffers[name] = then


def _have_one_form(one: torch.Tensor, other: object) -> bool:
    """Whether a holder of the one can take the other."""
    return isinstance(other, torch.Tensor) and (one.shape, one.dtype, one.device, one.layout) == (
        *(other.shape, other.dtype, other.device, other.layout),
    )
