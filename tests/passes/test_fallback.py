"""Where the solver finds nothing in time, what is cheapest for its size is rebuilt: in budget, and for a gain."""

from __future__ import annotations

import pytest
import torch
from menus import a_second, draft_of, recorded

from takeback import zoo
from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.fallback import cheapest_first
from takeback.compiler.passes.menu import Menu
from takeback.compiler.passes.recompute import Search, planned_peak
from takeback.compiler.passes.solve import Solver


@pytest.fixture(scope="module")
def draft() -> Draft:
    torch.manual_seed(0)
    case = zoo.case("gpt", batch=2)
    return draft_of(recorded(case.model, case.loss_fn, *case.batch))


@pytest.mark.parametrize("most", [0.0, 1.0, 3.0, 7.0, 1e9])
def test_no_choice_costs_more_than_it_may_and_the_cost_is_that_of_its_ops(draft: Draft, most: float) -> None:
    found = cheapest_first(Menu(draft, a_second), most)
    assert bool(found) is (most > 0)
    for choice, seconds in found:
        assert len(choice.rebuilds) == seconds <= most
    if most == 1e9:
        assert len(found) == 4
        assert [len(c.rebuilds) for c, _ in found] == sorted(len(c.rebuilds) for c, _ in found)


def test_every_larger_choice_peaks_lower_here(draft: Draft) -> None:
    peaks = [planned_peak(apply(draft, choice)) for choice, _ in cheapest_first(Menu(draft, a_second), 1e9)]
    assert [planned_peak(draft), *peaks] == sorted([planned_peak(draft), *peaks], reverse=True)
    assert peaks[-1] < 0.8 * planned_peak(draft)


def test_search_that_finds_nothing_in_time_falls_back(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Solver, "_once", lambda *_: None)
    search = Search(draft, a_second, limit_s=5.0)
    point = search.lowest()
    assert search.cut_short
    assert point.peak_bytes == planned_peak(apply(draft, point.choice)) < 0.8 * search.keep.peak_bytes
    assert search.lowest(share=0.05).added_s <= 0.05 * search.step_s
    again = Search(draft, a_second, limit_s=5.0)
    assert again.lowest() == point, "the same program gives the same choice"
