"""Attributes that torch's old `weight_norm` and `spectral_norm` set before each forward: a value of the step under a
name that outlives it.

In: modules. Out: their derived attributes, each with a tensor of its own, the holder, which stands there between steps
and takes the value that eager would have left. So a plan knows the module by the same tensor in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

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
    def holder(self) -> torch.Tensor:
        return _HOLDERS[self.module][self.name]

    @property
    def is_new(self) -> bool:
        """Whether a forward has put another tensor there since it was settled."""
        return self.module.__dict__[self.name] is not self.holder

    def detached(self) -> torch.Tensor:
        """What is there now, without the graph that it came from."""
        return self.module.__dict__[self.name].detach()

    def settle_(self) -> None:
        """Puts the holder there, with the value that is there now."""
        holders = _HOLDERS.setdefault(self.module, {})
        now, holder = self.module.__dict__[self.name], holders.get(self.name)
        if now is holder:
            return
        if holder is None or (holder.shape, holder.dtype, holder.device) != (now.shape, now.dtype, now.device):
            holder = holders[self.name] = now.detach().clone()
        else:
            holder.copy_(now.detach())
        self.module.__dict__[self.name] = holder


def derived_of(modules: Iterable[torch.nn.Module]) -> tuple[Derived, ...]:
    """The derived attributes of these modules; checked on 2.11 and 2.13."""
    return tuple(
        Derived(module, hook.name)
        for module in modules
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm | SpectralNorm) and isinstance(module.__dict__.get(hook.name), torch.Tensor)
    )


def settle_(derived: Iterable[Derived]) -> None:
    for attribute in derived:
        attribute.settle_()
