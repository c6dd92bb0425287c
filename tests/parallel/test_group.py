"""compile_step(group=) gives what DistributedDataParallel gives: bit for bit on two ranks, within 1e-6 on four."""

from __future__ import annotations

import pytest
from ranks import FINE, run_ranks

TWO = [
    "buckets_in_any_order",
    "plain",
    "batch_norm",
    "in_clusters",
    "own_step",
    "accumulated_and_clipped",
    "accumulated_over_calls",
    "parts_and_dtypes",
    "unused",
    "unused_with_own_step",
    "uneven",
    "verified",
    "held",
    "streamed",
    "frozen",
    "extended",
    "part_of_the_parameters",
    "other_models",
    "refused_options",
    "ranks_agree",
    "a_target_is_out_of_reach",
    "a_rank_fails",
    "a_rank_is_caught_by_its_proof",
]
LAST = "a_rank_dies"
FOUR = ["plain", "accumulated_and_clipped", "unused"]
FOUR_MORE = ["uneven", "ranks_agree"]
IN_TROUBLE = ["a_rank_fails", "a_rank_hangs"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(2, "scenarios", [*TWO, LAST], tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(4, "scenarios", FOUR, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def four_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(4, "scenarios", FOUR_MORE, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module", params=[2, 4])
def in_trouble(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(request.param, "scenarios", [*IN_TROUBLE, LAST], tmp_path_factory.mktemp("trouble"))


@pytest.mark.parametrize("scenario", TWO)
def test_two_ranks(two: dict[str, list[str]], scenario: str) -> None:
    assert two[scenario] == [FINE, FINE], "\n".join(two[scenario])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", FOUR)
def test_four_ranks(four: dict[str, list[str]], scenario: str) -> None:
    assert four[scenario] == [FINE] * 4, "\n".join(four[scenario])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", FOUR_MORE)
def test_four_ranks_as_two(four_more: dict[str, list[str]], scenario: str) -> None:
    assert four_more[scenario] == [FINE] * 4, "\n".join(four_more[scenario])


def test_the_other_rank_is_told_when_one_dies(two: dict[str, list[str]]) -> None:
    assert two[LAST] == [FINE, "gone"], two[LAST][0]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", IN_TROUBLE)
def test_ranks_that_wait_for_one_in_trouble_are_told(in_trouble: dict[str, list[str]], scenario: str) -> None:
    assert not any(in_trouble[scenario]), "\n".join(in_trouble[scenario])


@pytest.mark.slow
def test_ranks_that_wait_for_a_dead_one_are_told(in_trouble: dict[str, list[str]]) -> None:
    first, gone, *others = in_trouble[LAST]
    assert gone == "gone"
    assert not any((first, *others)), "\n".join((first, *others))
