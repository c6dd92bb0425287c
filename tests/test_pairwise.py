"""A covering array covers: every pair of values that may meet does meet, in few cases, the same ones each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pairwise import pairwise


def met(cases: Sequence[tuple[Any, ...]]) -> set[tuple[int, Any, int, Any]]:
    return {(a, case[a], b, case[b]) for case in cases for a, b in itertools.combinations(range(len(case)), 2)}


@pytest.mark.parametrize(
    "axes",
    [
        ([1, 2], ["a", "b"]),
        ([1, 2, 3], ["a", "b"], [None, True]),
        ([1, 2, 3, 4],) * 5,
        ([1], [2], [3]),
        ([0, 1],) * 8,
    ],
    ids=str,
)
def test_every_two_values_meet_and_no_case_comes_twice(axes: tuple[Sequence[Any], ...]) -> None:
    cases = pairwise(*axes)
    assert met(cases) == met(list(itertools.product(*axes)))
    assert len(set(cases)) == len(cases)


def test_a_cube_of_1024_takes_less_than_thirty_cases() -> None:
    assert 16 <= len(pairwise(*([range(4)] * 5))) < 30


def test_one_axis_gives_each_of_its_values_once() -> None:
    assert pairwise("abc") == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("where", [lambda a, b, c: a != b, lambda a, b, c: a + b + c < 4])
def test_cases_that_do_not_exist_are_left_out_and_the_rest_still_meets(where: Callable[..., bool]) -> None:
    axes = ([0, 1, 2],) * 3
    cases = pairwise(*axes, where=where)
    assert all(where(*case) for case in cases)
    assert met(cases) == met([case for case in itertools.product(*axes) if where(*case)])


def test_same_axes_give_the_same_cases() -> None:
    axes = (["x", "y", "z"], [1.5, 2.5], [True, False], "pqrs")
    assert pairwise(*axes) == pairwise(*axes)
