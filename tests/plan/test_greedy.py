"""`solve` places anything validly and deterministically, and training steps within 1 % of the lower bound."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import pytest
from brute_force import broken_rule
from hypothesis import HealthCheck, given, settings
from random_problems import packed_problems, problems
from step_traces import (
    convnet_step,
    early_update_step,
    mixed_step,
    realistic_steps,
    recomputed_step,
    transformer_step,
)

from takeback.compiler.plan import Item, ItemId, Pack, Problem, greedy, lower_bound_bytes, placing, solve, validate

STEPS = dict(realistic_steps(range(8)))
# Eight recomputed segments of six ops, each as high as the peak: greedy ends at 1.028, and two minutes of
# random search over orders only reached 1.021. Kept here so that a better heuristic shows.
HARD_STEP = "recomputed-5"


def item(number: int, size_bytes: int, start: int, end: int) -> Item:
    return Item(ItemId(number), size_bytes, start, end)


def test_items_that_never_live_together_share_their_bytes() -> None:
    solution = solve(Problem((item(0, 100, 0, 2), item(1, 100, 2, 4), item(2, 100, 4, 6))))
    assert solution.arena_bytes == 128
    assert set(solution.offsets.values()) == {0}


def test_items_that_live_together_are_stacked_at_aligned_offsets() -> None:
    solution = solve(Problem((item(0, 100, 0, 2), item(1, 1, 1, 4))))
    assert solution.arena_bytes == 192
    assert abs(solution.offsets[ItemId(0)] - solution.offsets[ItemId(1)]) in (64, 128)


def test_zero_size_items_get_offset_zero_and_occupy_nothing() -> None:
    problem = Problem((item(0, 0, 0, 9), item(1, 64, 0, 9), item(2, 0, 3, 4)))
    solution = solve(problem)
    assert solution.offsets == {0: 0, 1: 0, 2: 0}
    assert solution.arena_bytes == 64


@pytest.mark.parametrize("items", [(), (item(4, 0, 1, 2),)])
def test_nothing_to_place_needs_no_arena(items: tuple[Item, ...]) -> None:
    solution = solve(Problem(items))
    assert solution.arena_bytes == 0
    assert solution.offsets == {i.id: 0 for i in items}


@settings(deadline=None, max_examples=150)
@given(problems)
def test_random_lifetimes_are_placed_validly_between_the_bound_and_the_sum(problem: Problem) -> None:
    solution = solve(problem)
    validate(problem, solution)
    assert broken_rule(problem, solution) is None
    step = problem.alignment_bytes
    assert lower_bound_bytes(problem) <= solution.arena_bytes
    assert solution.arena_bytes <= sum((i.size_bytes + step - 1) // step * step for i in problem.items)


@settings(deadline=None, max_examples=150)
@given(packed_problems)
def test_random_packs_are_placed_validly_and_no_higher_than_everything_piled_up(problem: Problem) -> None:
    solution = solve(problem)
    validate(problem, solution)
    assert broken_rule(problem, solution) is None
    step = problem.alignment_bytes
    assert solution.arena_bytes <= sum((i.size_bytes + step - 1) // step * step for i in problem.items)


@settings(deadline=None, max_examples=100)
@given(packed_problems)
def test_rows_and_columns_give_the_same_places(problem: Problem) -> None:
    with mock.patch.object(greedy, "FEWEST_IN_COLUMNS", 0):
        in_columns = solve(problem)
    assert solve(problem) == in_columns


@pytest.mark.parametrize("kind", [greedy._PlacedRows, lambda: greedy._PlacedColumns(2)])
@pytest.mark.parametrize(("best_fit", "hangs"), [(False, False), (True, False), (True, True)])
def test_a_gap_starts_above_all_rivals_below_it(kind: Callable[[], Any], best_fit: bool, hangs: bool) -> None:
    placed = kind()
    placed.put_(0, 4, 0, 640)
    placed.put_(6, 10, 64, 128)  # never there together with the other: on the same bytes
    offset = placed.lowest_or_best_offset(3, 7, 64, 768, best_fit=best_fit, hangs=hangs)
    assert offset == (704 if hangs else 640)


def test_bytes_of_a_pack_are_free_for_others_outside_of_their_lifetimes() -> None:
    items = (item(0, 64, 4, 8), item(1, 64, 5, 8), item(2, 128, 0, 4), item(3, 64, 4, 5))
    solution = solve(Problem(items, packs=(Pack(((ItemId(0), 0), (ItemId(1), 64))),)))
    assert solution.arena_bytes == 128
    assert solution.offsets[ItemId(1)] == solution.offsets[ItemId(0)] + 64


def test_packs_that_cannot_hang_from_the_bound_are_piled_up() -> None:
    """Two slices that never live together, each as high as the bound."""
    items = (item(0, 64, 0, 2), item(1, 64, 2, 4))
    solution = solve(Problem(items, packs=(Pack(((ItemId(0), 0), (ItemId(1), 64))),)))
    assert solution.arena_bytes == 128


@settings(deadline=None, max_examples=50)
@given(problems)
def test_the_order_in_which_items_are_listed_changes_nothing(problem: Problem) -> None:
    reversed_problem = Problem(problem.items[::-1], problem.alignment_bytes)
    assert solve(problem) == solve(reversed_problem)


@pytest.mark.parametrize("name", [name for name in STEPS if name != HARD_STEP])
def test_training_steps_are_placed_within_one_percent_of_the_bound(name: str) -> None:
    problem = STEPS[name]
    solution = solve(problem)
    validate(problem, solution)
    assert solution.arena_bytes <= 1.01 * lower_bound_bytes(problem)


def test_the_hard_training_step_stays_within_five_percent_of_the_bound() -> None:
    solution = solve(STEPS[HARD_STEP])
    validate(STEPS[HARD_STEP], solution)
    assert solution.arena_bytes <= 1.05 * lower_bound_bytes(STEPS[HARD_STEP])


@pytest.mark.parametrize(
    "make",
    [
        lambda: mixed_step(1, ops=600),
        lambda: transformer_step(1, layers=48),
        lambda: convnet_step(1, blocks=80),
        lambda: recomputed_step(1, segments=24, ops=18),
        lambda: early_update_step(1, ops=600),
    ],
    ids=["mixed", "transformer", "convnet", "recomputed", "early-update"],
)
def test_large_training_steps_are_placed_within_one_percent_of_the_bound(make: Callable[[], Problem]) -> None:
    problem = make()
    assert len(problem.items) > 2_000
    solution = solve(problem)
    validate(problem, solution)
    assert solution.arena_bytes <= 1.01 * lower_bound_bytes(problem)


def test_promotion_reaches_the_bound_where_no_plain_order_does(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = STEPS["recomputed-6"]
    promoted = solve(problem)
    monkeypatch.setattr(greedy, "_promote", lambda table, order, sticking_out: order)
    plain = solve(problem)
    assert lower_bound_bytes(problem) == promoted.arena_bytes < plain.arena_bytes


def test_the_work_of_the_search_is_bounded_for_random_lifetimes(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(0)
    items = []
    for number in range(400):
        start = draw.randrange(200)
        items.append(item(number, draw.randrange(1, 10**6), start, start + draw.randrange(1, 60)))
    attempts: list[greedy._Attempt] = []
    place = greedy._place

    def counted(table: greedy._Table, strategy: greedy._Strategy, *, give_up_at: int | None) -> greedy._Attempt:
        attempts.append(place(table, strategy, give_up_at=give_up_at))
        return attempts[-1]

    monkeypatch.setattr(greedy, "_place", counted)
    monkeypatch.setattr(greedy, "MOST_PLACEMENTS", 2_000)
    problem = Problem(tuple(items))
    validate(problem, solve(problem))
    assert len(attempts) > 3
    assert sum(attempt.placements for attempt in attempts) < 2_000 + len(items)


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> placing.PlaceFunction:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    library = tmp_path_factory.mktemp("placing") / "placing.so"
    subprocess.run(["g++", str(placing.SOURCE), "-o", str(library), *placing.FLAGS], check=True)
    return placing.opened(library)


@given(problem=problems | packed_problems)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_loop_in_cpp_gives_what_the_loop_in_python_gives(in_cpp: placing.PlaceFunction, problem: Problem) -> None:
    with mock.patch.object(greedy, "FEWEST_IN_NATIVE", 1):
        assert solve(problem, lambda: in_cpp) == solve(problem)


@pytest.mark.parametrize("name", sorted(STEPS)[::5])
def test_the_loop_in_cpp_places_whole_steps_alike(in_cpp: placing.PlaceFunction, name: str) -> None:
    assert solve(STEPS[name], lambda: in_cpp) == solve(STEPS[name])
