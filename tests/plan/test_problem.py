"""A `Problem` refuses nonsense when it is built, quoting it; the lower bound is the peak of live bytes."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from random_problems import problems

from takeback.compiler.plan import Item, ItemId, Pack, Problem, lower_bound_bytes


def item(number: int, size_bytes: int, start: int, end: int) -> Item:
    return Item(ItemId(number), size_bytes, start, end)


@pytest.mark.parametrize(
    ("items", "alignment_bytes", "message"),
    [
        ((item(7, -5, 0, 1),), 64, "item 7 has a negative size: -5 bytes"),
        ((item(7, 5, 3, 3),), 64, r"item 7 has the lifetime \[3, 3\)"),
        ((item(7, 5, 3, 2),), 64, r"item 7 has the lifetime \[3, 2\)"),
        ((item(7, 5, -1, 2),), 64, r"item 7 has the lifetime \[-1, 2\)"),
        ((item(7, 5, 0, 2), item(7, 9, 4, 5)), 64, "two items have the id 7"),
        ((), 48, "power of two, got 48"),
        ((), 0, "power of two, got 0"),
        ((), -64, "power of two, got -64"),
    ],
)
def test_problem_refuses_nonsense_and_quotes_it(items: tuple[Item, ...], alignment_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(items, alignment_bytes)


@pytest.mark.parametrize(
    ("packs", "message"),
    [
        (((3, 0),), "item 3 is packed, but is not there"),
        (((2, 0),), "item 2 is packed, but is not there, or has no bytes"),
        (((1, 0), (1, 64)), "item 1 is packed twice"),
        (((1, 32),), "item 1 is packed at 32 bytes, which is no multiple of 64"),
        (((1, -64),), "item 1 is packed at -64 bytes"),
    ],
)
def test_problem_refuses_a_pack_that_makes_no_sense(packs: tuple[tuple[int, int], ...], message: str) -> None:
    pack = Pack(tuple((ItemId(number), distance) for number, distance in packs))
    with pytest.raises(ValueError, match=message):
        Problem((item(1, 5, 0, 1), item(2, 0, 0, 1)), packs=(pack,))


def test_problem_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        item(0, 1, 0, 1).size_bytes = 2  # type: ignore[misc]


def test_lower_bound_rounds_every_size_up_to_the_alignment() -> None:
    items = (item(0, 1, 0, 2), item(1, 65, 1, 3))
    assert lower_bound_bytes(Problem(items, 64)) == 64 + 128
    assert lower_bound_bytes(Problem(items, 1)) == 66


def test_lower_bound_does_not_add_items_that_only_touch_in_time() -> None:
    assert lower_bound_bytes(Problem((item(0, 64, 0, 2), item(1, 128, 2, 3)))) == 128


def test_lower_bound_of_nothing_is_zero() -> None:
    assert lower_bound_bytes(Problem(())) == 0


@settings(deadline=None)
@given(problems)
def test_lower_bound_is_the_largest_sum_over_all_moments(problem: Problem) -> None:
    def aligned(size_bytes: int) -> int:
        while size_bytes % problem.alignment_bytes:
            size_bytes += 1
        return size_bytes

    moments = range(40)
    live = [sum(aligned(i.size_bytes) for i in problem.items if i.start <= t < i.end) for t in moments]
    assert lower_bound_bytes(problem) == max(live)


def test_plan_and_borrow_check_never_import_torch() -> None:
    root = Path(__file__).parents[2] / "src" / "takeback" / "compiler"
    for path in (*(root / "plan").glob("*.py"), root / "ownership" / "borrow.py"):
        names = [n for node in ast.walk(ast.parse(path.read_text())) for n in _imported(node)]
        assert not [n for n in names if n.split(".")[0] == "torch"], path
        allowed = ("takeback.compiler.plan", "takeback.errors")
        assert not [n for n in names if n.startswith("takeback.") and not n.startswith(allowed)], path


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
