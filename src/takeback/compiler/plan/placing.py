"""The inner loop of plan/greedy.py in C++: an order of items in, their offsets out, as the loop in Python gives them.

Who has a compiler builds `SOURCE` with `FLAGS` and opens it (layout.py does); without one greedy.py runs its own loop:
the same plans, later.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).parent / "native" / "placing.cpp"
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden")

Ints = NDArray[np.int64]
PlaceFunction = Callable[..., int]  #: tb_place of the library


@dataclass(frozen=True)
class Placing:
    """What one order came to."""

    offsets: Ints
    arena_bytes: int
    sticking_out: Ints
    placed: int  #: fewer than there are where it gave up


@dataclass(frozen=True)
class Placer:
    """Places items of these sizes and lifetimes."""

    function: PlaceFunction
    sizes: Ints
    starts: Ints
    ends: Ints

    def place(
        self,
        order: Ints,
        pinned: Ints,
        hangs: NDArray[np.uint8],
        *,
        offsets: Ints,
        best_fit: bool,
        ceiling: int,
        give_up_at: int | None,
    ) -> Placing:
        """`pinned` are placed first, at their `offsets`; then the others in their order."""
        all_items = np.ascontiguousarray(np.concatenate((pinned, order)) if len(pinned) else order, dtype=np.int64)
        found = np.array(offsets, dtype=np.int64)
        out, counts, _ = self._scratch
        counts[:] = 0
        tables, scratch = self._addresses
        arena_bytes = self.function(
            *(*tables, all_items.ctypes.data, len(pinned), len(all_items), hangs.ctypes.data, int(best_fit), ceiling),
            *(-1 if give_up_at is None else give_up_at, found.ctypes.data, *scratch),
        )
        placed, sticking_out = counts.tolist()
        return Placing(found, int(arena_bytes), out[:sticking_out].copy(), placed)

    @functools.cached_property
    def _scratch(self) -> tuple[Ints, Ints, Ints]:
        """For what sticks out, for two counts, and for what is placed already: one call's after the other."""
        number = len(self.sizes)
        return np.empty(number, dtype=np.int64), np.zeros(2, dtype=np.int64), np.empty((number, 4), dtype=np.int64)

    @functools.cached_property
    def _addresses(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the tables, and of the scratch: to ask an array for its address takes longer than to place an item."""
        tables = (self.sizes, self.starts, self.ends)
        return tuple(a.ctypes.data for a in tables), tuple(a.ctypes.data for a in self._scratch)


def opened(path: Path) -> PlaceFunction:
    """The function of a library that was built. Raises `OSError` if it cannot be opened."""
    function = ctypes.PyDLL(str(path)).tb_place
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    function.restype = int64
    function.argtypes = [*(4 * [pointer]), int64, int64, pointer, *(3 * [int64]), *(4 * [pointer])]
    found: PlaceFunction = function
    return found
