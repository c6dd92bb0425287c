"""Axes of a test's parameters in, a few cases out: every two values of two different axes meet in some case.

Most faults show with one setting or with two together, so a full cube repeats itself: 4 x 4 x 4 x 4 x 4 cases hold 1,024
combinations of all, and 160 pairs, which about 24 cases cover. The choice is greedy and deterministic: the same axes
give the same cases, so a case that fails keeps its id.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Case = tuple[Any, ...]
Pair = tuple[int, int, int, int]  # (axis, value, later axis, value), by position


def pairwise(*axes: Sequence[Any], where: Callable[..., bool] | None = None) -> list[Case]:
    """Cases that cover every pair of values; the first takes the first value of each axis, if `where` allows it.
    `where(*case)` says which combinations exist: pairs that are in none of these are not asked for."""
    places = itertools.product(*(range(len(axis)) for axis in axes))
    cases = [place for place in places if where is None or where(*_values(axes, place))]
    pairs = {case: _pairs(case) for case in cases}
    missing = set().union(*pairs.values())
    chosen: list[tuple[int, ...]] = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))  # the first of equals
        missing -= pairs[best]
        chosen.append(best)
    if not missing and len(axes) == 1:
        chosen = cases  # nothing to pair with: every value once
    return [_values(axes, place) for place in sorted(chosen)]


def _values(axes: Sequence[Sequence[Any]], place: tuple[int, ...]) -> Case:
    return tuple(axis[i] for axis, i in zip(axes, place, strict=True))


def _pairs(place: tuple[int, ...]) -> frozenset[Pair]:
    return frozenset((a, i, b, j) for (a, i), (b, j) in itertools.combinations(enumerate(place), 2))
