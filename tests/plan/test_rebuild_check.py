"""`check_answer` accepts every answer that can be carried out below its peak, and catches every planted fault."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_rebuild_problems import answer_of, every_choice, is_right, problem_of, rebuild_problems, unknowns

import takeback.compiler.plan
from takeback.compiler.plan.rebuild_check import check_answer
from takeback.compiler.plan.rebuild_problem import (
    RebuildAnswer,
    RebuildProblem,
    RebuildUnit,
    RebuildValue,
    UnitId,
    ValueId,
)
from takeback.compiler.plan.rebuild_rows import RebuildRows, Row
from takeback.compiler.plan.rebuild_solve import Effort, RebuildSolver
from takeback.errors import PlanError

HIGH = 1 << 30
LONG = Effort(1000, float("inf"))
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def is_caught(problem: RebuildProblem, answer: RebuildAnswer) -> bool:
    try:
        check_answer(problem, answer)
    except PlanError:
        return True
    return False


@quick
@given(rebuild_problems, st.randoms(use_true_random=False))
def test_choice_is_caught_if_and_only_if_something_is_read_that_is_not_there(
    problem: RebuildProblem, rng: Random
) -> None:
    choices = list(every_choice(problem))
    for carried, rebuilt in rng.sample(choices, min(len(choices), 60)):
        answer = answer_of(problem, carried, rebuilt, HIGH)
        assert is_caught(problem, answer) == (not is_right(problem, carried, rebuilt))


@quick
@given(rebuild_problems)
def test_rules_of_the_rows_are_what_the_walk_finds(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    for carried, rebuilt in every_choice(problem):
        ones = rows.ones(answer_of(problem, carried, rebuilt, 0))
        consistent = all(ones & set(r.those) for r in rows.rules if r.that is None or r.that in ones)
        assert consistent == is_right(problem, carried, rebuilt)


@quick
@given(rebuild_problems)
def test_no_right_choice_rises_above_its_rows(problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    for carried, rebuilt in every_choice(problem):
        if is_right(problem, carried, rebuilt):
            check_answer(problem, rows.answer(rows.ones(answer_of(problem, carried, rebuilt, 0))))


# -- one problem by hand -------------------------------------------------------------------------------------

# op            0    1    2    3    4    5
# value 0      make  use                use?   8 bytes
# value 1            make use      ... use     20 bytes, may be rebuilt from value 0


def example() -> tuple[RebuildProblem, RebuildAnswer]:
    """Value 1 is dropped over the peak at op 3 and rebuilt before op 5 from value 0, which is carried."""
    zero, one = ValueId(0), ValueId(1)
    problem = RebuildProblem(
        (
            RebuildValue(zero, 8, ((0, 1),), (5,), overwritten=True),
            RebuildValue(one, 20, ((1, 2), (5, 5)), (5,), UnitId(1)),
        ),
        (RebuildUnit(UnitId(1), (1,), (zero,), (one,), 7, 1, 2),),
        {5: (UnitId(1),)},
        (0, 0, 0, 100, 0, 0),
        (0, 0, 0, 0, 0, 80),
        1000,
    )
    rows = RebuildRows(problem)
    return problem, rows.answer(frozenset({rows.carry[zero, 5], rows.run[UnitId(1), 5]}))


def test_example_is_accepted_with_the_peak_while_it_rebuilds() -> None:
    problem, answer = example()
    assert answer.peak_bytes == 80 + 8 + 20 + 1 + 2
    assert answer.cost_ns == 7
    check_answer(problem, answer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: replace(a, carried=frozenset()), "Unit 1 is rebuilt before op 5 from value 0, but that was neither"),
        (lambda a: replace(a, rebuilt=frozenset(), cost_ns=0), "Op 5 reads value 1, but it was neither"),
        (lambda a: replace(a, peak_bytes=110), "111 bytes are alive while unit 1 is rebuilt before op 5, above"),
        (lambda a: replace(a, cost_ns=6), "takes 7 ns, not 6"),
        (lambda a: replace(a, carried=a.carried | {(ValueId(0), 4)}), "carried to op 4, which is no stop"),
        (lambda a: replace(a, rebuilt=a.rebuilt | {(UnitId(1), 4)}), "before op 4, where the problem has none"),
    ],
)
def test_fault_in_the_example_is_named(change: Callable[[RebuildAnswer], RebuildAnswer], message: str) -> None:
    problem, answer = example()
    with pytest.raises(PlanError, match=message):
        check_answer(problem, change(answer))


def test_value_that_is_carried_on_beside_the_result_that_takes_its_bytes_counts_there() -> None:
    problem, answer = example()
    crowded = replace(problem, during_bytes=(0, 90, 0, 0, 0, 0), before_bytes=(0,) * 6)
    with pytest.raises(PlanError, match="126 bytes are alive during op 1"):  # value 0 twice, value 1, and 90
        check_answer(crowded, replace(answer, peak_bytes=125))
    check_answer(crowded, replace(answer, peak_bytes=126))


def test_value_carried_from_where_it_is_not_is_caught() -> None:
    value = RebuildValue(ValueId(0), 4, ((0, 0),), (2, 4), UnitId(0))
    problem = RebuildProblem(
        (value,),
        (RebuildUnit(UnitId(0), (0,), (), (ValueId(0),), 1),),
        {2: (UnitId(0),), 4: (UnitId(0),)},
        (0,) * 5,
        (0,) * 5,
        1,
    )
    with pytest.raises(PlanError, match="Value 0 is carried on from op 2, but it was neither"):
        check_answer(problem, RebuildAnswer(frozenset({(ValueId(0), 4)}), frozenset(), 9, 0))
    check_answer(problem, RebuildAnswer(frozenset({(ValueId(0), 4)}), frozenset({(UnitId(0), 2)}), 9, 1))


# -- faults in what the solver is given ----------------------------------------------------------------------


class Faulty(RebuildRows):
    """Rows with one fault, as a wrong builder would make them."""

    def __init__(self, problem: RebuildProblem, fault: str) -> None:
        super().__init__(problem)
        self._fault = fault
        if fault == "rule":
            asked = [r for r in self.rules if r.that is not None] or list(self.rules)
            self.rules = tuple(r for r in self.rules if r != asked[-1])
        self.op_rows = tuple(map(self._spoiled, self.op_rows))

    def run_row(self, name: UnitId, stop: int) -> Row:
        return self._spoiled(super().run_row(name, stop))

    def _spoiled(self, row: Row) -> Row:
        if self._fault == "term" and row.terms:
            return replace(row, terms=row.terms[1:])
        return replace(row, fixed_bytes=row.fixed_bytes - 1) if self._fault == "bytes" else row


@pytest.mark.parametrize("fault", ["rule", "term", "bytes"])
def test_answer_from_rows_with_a_fault_is_caught_where_it_is_wrong(fault: str) -> None:
    """Not every lost rule or term shows in the answer; what shows is caught, and much does."""
    caught = wrong = 0
    for seed in range(60):
        problem = problem_of(seed)
        if not unknowns(problem)[1]:
            continue
        faulty = Faulty(problem, fault)
        found = RebuildSolver(faulty, groups=1 << 20).lowest_peak(None, LONG).answer
        assert found is not None
        honest = RebuildRows(problem)
        right = is_right(problem, found.carried, found.rebuilt)
        low = found.peak_bytes < honest.answer(honest.ones(found)).peak_bytes
        wrong += not right or low
        caught += is_caught(problem, found)
        if not right:
            assert is_caught(problem, found)
        if right and not low:
            assert not is_caught(problem, found)
    assert wrong >= 10, "the fault does no harm: this shows nothing"
    assert caught >= 0.8 * wrong


@pytest.mark.parametrize("fault", ["drop a carry", "drop a rebuild"])
@quick
@given(problem=rebuild_problems)
def test_answer_that_lost_something_is_caught_if_it_was_needed(fault: str, problem: RebuildProblem) -> None:
    rows = RebuildRows(problem)
    found = RebuildSolver(rows, groups=1 << 20).lowest_peak(None, LONG).answer
    assert found is not None
    check_answer(problem, found)
    for lost in sorted(found.carried if fault == "drop a carry" else found.rebuilt):
        carried = found.carried - {lost} if fault == "drop a carry" else found.carried
        rebuilt = found.rebuilt - {lost} if fault == "drop a rebuild" else found.rebuilt
        less = answer_of(problem, carried, rebuilt, HIGH)
        assert is_caught(problem, less) == (not is_right(problem, carried, rebuilt))


def test_checker_imports_nothing_of_the_solver_or_the_rows() -> None:
    source = Path(takeback.compiler.plan.__file__).with_name("rebuild_check.py").read_text(encoding="utf-8")
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("takeback")} == {
        "takeback.errors",
        "takeback.compiler.plan.rebuild_problem",
    }
