"""What becomes of a slice when a backward raises half-way.

torch adds a leaf's gradient into `.grad` when all of it is there; a Function of ours writes each part into the slice as
it is computed. A backward that raises between two parts of a tied weight must not leave the first: `Unfinished` tells
each slot that was written and never completed, before the error reaches whoever called the backward.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from takeback.engine import at_end_of_backward, backward_id


class Written(Protocol):
    """Who is told."""

    def abandoned(self, backward: int) -> None:
        """That backward has raised before all of the gradient was there."""


class Unfinished:
    """One running backward. The engine alone holds it: it calls it at the end, and after an error only drops it."""

    __slots__ = ("__weakref__", "_backward", "_slots")

    def __init__(self, backward: int) -> None:
        self._backward = backward
        self._slots: dict[int, Written] = {}

    def add(self, slot: Written) -> None:
        self._slots[id(slot)] = slot

    def drop(self, slot: Written) -> None:
        """All of its gradient is there."""
        self._slots.pop(id(slot), None)

    def __call__(self) -> None:
        self._slots.clear()

    def __del__(self) -> None:
        for slot in getattr(self, "_slots", {}).values():  # none where Ctrl-C struck on the way into __init__
            slot.abandoned(self._backward)


_RUNNING: weakref.WeakValueDictionary[int, Unfinished] = weakref.WeakValueDictionary()


def now_running() -> tuple[int, Unfinished]:
    """The backward that this is called in, and its number."""
    number = backward_id()
    found = _RUNNING.get(number)
    if found is None:
        found = _RUNNING[number] = Unfinished(number)
        at_end_of_backward(found)
    return number, found


def completed(slot: Written) -> int:
    """AccumulateGrad has run for the slot's parameter. Gives the number of the backward."""
    number = backward_id()
    found = _RUNNING.get(number)
    if found is not None:
        found.drop(slot)
    return number
