"""Every fault that is injected into a valid plan, and that changes what the step gives, is rejected before the plan
runs; what is accepted is shown harmless by running it in poison mode.

This is a small part, of five plans. `make trust` runs all of it: 21 kinds, 34 plans, more than 11,000 faults.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import byte_tags
import pytest
import torch
from judging import KINDS, AnyMutant, Verdict, rejection
from mutant import moved, owners_of, span_of
from plans_to_break import RECIPES, Subject, group_of_one, made
from run_mutations import count_, inject

from takeback.compiler.layout import propose

EACH = 7  #: of a kind, in each plan
FEW = 3  #: of the kinds that catch no planted fault (tests/faults/faults.py); a slow test has all of them
CATCHING = re.findall(
    r"test_no_harmful_fault_is_accepted\[(.*)\]", (Path(__file__).parents[1] / "faults/faults.py").read_text()
)


@pytest.fixture(scope="module")
def _one_thread() -> Iterator[None]:
    """A fork has no others: a product in two of them would wait for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def subjects(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Subject]]:
    with group_of_one(tmp_path_factory.mktemp("group")) as group:
        yield [made(recipe, group) for recipe in RECIPES if recipe.quick]


@pytest.mark.parametrize("kind", KINDS)
def test_no_harmful_fault_is_accepted(kind: str, subjects: list[Subject]) -> None:
    assert_caught(kind, subjects, EACH if kind in CATCHING else FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CATCHING])
def test_none_of_more_harmful_faults_is_accepted(kind: str, subjects: list[Subject]) -> None:
    assert_caught(kind, subjects, EACH)


def assert_caught(kind: str, subjects: list[Subject], each: int) -> None:
    counts: collections.Counter[str] = collections.Counter()
    missed: list[str] = []

    def watch(kind: str, subject: Subject, mutant: AnyMutant, verdict: Verdict) -> None:
        count_(counts, verdict)
        if verdict.missed:
            missed.append(f"{subject.name}: {mutant.what}: {verdict.harm}")

    for subject in subjects:
        inject(kind, subject, Random(f"quick {kind} {subject.name}"), each, watch, tries=3)
    assert not missed
    assert counts["caught"] == counts["harmful"] > each // 2


def test_valid_plans_are_accepted_and_run_with_eagers_bits(subjects: list[Subject]) -> None:
    for subject in subjects:
        assert rejection(subject, subject.layout) is None
        assert subject.run(subject.layout) is None


def test_oracle_finds_no_harm_in_the_same_program_at_other_places(subjects: list[Subject]) -> None:
    for subject in [s for s in subjects if not s.is_streamed]:
        layout = subject.layout
        up = {b: layout.placed.offsets[b] + 640 for b in owners_of(layout)}
        higher = moved(layout, up)
        requests = tuple(
            tuple(
                replace(r, offset_bytes=r.offset_bytes + 640) if r.result is None and r.offset_bytes >= 0 else r
                for r in asked
            )
            for asked in higher.placed.requests
        )
        size = layout.placed.size_bytes + 640
        higher = replace(higher, arena=replace(higher.placed, size_bytes=size, requests=requests))
        for same in (higher, propose(layout.draft)):
            assert byte_tags.left_behind(same) == byte_tags.left_behind(layout)
            assert rejection(subject, same) is None


def test_oracle_and_a_real_run_find_a_value_that_lies_on_another(subjects: list[Subject]) -> None:
    subject = subjects[0]
    layout = subject.layout
    size = layout.program.buffers
    [loss] = {layout.owners[r.buffer] for r in layout.program.returned if r.buffer in layout.owners}
    start, end = span_of(layout, loss)
    later = next(b for b in owners_of(layout) if start < span_of(layout, b)[0] < end and size[b].size_bytes <= 64)
    broken = moved(layout, {later: layout.placed.offsets[loss]})
    assert byte_tags.left_behind(broken)["returned 0"] != byte_tags.left_behind(layout)["returned 0"]
    assert rejection(subject, broken) is not None
    assert subject.run(broken) is not None


def test_the_folder_of_this_file_has_a_mutator_for_every_kind_of_the_table() -> None:
    here = Path(__file__).parent
    breaking = "\n".join(path.read_text() for path in here.glob("break_*.py"))
    assert all(f"def {mutator.__name__}(" in breaking for mutator in KINDS.values())
