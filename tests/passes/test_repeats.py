"""Repetitions are found in hand-made and in random sequences, and every place that is given is a true one."""

from __future__ import annotations

import random

import pytest
import torch
from drawn_programs import recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from takeback.compiler.passes.repeats import Place, find_runs, repeats


def assert_true(text: str | list[int], places: dict[int, Place]) -> None:
    """Within a run, copies lie one after the other, and equal offsets hold equal things."""
    runs: dict[int, list[tuple[int, Place]]] = {}
    for at, place in sorted(places.items()):
        runs.setdefault(place.run, []).append((at, place))
    for members in runs.values():
        start = members[0][0]
        copies = members[0][1].copies
        assert copies >= 2
        period, rest = divmod(len(members), copies)
        assert rest == 0
        assert [at for at, _ in members] == list(range(start, start + len(members)))
        for at, place in members:
            assert divmod(at - start, period) == (place.copy, place.offset)
            assert text[at] == text[start + place.offset]
    assert sorted(runs) == list(range(len(runs)))


@pytest.mark.parametrize(
    ("text", "covered", "copies"),
    [
        ("", 0, 0),
        ("a", 0, 0),
        ("ab", 0, 0),
        ("aa", 2, 2),
        ("abab", 4, 2),
        ("xabcabcabcy", 9, 3),
        ("abcabca", 6, 2),  # the last one is cut off
        ("aaaaaa", 6, 6),  # the shortest period of those that cover as much
        ("abcdefg", 0, 0),
    ],
)
def test_hand_made_repetition_is_found(text: str, covered: int, copies: int) -> None:
    places = find_runs(text)
    assert len(places) == covered
    assert {p.copies for p in places.values()} == ({copies} if copies else set())
    assert_true(text, places)


def test_longest_repetition_is_taken_first_and_others_beside_it() -> None:
    places = find_runs("abcdabcdabcd" + "--" + "xyxy")
    assert_true("abcdabcdabcd--xyxy", places)
    assert {places[i].run for i in range(12)} == {0}
    assert {places[i].run for i in range(14, 18)} == {1}
    assert places[5] == Place(0, 1, 1, 3)


def test_forward_and_backward_of_equal_layers_are_two_runs() -> None:
    text = "in" + "fgh" * 4 + "loss" + "HGF" * 4 + "up"
    places = find_runs(text)
    assert_true(text, places)
    assert places[2].run != places[2 + 12 + 4].run
    assert places[2].copies == places[2 + 12 + 4].copies == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=60))
def test_every_place_in_a_random_sequence_is_true(text: list[int]) -> None:
    places = find_runs(text)
    assert_true(text, places)
    assert places == find_runs([f"another {n}" for n in text]), "names matter"


@pytest.mark.parametrize("seed", range(5))
def test_planted_repetition_is_covered_as_far_as_it_goes(seed: int) -> None:
    rng = random.Random(seed)
    block = [rng.randrange(1000) for _ in range(rng.randrange(2, 20))]
    copies = rng.randrange(2, 8)
    text = [-1, *block * copies, -2, -3]
    places = find_runs(text)
    assert_true(text, places)
    assert len(places) >= len(block) * copies


def test_long_sequences_are_searched_without_regard_to_what_they_hold() -> None:
    assert len(find_runs([0] * 1500)) == 1500
    assert find_runs(range(1500)) == {}


def test_layers_of_another_width_are_no_copies_but_equal_ones_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU())), nn.Linear(8, 5), nn.GELU()
    )
    program = recorded(model, lambda m, x: m(x).square().mean(), torch.randn(16, 8))
    places = repeats(program)
    forward = [i for i, op in enumerate(program.ops) if op.name == "gelu"]
    assert [places[i].copy for i in forward[:4]] == [0, 1, 2, 3]
    assert forward[4] not in places or places[forward[4]].run != places[forward[0]].run
