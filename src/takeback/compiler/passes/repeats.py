"""Finds the blocks that a program repeats: runs of ops that come again and again with the same shapes.

A network of many equal layers is chosen for once: what is decided for one copy of a block holds for its neighbours.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from takeback.compiler.program import Argument, Cluster, Op, Program, Region


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op stands in a repetition: the `offset`-th op of the `copy`-th of `copies` equal blocks."""

    run: int
    offset: int
    copy: int
    copies: int


def repeats(program: Program) -> dict[int, Place]:
    """The place of every op that is part of a repetition, by position."""
    return find_runs([_signature(op) for op in program.ops])


def find_runs(signatures: Sequence[Hashable]) -> dict[int, Place]:
    """Repetitions among equal or unequal things: the one that covers most first, the shortest period of equals."""
    numbers: dict[Hashable, int] = {}
    text = np.array([numbers.setdefault(s, len(numbers)) for s in signatures], dtype=np.int64)
    found: list[tuple[int, int, int]] = []  # (ops covered, period, start)
    for period in range(1, len(text) // 2 + 1):
        equal = np.concatenate(([0], (text[:-period] == text[period:]).astype(np.int8), [0]))
        edges = np.flatnonzero(np.diff(equal))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            copies = (int(end - start) + period) // period
            if copies >= 2:
                found.append((copies * period, period, int(start)))
    places: dict[int, Place] = {}
    free = np.ones(len(text), dtype=bool)
    run = 0
    for covered, period, start in sorted(found, key=lambda f: (-f[0], f[1], f[2])):
        if not free[start : start + covered].all():
            continue
        free[start : start + covered] = False
        for at in range(start, start + covered):
            copy, offset = divmod(at - start, period)
            places[at] = Place(run, offset, copy, covered // period)
        run += 1
    return places


def _signature(op: Op) -> Hashable:
    def show(arg: Argument) -> Hashable:
        if isinstance(arg, Region):
            return (arg.dtype, arg.shape, arg.stride)
        if isinstance(arg, tuple):
            return tuple(show(a) for a in arg)
        return repr(arg)

    inputs = tuple(show(a) for a in op.args) + tuple((k, show(v)) for k, v in sorted(op.kwargs.items()))
    name = op.target.key if isinstance(op.target, Cluster) else str(op.target)
    return (name, inputs, tuple(show(r) for r in op.results), op.phase)
