"""What was placed stays, what is new fills the gaps: always a valid plan if the old places are."""

from __future__ import annotations

from hypothesis import given, settings
from random_problems import problems

from takeback.compiler.plan import Item, ItemId, Problem, solve, solve_around, validate


def item(number: int, size_bytes: int, start: int, end: int) -> Item:
    return Item(ItemId(number), size_bytes, start, end)


def test_new_item_takes_the_lowest_gap_and_nothing_moves() -> None:
    old = (item(0, 64, 0, 9), item(1, 64, 0, 9), item(2, 64, 0, 3))
    kept = {ItemId(0): 0, ItemId(1): 128, ItemId(2): 64}
    found = solve_around(Problem((*old, item(3, 8, 4, 6), item(4, 8, 1, 2))), kept)
    assert {i: found.offsets[i] for i in kept} == kept
    assert found.offsets[ItemId(3)] == 64, "item 2 is gone by then"
    assert found.offsets[ItemId(4)] == 192
    assert found.arena_bytes == 256


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems)
def test_what_is_left_out_of_a_valid_plan_is_put_back_validly(problem: Problem) -> None:
    whole = solve(problem)
    packed = {member for pack in problem.packs for member, _ in pack.members}
    kept = {i: o for n, (i, o) in enumerate(whole.offsets.items()) if i in packed or n % 3}
    found = solve_around(problem, kept)
    validate(problem, found)
    assert all(found.offsets[i] == o for i, o in kept.items())
