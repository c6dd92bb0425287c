"""Axes of a test's parameters in, a few cases out. Which these are depends on the axes alone, so a case keeps its id.

Most faults show with one setting or with two together, so a full cube repeats itself: five axes of four values have
1,024 combinations, and 160 pairs, which about 24 cases cover (`pairwise`). Of two long axes the pairs are the whole
cube: there every value meets a few of the other axis, in turns, and the rest is for `make test-all` (`in_turns`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

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
    if len(axes) == 1:
        chosen = cases  # nothing to pair with: every value once
    return [_values(axes, place) for place in sorted(chosen)]


def _values(axes: Sequence[Sequence[Any]], place: tuple[int, ...]) -> Case:
    return tuple(axis[i] for axis, i in zip(axes, place, strict=True))


def _pairs(place: tuple[int, ...]) -> frozenset[Pair]:
    return frozenset((a, i, b, j) for (a, i), (b, j) in itertools.combinations(enumerate(place), 2))


def in_turns(first: Iterable[Any], second: Iterable[Any], *, each: int = 1) -> list[Any]:
    """All combinations of two axes for `pytest.mark.parametrize`, of which each value of the longer axis has `each`
    quick ones, and the values of the shorter take turns; the others are marked slow."""
    rows, columns = list(first), list(second)
    if len(rows) >= len(columns):
        quick = {(i, (i * each + k) % len(columns)) for i in range(len(rows)) for k in range(each)}
    else:
        quick = {((j * each + k) % len(rows), j) for j in range(len(columns)) for k in range(each)}
    return [
        pytest.param(row, column, marks=() if (i, j) in quick else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def quick_ones(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All values for `pytest.mark.parametrize`; those that are not among `quick` are marked slow."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, f"{unknown} is not among {values}"
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
