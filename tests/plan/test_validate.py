"""The validator accepts exactly the valid solutions: every kind of injected fault is caught, no other."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from brute_force import broken_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import packed_problems, problems
from step_traces import convnet_step

import takeback.compiler.plan
from takeback.compiler.plan import Item, ItemId, Pack, Problem, Solution, solve, validate
from takeback.errors import PlanError

A, B = ItemId(1), ItemId(2)
PROBLEM = Problem((Item(A, 100, 0, 4), Item(B, 50, 2, 6)))
GOOD = Solution({A: 0, B: 128}, 178, "by hand")


def test_a_good_solution_passes() -> None:
    validate(PROBLEM, GOOD)


def test_items_that_only_touch_in_time_or_in_bytes_pass() -> None:
    problem = Problem((Item(A, 64, 0, 2), Item(B, 64, 2, 4), Item(ItemId(3), 64, 0, 4)))
    validate(problem, Solution({A: 0, B: 0, ItemId(3): 64}, 128, "by hand"))


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        (Solution({A: 0}, 178, ""), r"Item 2 \(50 bytes alive during \[2, 6\)\) has no offset"),
        (Solution({A: 0, B: 128, ItemId(9): 0}, 178, ""), "offset for item 9, which the problem lacks"),
        (Solution({A: -64, B: 128}, 178, ""), r"Item 1 \(bytes \[-64, 36\) during \[0, 4\)\) starts below"),
        (Solution({A: 0, B: 100}, 178, ""), r"Item 2 \(bytes \[100, 150\) .* unaligned .* multiple of 64"),
        (Solution({A: 0, B: 128}, 177, ""), r"Item 2 \(bytes \[128, 178\) .* beyond the arena of 177 bytes"),
        (Solution({A: 0, B: 128}, -1, ""), "negative size: -1 bytes"),
        (
            Solution({A: 0, B: 64}, 178, ""),
            r"Item 1 \(bytes \[0, 100\) during \[0, 4\)\) and "
            r"Item 2 \(bytes \[64, 114\) during \[2, 6\)\) overlap in time and in bytes",
        ),
        (
            Solution({A: 0, B: 0}, 178, ""),
            r"Item 1 \(bytes \[0, 100\) .* Item 2 \(bytes \[0, 50\) .* overlap",
        ),
    ],
)
def test_each_fault_is_named_with_items_lifetimes_and_bytes(solution: Solution, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(PROBLEM, solution)


def test_a_torn_pack_is_named_with_where_the_item_must_be() -> None:
    packed = replace(PROBLEM, packs=(Pack(((A, 0), (B, 192))),))
    validate(packed, Solution({A: 64, B: 256}, 306, "by hand"))
    with pytest.raises(PlanError, match=r"Pack 0 is torn: item 2 is at 256, and it must be at 192"):
        validate(packed, Solution({A: 0, B: 256}, 306, "by hand"))


def shift_an_offset(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    item = draw.choice(problem.items)
    moved = solution.offsets[item.id] + draw.choice([-1, 1, -problem.alignment_bytes, problem.alignment_bytes])
    return problem, replace(solution, offsets={**solution.offsets, item.id: moved})


def drop_an_item(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    dropped = draw.choice(problem.items).id
    kept = {item_id: offset for item_id, offset in solution.offsets.items() if item_id != dropped}
    return problem, replace(solution, offsets=kept)


def invent_an_item(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    return problem, replace(solution, offsets={**solution.offsets, ItemId(10_000 + draw.randrange(9)): 0})


def extend_a_lifetime(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    position = draw.randrange(len(problem.items))
    item = problem.items[position]
    if draw.random() < 0.5:
        longer = replace(item, end=item.end + draw.randint(1, 8))
    else:
        longer = replace(item, start=max(0, item.start - draw.randint(1, 8)))
    items = (*problem.items[:position], longer, *problem.items[position + 1 :])
    return replace(problem, items=items), solution


def grow_a_size(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    position = draw.randrange(len(problem.items))
    larger = replace(problem.items[position], size_bytes=problem.items[position].size_bytes + draw.randint(1, 90))
    items = (*problem.items[:position], larger, *problem.items[position + 1 :])
    return replace(problem, items=items), solution


def shrink_the_arena(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    return problem, replace(solution, arena_bytes=max(0, solution.arena_bytes - draw.randint(1, 80)))


def swap_two_offsets(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    one, other = draw.choice(problem.items).id, draw.choice(problem.items).id
    swapped = {one: solution.offsets[other], other: solution.offsets[one]}
    return problem, replace(solution, offsets={**solution.offsets, **swapped})


def tear_a_pack(problem: Problem, solution: Solution, draw: Random) -> tuple[Problem, Solution]:
    """One packed item moves alone, to the top of an arena that has room for it."""
    members = [member for pack in problem.packs for member, _ in pack.members]
    if not members:
        return problem, solution
    torn, step = draw.choice(members), problem.alignment_bytes
    top = -(-solution.arena_bytes // step) * step
    size_bytes = next(item.size_bytes for item in problem.items if item.id == torn)
    return problem, replace(solution, offsets={**solution.offsets, torn: top}, arena_bytes=top + size_bytes)


Fault = Callable[[Problem, Solution, Random], tuple[Problem, Solution]]
FAULTS: list[Fault] = [
    shift_an_offset,
    drop_an_item,
    invent_an_item,
    extend_a_lifetime,
    grow_a_size,
    shrink_the_arena,
    swap_two_offsets,
]


def is_caught(problem: Problem, solution: Solution) -> bool:
    try:
        validate(problem, solution)
    except PlanError:
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
@settings(deadline=None, max_examples=60)
@given(problem=problems.filter(lambda problem: len(problem.items) > 0), seed=st.integers(0, 2**20))
def test_a_fault_is_caught_if_and_only_if_it_breaks_a_rule(fault: Fault, problem: Problem, seed: int) -> None:
    faulty, solution = fault(problem, solve(problem), Random(seed))
    assert is_caught(faulty, solution) == (broken_rule(faulty, solution) is not None)


@pytest.mark.parametrize("fault", [*FAULTS, tear_a_pack])
@settings(deadline=None, max_examples=10)
@given(problem=packed_problems.filter(lambda problem: len(problem.packs) > 0), seed=st.integers(0, 2**20))
def test_a_fault_among_packs_is_caught_if_and_only_if_it_breaks_a_rule(
    fault: Fault, problem: Problem, seed: int
) -> None:
    faulty, solution = fault(problem, solve(problem), Random(seed))
    assert is_caught(faulty, solution) == (broken_rule(faulty, solution) is not None)


def breaks_a_rule(problem: Problem, solution: Solution) -> bool:
    """`broken_rule` by comparing pairs, because a real step has too many bytes to paint."""
    if solution.offsets.keys() != {item.id for item in problem.items}:
        return True
    placed = [(solution.offsets[item.id], item) for item in problem.items]
    if any(at % problem.alignment_bytes or at + item.size_bytes > solution.arena_bytes for at, item in placed):
        return True
    return any(at < 0 for at, _ in placed) or any(
        one.start < other.end
        and other.start < one.end
        and at < other_at + other.size_bytes
        and other_at < at + one.size_bytes
        for position, (at, one) in enumerate(placed)
        for other_at, other in placed[:position]
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_a_training_step_are_caught_and_not_all_are_harmless(fault: Fault) -> None:
    problem = convnet_step(0, blocks=4)
    solution = solve(problem)
    assert not breaks_a_rule(problem, solution)
    draw = Random(7)
    harmful = 0
    for _ in range(60):
        faulty_problem, faulty_solution = fault(problem, solution, draw)
        harm = breaks_a_rule(faulty_problem, faulty_solution)
        assert is_caught(faulty_problem, faulty_solution) == harm
        harmful += harm
    assert harmful >= 10


def test_validator_imports_nothing_of_the_solver() -> None:
    source = Path(takeback.compiler.plan.__file__).with_name("validate.py").read_text(encoding="utf-8")
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("takeback")} == {
        "takeback.errors",
        "takeback.compiler.plan.problem",
    }
