"""GradBuffer on many processes gives what DistributedDataParallel gives, alone and under it: bit for bit on two ranks
where the local gradients have the same bits, within 1e-6 on four. What would be silently wrong is an error."""

from __future__ import annotations

import pytest
from ranks import FINE, run_ranks

TWO = [
    "like_ddp",
    "other_gradients",
    "sent_during_the_backward",
    "unused",
    "nothing_used",
    "two_losses",
    "several_threads",
    "uneven",
    "accumulated",
    "no_sync_alone",
    "clipped",
    "wider_gradients",
    "bare_parameters",
    "group_at_the_call",
    "first_backward_at_the_call",
    "under_ddp",
    "unused_under_ddp",
    "bucket_views",
    "bucket_views_unseen",
    "not_both",
    "fully_sharded",
    "too_early",
    "twice",
    "assigned",
    "other_models",
    "refused_groups",
    "a_rank_fails",
    "a_rank_fails_in_its_backward",
    "a_rank_never_comes",
]
LAST = "a_rank_dies"
FOUR = ["like_ddp", "unused", "uneven", "accumulated"]
FOUR_MORE = ["other_gradients", "no_sync_alone", "halves", "under_ddp"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(2, "buffer_scenarios", [*TWO, LAST], tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(4, "buffer_scenarios", FOUR, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def four_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_ranks(4, "buffer_scenarios", FOUR_MORE, tmp_path_factory.mktemp("four"))


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
