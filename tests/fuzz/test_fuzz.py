"""Random programs train as in eager, or are refused by an error of takeback's: a short part of run_fuzz.py."""

from __future__ import annotations

import pytest
from drawn_steps import APPLY, HEADS, Recipe, recipes
from hypothesis import HealthCheck, given, settings
from trials import eager, judge

from takeback.compiler.run import kernels
from takeback.compiler.run.inductor import interpret_cluster

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels"),
    pytest.mark.filterwarnings("ignore"),
]
FEW = settings(max_examples=2, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@FEW
@given(recipes())
def test_random_program_trains_as_in_eager(recipe: Recipe) -> None:
    for mode in ("exact", "fast"):
        judge(recipe, mode)


@FEW
@given(recipes())
def test_random_clusters_as_inductor_is_given_them_are_right(recipe: Recipe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cluster", interpret_cluster)
        judge(recipe, "fast", whole=False)


@pytest.mark.slow
@settings(FEW, max_examples=50)
@given(recipes())
def test_many_random_clusters_as_inductor_is_given_them_are_right(recipe: Recipe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compile_cluster", interpret_cluster)
        judge(recipe, "fast", whole=False)


@pytest.mark.slow
@settings(FEW, max_examples=200)
@given(recipes())
def test_many_random_programs_train_as_in_eager(recipe: Recipe) -> None:
    for mode in ("exact", "fast"):
        judge(recipe, mode)


def test_values_and_shapes_that_are_held_may_come_in_another_order() -> None:
    """Found by run_fuzz.py, seed 20004: a chunked loss brings what it needs before what is only read."""
    recipe = Recipe((("places", 0, 1),), (6, 6, 6, 6), "every other")
    assert judge(recipe, "fast") in ("equal", "near")


def test_value_that_is_read_of_what_a_chunked_head_makes_is_held_around_it() -> None:
    """Found by run_fuzz.py, seed 40000: it was taken for one that is the same in every step."""
    recipe = Recipe((("decides", 1, 0),), (6, 6, 6, 6), "every other")
    assert judge(recipe, "fast") in ("equal", "near")


def test_value_that_was_written_in_place_since_is_not_copied_again_by_a_later_cluster() -> None:
    """Found by run_fuzz.py, seed 50000: `shadow` did not know an op again that it had changed itself, and took what was
    made of it for unchanged. In the second microbatch, what the first one's backward has made again is read."""
    recipe = Recipe((("add", 0, 1), ("gru", 0, 1)), (6, 6, 6), "every other", loop="accumulate", autocast=True)
    assert judge(recipe, "fast") in ("equal", "near")


@pytest.mark.slow
@pytest.mark.parametrize("head", sorted(HEADS))
@pytest.mark.parametrize("loop", ["plain", "accumulate", "pending"])
def test_each_head_and_loop_is_part_of_a_program_that_is_not_refused(head: str, loop: str) -> None:
    instructions = (("linear", 0, 0), ("replaced", 3, 2), ("checkpoint", 4, 3))
    recipe = Recipe(instructions, (6, 6, 8, 6), loop=loop, head=head, scaler=loop != "plain", memory="min")
    assert eager(recipe) is not None, "eager refuses this recipe: it proves nothing"
    assert judge(recipe, "exact") == "equal"
    assert judge(recipe, "fast") in ("equal", "near")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(APPLY))
def test_each_instruction_is_part_of_a_program_that_is_not_refused(name: str) -> None:
    """So that the property does not rest on what happened to be drawn, or on refusals."""
    recipe = Recipe((("linear", 0, 0), ("mul", 3, 2), (name, 4, 3)), (6, 6, 3, 6), poison=True, memory="min")
    assert eager(recipe) is not None, "eager refuses this recipe: it proves nothing"
    assert judge(recipe, "exact") == "equal"
    assert judge(recipe, "fast") in ("equal", "near")
