"""The solver against brute force over every choice, its limits, what ties do, and that it repeats itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from long_steps import digest, long_step
from random_rebuild_problems import answer_of, every_choice, is_right, problem_of, rebuild_problems, unknowns

from takeback.compiler.plan.rebuild_check import check_answer
from takeback.compiler.plan.rebuild_greedy import answer_with, cheapest_first, with_less
from takeback.compiler.plan.rebuild_problem import (
    RebuildAnswer,
    RebuildProblem,
    RebuildUnit,
    RebuildValue,
    UnitId,
    ValueId,
    kept_bytes,
)
from takeback.compiler.plan.rebuild_rows import RebuildRows
from takeback.compiler.plan.rebuild_solve import COST_GAP, PEAK_GAP, WORTH, Effort, RebuildSolver

UNTIED = 1 << 20
LONG = Effort(10_000, float("inf"))
quick = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def right_answers(rows: RebuildRows) -> Iterator[RebuildAnswer]:
    for carried, rebuilt in every_choice(rows.problem):
        if is_right(rows.problem, carried, rebuilt):
            yield rows.answer(rows.ones(answer_of(rows.problem, carried, rebuilt, 0)))


@quick
@given(rebuild_problems)
def test_lowest_peak_is_that_of_brute_force(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    top = max(kept_bytes(problem))

    def worth(answer: RebuildAnswer) -> float:
        return answer.peak_bytes / top + WORTH * answer.cost_ns / problem.step_ns

    found = RebuildSolver(rows, groups=UNTIED).lowest_peak(None, LONG)
    assert found.answer is not None
    assert found.proved
    assert not found.struck
    check_answer(problem, found.answer)
    best = min(map(worth, right_answers(rows)))
    assert best - 1e-6 <= worth(found.answer) <= best + PEAK_GAP + 1e-6


@quick
@given(rebuild_problems)
def test_lowest_cost_is_that_of_brute_force_at_every_height(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    answers = list(right_answers(rows))
    heights = sorted({a.peak_bytes for a in answers})
    solver = RebuildSolver(rows, groups=UNTIED)
    for target in (heights[0] - 1, heights[0], heights[len(heights) // 2], heights[-1]):
        costs = [a.cost_ns for a in answers if a.peak_bytes <= target]
        found = solver.lowest_cost(target, LONG)
        assert found.proved
        assert (found.answer is None) == (not costs), target
        if found.answer is not None:
            check_answer(problem, found.answer)
            assert found.answer.peak_bytes <= target
            assert min(costs) <= found.answer.cost_ns <= min(costs) + COST_GAP * problem.step_ns + 1e-6


@quick
@given(rebuild_problems)
def test_budget_for_the_cost_is_kept(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    answers = list(right_answers(rows))
    solver = RebuildSolver(rows, groups=UNTIED)
    for most_ns in (0, 5, 12):
        best = min((a.peak_bytes for a in answers if a.cost_ns <= most_ns), default=None)
        found = solver.lowest_peak(most_ns, LONG).answer
        assert (found is None) == (best is None)
        if found is not None:
            assert found.cost_ns <= most_ns


@quick
@given(rebuild_problems)
def test_answer_to_begin_with_is_never_made_worse_and_one_that_is_too_high_is_not_used(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    kept = answer_with(rows, ())
    solver = RebuildSolver(rows, groups=UNTIED)
    lowest = solver.lowest_peak(None, LONG, kept).answer
    assert lowest is not None
    assert solver.lowest_cost(kept.peak_bytes, Effort(1, float("inf")), kept).answer == kept
    below = solver.lowest_cost(lowest.peak_bytes, LONG, kept).answer
    assert below is not None
    assert below.peak_bytes <= lowest.peak_bytes


# -- limits --------------------------------------------------------------------------------------------------


def test_same_problem_has_the_same_answer_however_little_effort_is_made() -> None:
    problem = long_step(8)
    for visits in (1, 3, 10, 40):
        first, second = (
            RebuildSolver(RebuildRows(problem), groups=UNTIED).lowest_peak(None, Effort(visits, float("inf")))
            for _ in range(2)
        )
        assert first.answer is None or digest(first.answer) == digest(second.answer)
        assert first == second
        if first.answer is not None:
            check_answer(problem, first.answer)


def test_effort_of_a_few_visits_is_no_proof_and_says_so() -> None:
    rows = RebuildRows(long_step(12))
    short = RebuildSolver(rows, groups=UNTIED).lowest_peak(None, Effort(1, float("inf")), answer_with(rows, ()))
    assert short.answer is not None
    assert not short.proved
    assert not short.struck


def test_guard_that_has_passed_strikes_and_leaves_what_was_known() -> None:
    rows = RebuildRows(long_step(12))
    kept = answer_with(rows, ())
    found = RebuildSolver(rows, groups=UNTIED).lowest_peak(None, Effort(1000, 0.0), kept)
    assert found.struck
    assert not found.proved
    assert found.answer == kept


def test_tied_unknowns_have_one_answer() -> None:
    problem = long_step(6)
    rows = RebuildRows(problem)
    assert len(set(rows.families(1))) < len(set(rows.families(2))) < len(set(rows.families(UNTIED))) <= rows.unknowns
    for groups in (1, 2):
        found = RebuildSolver(rows, groups=groups).lowest_peak(None, LONG)
        assert found.answer is not None
        check_answer(problem, found.answer)
        ones = rows.ones(found.answer)
        answers: dict[int, set[bool]] = {}
        for unknown, family in enumerate(rows.families(groups)):
            answers.setdefault(family, set()).add(unknown in ones)
        assert all(len(a) == 1 for a in answers.values())


# -- without a search ----------------------------------------------------------------------------------------


@quick
@given(rebuild_problems)
def test_cheapest_first_is_right_and_keeps_its_budget(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    check_answer(problem, answer_with(rows, ()))
    for most_ns in (0, 3, 8, None):
        for answer in cheapest_first(rows, most_ns):
            assert answer.rebuilt
            assert most_ns is None or answer.cost_ns <= most_ns
            check_answer(problem, answer)


def test_cheapest_first_grows_and_lowers_the_peak_of_a_long_step() -> None:
    rows = RebuildRows(long_step(8))
    kept = answer_with(rows, ())
    found = cheapest_first(rows)
    assert len(found) == 4
    assert [len(a.rebuilt) for a in found] == sorted(len(a.rebuilt) for a in found)
    assert found[-1].peak_bytes < 0.8 * kept.peak_bytes
    assert kept.peak_bytes == max(kept_bytes(rows.problem))


@quick
@given(rebuild_problems)
def test_answer_with_less_is_right_and_within_its_room(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    classes = rows.families(1)
    for answer in right_answers(rows):
        for room in (answer.peak_bytes - 1, answer.peak_bytes, max(kept_bytes(problem))):
            for tied in (None, classes):
                found = with_less(rows, answer, room, tied)
                check_answer(problem, found)
                assert found.cost_ns <= answer.cost_ns
                assert found.peak_bytes <= room or found == answer
                assert found.rebuilt <= answer.rebuilt


def test_answer_with_less_leaves_out_what_costs_most_for_its_size_and_what_only_that_needed() -> None:
    rows = RebuildRows(long_step(8))
    lowest = RebuildSolver(rows, groups=UNTIED).lowest_peak(None, LONG).answer
    assert lowest is not None
    kept = answer_with(rows, ())
    assert with_less(rows, lowest, kept.peak_bytes).rebuilt == frozenset(), "there is room for all"
    costs = []
    for part in range(9):
        room = lowest.peak_bytes + (kept.peak_bytes - lowest.peak_bytes) * part // 8
        best = RebuildSolver(rows, groups=UNTIED).lowest_cost(room, LONG).answer
        assert best is not None
        costs.append(with_less(rows, lowest, room).cost_ns)
        assert costs[-1] <= 1.25 * best.cost_ns + COST_GAP * rows.problem.step_ns, part
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 5


# -- problems that are none ----------------------------------------------------------------------------------


def test_some_drawn_problems_are_worth_rebuilding_in() -> None:
    drawn = [p for p in map(problem_of, range(200)) if unknowns(p)[1]]
    rows = [RebuildRows(p) for p in drawn]
    lower = [
        r
        for r in rows
        if min(a.peak_bytes for a in (cheapest_first(r) or [answer_with(r, ())])) < max(kept_bytes(r.problem))
    ]
    assert len(lower) > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": ()}, "unit 1|1"),
        ({"before_bytes": (0,)}, "6 ops, but 1 moments"),
        ({"chains": {5: (UnitId(1), UnitId(1))}}, "not in order"),
        ({"chains": {1: (UnitId(1),)}}, "cannot be rebuilt at stop 1"),
    ],
)
def test_problem_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    value = RebuildValue(ValueId(0), 4, ((1, 2), (5, 5)), (5,), UnitId(1))
    unit = RebuildUnit(UnitId(1), (1,), (), (ValueId(0),), 1)
    problem = RebuildProblem((value,), (unit,), {5: (UnitId(1),)}, (0,) * 6, (0,) * 6, 1)
    with pytest.raises((ValueError, KeyError), match=message):
        replace(problem, **change)  # type: ignore[arg-type]
