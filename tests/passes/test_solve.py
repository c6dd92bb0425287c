"""The solver against brute force over every consistent choice, its limits, and what ties may and may not do."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from menus import Recipe, a_second, draft_of, every_choice, height, is_consistent, price, recipes, recorded, written
from torch import nn

from takeback import predict, zoo
from takeback.compiler.layout import lay_out
from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.menu import Menu
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.recompute import Search, planned_peak
from takeback.compiler.passes.solve import _COST_GAP, _PEAK_GAP, WORTH, Solver
from takeback.errors import MemoryTargetError

UNTIED = 1 << 20
MOST = 12  #: unknowns: all choices are tried


def small_menu(recipe: Recipe) -> Menu:
    menu = Menu(draft_of(written(recipe)), a_second)
    assume(menu.rebuild and menu.unknowns <= MOST)
    return menu


def solver_of(menu: Menu, groups: int = UNTIED) -> Solver:
    return Solver(menu, step_seconds=float(len(menu.program.ops)), groups=groups)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


quick = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@quick
@given(recipes)
def test_lowest_peak_is_that_of_brute_force(recipe: Recipe) -> None:
    menu = small_menu(recipe)
    top, ops = max(menu.curve), len(menu.program.ops)

    def worth(ones: frozenset[int]) -> float:
        return height(menu, ones) / top + WORTH * price(menu, ones) / ops

    best = min(map(worth, every_choice(menu)))
    found = solver_of(menu).lowest_peak(float("inf"), deadline=soon())
    assert found is not None
    assert is_consistent(menu, found.ones)
    assert found.peak_bytes == height(menu, found.ones)
    assert found.seconds == pytest.approx(price(menu, found.ones))
    if found.proved:
        assert best - 1e-6 <= worth(found.ones) <= best + _PEAK_GAP + 1e-6


@quick
@given(recipes)
def test_lowest_cost_is_that_of_brute_force_at_every_height(recipe: Recipe) -> None:
    menu = small_menu(recipe)
    choices = [(height(menu, ones), price(menu, ones)) for ones in every_choice(menu)]
    heights = sorted({h for h, _ in choices})
    solver = solver_of(menu)
    for target in (heights[0] - 1, heights[0], heights[len(heights) // 2], heights[-1]):
        costs = [c for h, c in choices if h <= target]
        found = solver.lowest_cost(target, deadline=soon())
        assert (found is None) == (not costs), target
        if found is None:
            continue
        assert is_consistent(menu, found.ones)
        assert found.peak_bytes <= target * (1 + 1e-6)
        if found.proved:
            assert found.seconds <= min(costs) + _COST_GAP * len(menu.program.ops) + 1e-9


@quick
@given(recipes)
def test_budget_for_the_cost_is_kept(recipe: Recipe) -> None:
    menu = small_menu(recipe)
    solver = solver_of(menu)
    for most in (0.0, 1.0, 2.0):
        best = min(height(menu, o) for o in every_choice(menu) if price(menu, o) <= most)
        found = solver.lowest_peak(most, deadline=soon())
        assert found is not None
        assert found.seconds <= most + 1e-6
        if found.proved:
            assert best <= found.peak_bytes <= best + (_PEAK_GAP + 1e-3) * max(menu.curve) + 1


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(recipes)
def test_ties_never_make_a_solution_illegal(recipe: Recipe) -> None:
    """The recipe comes three times over, so that there are copies to tie."""
    draft = draft_of(written(recipe[:5] * 3))
    menu = Menu(draft, a_second)
    assume(menu.rebuild)
    for groups in (1, 2):
        found = solver_of(menu, groups).lowest_peak(float("inf"), deadline=soon(1.0))
        assert found is not None
        assert is_consistent(menu, found.ones)
        lay_out(overwrite(apply(draft, menu.choice(found.ones))))


def test_tied_unknowns_have_one_answer_and_layers_are_tied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())))
    draft = draft_of(recorded(model, lambda m, x: m(x).square().mean(), torch.randn(64, 16)))
    menu = Menu(draft, a_second)
    classes = menu.ties(1)
    assert len(classes) == menu.unknowns
    assert len(set(classes)) < menu.unknowns, "nothing is tied in a network of equal layers"
    assert len(set(menu.ties(1))) <= len(set(menu.ties(2))) <= len(set(menu.ties(6)))
    found = solver_of(menu, 1).lowest_peak(float("inf"), deadline=soon())
    assert found is not None
    answers: dict[int, set[bool]] = {}
    for unknown, cls in enumerate(classes):
        answers.setdefault(cls, set()).add(unknown in found.ones)
    assert all(len(a) == 1 for a in answers.values())


def test_time_limit_of_next_to_nothing_still_gives_a_plan() -> None:
    """A quarter of a second for each of the frontier's levels is the least there is."""
    case = zoo.case("gpt", size="bench", batch=2)
    keep = predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="keep")
    least = predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="min", solve_s=0.2)
    assert least.peak_bytes <= keep.peak_bytes


def test_deadline_that_has_passed_means_nothing_is_rebuilt() -> None:
    case = zoo.case("gpt", batch=2)
    draft = draft_of(recorded(case.model, case.loss_fn, *case.batch))
    search = Search(draft, a_second, limit_s=0.0)
    assert search.lowest() is search.keep
    assert search.frontier() == (search.keep,)
    assert search.keep.peak_bytes == planned_peak(draft)


def test_frontier_falls_in_peak_as_it_rises_in_time() -> None:
    case = zoo.case("gpt", batch=2)
    said: list[str] = []
    draft = draft_of(recorded(case.model, case.loss_fn, *case.batch))
    search = Search(draft, a_second, limit_s=2.0, progress=said.append)
    points = search.frontier()
    assert len(points) > 2
    for a, b in itertools.pairwise(points):
        assert a.peak_bytes > b.peak_bytes
        assert a.added_s < b.added_s
    for p in points:
        changed = apply(draft, p.choice)
        assert planned_peak(changed) == p.peak_bytes
        assert len(changed.program.ops) - len(draft.program.ops) == len(p.choice.rebuilds)
        assert p.added_s == pytest.approx(len(p.choice.rebuilds))
    assert any("lowest peak" in s for s in said)
    assert any("cheapest way" in s for s in said)


def test_target_of_a_byte_is_impossible_with_the_lowest_peak_named() -> None:
    case = zoo.case("mlp")
    with pytest.raises(MemoryTargetError) as caught:
        predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="1B", solve_s=0.5)
    assert caught.value.target_bytes == 1
    assert caught.value.lowest_bytes > 1
