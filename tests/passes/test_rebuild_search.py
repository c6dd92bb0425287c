"""The search for what to rebuild: every goal, what it says of itself, that it is made once, and that it repeats."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from drawn_programs import a_second, draft_of, recorded

from takeback import predict, zoo
from takeback.compiler.passes import recompute as recompute_module
from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.recompute import (
    Below,
    Chooser,
    Keep,
    Lowest,
    Search,
    Within,
    planned_peak,
    recompute,
)
from takeback.compiler.plan.rebuild_problem import RebuildAnswer, RebuildProblem
from takeback.compiler.plan.rebuild_solve import RebuildSolver, SolverOutcome
from takeback.errors import MemoryTargetError

LIMIT_S = 600.0  #: a guard that does not strike


@pytest.fixture(scope="module")
def draft() -> Draft:
    torch.manual_seed(0)
    case = zoo.case("gpt", batch=2)
    return draft_of(recorded(case.model, case.loss_fn, *case.batch))


@pytest.fixture(scope="module")
def search(draft: Draft) -> Search:
    """One for all tests that only look: it remembers what it found."""
    found = Search(draft, a_second, LIMIT_S)
    found.frontier()
    return found


def test_frontier_falls_in_peak_as_it_rises_in_time(draft: Draft, search: Search) -> None:
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


def test_goals_are_met(draft: Draft, search: Search) -> None:
    points = search.frontier()
    assert search.point(Keep()) is search.keep
    assert search.point(Lowest()) == search.lowest()
    assert search.point(Within(0.05)).added_s <= 0.05 * search.step_s
    for wanted in points:
        assert search.point(Below(wanted.peak_bytes)) == wanted
    lowest = points[-1]
    assert search.point(Below(lowest.peak_bytes - 1)) == lowest, "where nothing is below, the lowest there is"
    assert search.point(Below(1 << 60)) is search.keep


def test_pass_runs_for_every_goal_and_searches_once(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Draft] = []
    honest = Search.__init__

    def counted(self: Search, *args: object, **kwargs: object) -> None:
        made.append(draft)
        honest(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Search, "__init__", counted)
    chooser = Chooser(a_second, LIMIT_S)
    assert recompute(draft, goal=Keep(), chooser=chooser) is draft
    assert not made
    same = replace(draft, program=replace(draft.program))  # as the passes before would make it again
    room = int(0.8 * planned_peak(draft))
    once, twice = (
        recompute(draft, goal=Below(room), chooser=chooser),
        recompute(same, goal=Below(room), chooser=chooser),
    )
    assert planned_peak(once) <= room
    assert once.program.ops == twice.program.ops
    assert len(made) == 1
    shorter = replace(draft, program=replace(draft.program, ops=draft.program.ops[:-1]))
    chooser.search(shorter)
    assert len(made) == 2, "another program is another search"


def test_every_answer_that_is_used_is_checked(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[RebuildAnswer] = []
    honest = recompute_module.check_answer

    def watched(problem: RebuildProblem, answer: RebuildAnswer) -> None:
        checked.append(answer)
        honest(problem, answer)

    monkeypatch.setattr(recompute_module, "check_answer", watched)
    found = Search(draft, a_second, LIMIT_S).lowest(0.03)
    assert found.added_s > 0
    assert found.added_s in [a.cost_ns / 1e9 for a in checked]


def assert_repeats(first: Search, again: Search) -> None:
    assert again.frontier() == first.frontier()
    assert again.lowest(0.05) == first.lowest(0.05)
    assert again.notes == first.notes


@pytest.mark.usefixtures("short_search")
def test_same_draft_has_the_same_choices(draft: Draft) -> None:
    """Of searches that are cut short: the more of the answer depends on where they began."""
    assert_repeats(Search(draft, a_second, LIMIT_S), Search(draft, a_second, LIMIT_S))


@pytest.mark.slow
def test_same_draft_has_the_same_choices_after_a_whole_search(draft: Draft, search: Search) -> None:
    assert_repeats(search, Search(draft, a_second, LIMIT_S))


# -- what it says of itself ----------------------------------------------------------------------------------


def test_guard_that_has_passed_means_the_greedy_choice_and_says_so(draft: Draft) -> None:
    search = Search(draft, a_second, 0.0)
    found = search.lowest()
    assert found.peak_bytes == planned_peak(apply(draft, found.choice)) < 0.8 * search.keep.peak_bytes
    assert search.cut_short
    changed = recompute(draft, goal=Lowest(), chooser=Chooser(a_second, 0.0))
    assert len(changed.notes) == 2
    assert "ended by solve_s=0 seconds" in changed.notes[0]
    assert "cheapest to rebuild for its size" in changed.notes[1]


def test_search_that_finds_nothing_falls_back_and_says_so(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RebuildSolver, "_solve", lambda *_: SolverOutcome(None, proved=False, struck=False))
    search = Search(draft, a_second, LIMIT_S)
    point = search.lowest()
    assert not search.cut_short
    assert any("cheapest to rebuild for its size" in note for note in search.notes)
    assert point.peak_bytes == planned_peak(apply(draft, point.choice)) < 0.8 * search.keep.peak_bytes
    assert search.lowest(share=0.05).added_s <= 0.05 * search.step_s
    assert Search(draft, a_second, LIMIT_S).lowest() == point, "the same program gives the same choice"


def test_search_without_a_proof_says_so_and_a_proved_one_says_nothing(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved = recompute(draft, goal=Within(0.001), chooser=Chooser(a_second, LIMIT_S))
    assert proved.notes == ()
    monkeypatch.setattr(recompute_module, "_LOWEST_VISITS", 1)
    search = Search(draft, a_second, LIMIT_S)
    search.lowest()
    assert any("budget of work" in note for note in search.notes)
    assert not search.cut_short


def test_frontier_has_no_hole_where_the_solver_finds_nothing(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point begins with the one below it, less what it has room for."""
    monkeypatch.setattr(recompute_module, "_LEVEL_VISITS", 1)
    points = Search(draft, a_second, LIMIT_S).frontier()
    keep, lowest = points[0], points[-1]
    for part in (0.25, 0.5, 0.75):
        room = lowest.peak_bytes + part * (keep.peak_bytes - lowest.peak_bytes)
        cheapest = min(point.added_s for point in points if point.peak_bytes <= room)
        assert cheapest <= (1.2 - part) * lowest.added_s


def test_room_is_searched_no_further_than_it_reaches(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    honest = RebuildSolver.lowest_cost

    def counted(self: RebuildSolver, peak_bytes: int, *rest: object, **named: object) -> SolverOutcome:
        asked.append(peak_bytes)
        return honest(self, peak_bytes, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(RebuildSolver, "lowest_cost", counted)
    search = Search(draft, a_second, LIMIT_S)
    keep, lowest = search.keep.peak_bytes, search.lowest().peak_bytes
    room = lowest + (keep - lowest) // 3
    point = search.point(Below(room))
    assert point.peak_bytes <= room
    some = len(asked)
    assert 0 < some <= recompute_module.LEVELS // 3 + 2
    assert search.frontier()[-1].peak_bytes == lowest
    assert len(asked) == recompute_module.LEVELS - 1, "none is searched for twice"
    assert search.point(Below(room)) == point


def test_notes_of_a_draft_are_added_to(draft: Draft) -> None:
    noted = replace(draft, notes=("before",))
    assert recompute(noted, goal=Lowest(), chooser=Chooser(a_second, 0.0)).notes[0] == "before"


def test_target_of_a_byte_is_impossible_with_the_lowest_peak_named() -> None:
    case = zoo.case("mlp")
    with pytest.raises(MemoryTargetError) as caught:
        predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="1B", solve_s=0.5)
    assert caught.value.target_bytes == 1
    assert caught.value.lowest_bytes > 1
