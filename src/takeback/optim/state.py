"""Optimizer state in flat tensors, each parameter's a view that torch.optim's `state[p]` can hold.

In: the slots of a GradBuffer that are optimised. Out: a `Part` for each (flat gradient, parameter dtype), in which
every name of state ("exp_avg", ...) is one flat tensor, laid out by flat.py in the order of the slots, and
the step counts are one more. Guaranteed: a view has its parameter's shape, strides and dtype, as torch's own state has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from takeback.errors import OptionError
from takeback.flat import lay_out
from takeback.grads import GradBuffer, Slot

NAMES = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""The state there is. What else a user may keep in `state[p]` stays as it is."""

State = MutableMapping[Any, dict[str, Any]]  # torch.optim's: parameter -> name -> value


class Part:
    """The state of some parameters of one dtype whose gradients are in one flat tensor."""

    def __init__(self, flat_grad: Tensor, dtype: torch.dtype, slots: tuple[Slot, ...]) -> None:
        self.flat_grad, self.dtype, self.slots = flat_grad, dtype, slots
        self.device: torch.device = flat_grad.device
        layout = lay_out([(slot.numel, dtype) for slot in slots])
        self.offsets = tuple(place.start for place in layout.slices)
        self.size = sum(layout.numels)
        self.steps = torch.zeros(len(slots), dtype=torch.float32, device=self.device)
        self.flats: dict[str, Tensor] = {}

    def flat(self, name: str) -> Tensor:
        """The flat state of that name, made where there is none yet."""
        if name not in self.flats:
            self.flats[name] = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        return self.flats[name]

    def view(self, i: int, name: str) -> Tensor:
        """The state of slot i."""
        if name == "step":
            return self.steps[i]
        param = self.slots[i].param
        return self.flat(name).as_strided(param.shape, param.stride(), self.offsets[i])

    def owns(self, value: Tensor) -> bool:
        storage = value.untyped_storage().data_ptr()
        return any(storage == mine.untyped_storage().data_ptr() for mine in (self.steps, *self.flats.values()))


class FlatState:
    """All parts, and where each parameter is in them."""

    def __init__(self, buffer: GradBuffer, slots: Iterable[Slot]) -> None:
        members: dict[tuple[int, torch.dtype], list[Slot]] = {}
        for slot in slots:
            members.setdefault((slot.flat, slot.param.dtype), []).append(slot)
        self.parts = tuple(
            Part(buffer.flats[flat], dtype, tuple(members[flat, dtype]))
            for flat, dtype in sorted(members, key=lambda key: (key[0], str(key[1])))
        )
        self.places: Mapping[int, tuple[Part, int]] = {
            id(slot.param): (part, i) for part in self.parts for i, slot in enumerate(part.slots)
        }

    def start_(self, param: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Zeros for a parameter that has no state yet."""
        part, i = self.places[id(param)]
        views = {name: part.view(i, name) for name in names}
        for view in views.values():
            view.zero_()
        return views

    def adopt_(self, state: State) -> None:
        """Copies what is in `state` into the flat tensors, and puts the views in its place. Raises before it changes
        anything."""
        foreign: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        for param, entries in state.items():
            if id(param) not in self.places:
                continue
            part, i = self.places[id(param)]
            for name, value in entries.items():
                if isinstance(value, Tensor) and name in NAMES:
                    view = part.view(i, name)
                    if value.shape != view.shape:
                        raise OptionError(
                            f"the {name} of {part.slots[i].name} has shape {tuple(value.shape)}, and should have "
                            f"{tuple(view.shape)}: this state is of another model, or its parameters are in another "
                            f"order."
                        )
                    if not _same(value, view):
                        # What lies in a flat tensor at another place may be overwritten before it is read.
                        foreign.append((entries, name, view, value.clone() if self._owns(value) else value))
        for entries, name, view, value in foreign:
            view.copy_(value)
            entries[name] = view

    def _owns(self, value: Tensor) -> bool:
        return any(part.owns(value) for part in self.parts)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(
        a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
    )
