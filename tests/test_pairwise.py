"""A covering array covers: every pair of values that may meet does meet, in few cases, the same ones each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pairwise import in_turns, pairwise, quick_ones


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


@pytest.mark.parametrize(
    ("rows", "columns", "each"), [("abcde", [1, 2, 3], 1), ([1, 2], "abcdef", 1), ("abcd", "xyz", 2)]
)
def test_in_turns_keeps_all_cases_and_every_value_has_a_quick_one(
    rows: Sequence[Any], columns: Sequence[Any], each: int
) -> None:
    cases = in_turns(rows, columns, each=each)
    assert [case.values for case in cases] == list(itertools.product(rows, columns))
    quick = [case.values for case in cases if not case.marks]
    assert len(quick) == each * max(len(rows), len(columns))
    assert {row for row, _ in quick} == set(rows)
    assert {column for _, column in quick} == set(columns)


def test_all_but_the_quick_ones_are_slow_and_an_unknown_one_is_refused() -> None:
    assert [bool(case.marks) for case in quick_ones("abc", ["b"])] == [True, False, True]
    with pytest.raises(AssertionError, match="z"):
        quick_ones("abc", ["z"])
