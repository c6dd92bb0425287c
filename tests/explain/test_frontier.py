"""The frontier: its points are ordered and true, its text fits 80 columns, its page shows the curve."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from test_explain_html import checked
from torch import nn

import takeback as tb
from takeback import zoo
from takeback.compiler.explain.frontier import Frontier, Tradeoff, share_ticks, show_seconds
from takeback.compiler.explain.frontier_html import as_html
from takeback.compiler.planning import AUTO_SHARE
from takeback.errors import OptionError
from takeback.options import memory_target
from takeback.predict import frontier

pytestmark = pytest.mark.usefixtures("short_search")

MIB = 1 << 20


@cache
def zoo_frontier(name: str) -> Frontier:
    return watched_frontier(name)[0]


@cache
def watched_frontier(name: str) -> tuple[Frontier, list[str], dict[str, bool]]:
    """With what it told on its way, and of what it must not touch, whether it is as before."""
    case = zoo.case(name)
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    random = torch.get_rng_state()
    told: list[str] = []
    found = frontier(case.model, case.loss_fn, case.optimizer, *case.batch, progress=told.append)
    same = {k: torch.equal(v, before[k]) for k, v in case.model.state_dict().items()}
    same |= {"optimizer": not case.optimizer.state, "random numbers": torch.equal(torch.get_rng_state(), random)}
    return found, told, same


def fixed(auto: int | None = None) -> Frontier:
    """Four points made by hand; "auto" is the one of that number, or lies between the second and the third."""
    keep = Tradeoff("keep", 10 * MIB, 0.8, 0.1, 0.0, 0.0, 0, {})
    some = Tradeoff("0.50x", 7 * MIB, 0.5, 0.103, 0.003, 0.03, 2, {"gelu": 2})
    more = Tradeoff("0.40x", 6 * MIB, 0.4, 0.107, 0.007, 0.07, 4, {"gelu": 2, "addmm": 2})
    least = Tradeoff("min", 4 * MIB, 0.2, 0.12, 0.02, 0.2, 10, {"addmm": 4, "native_layer_norm": 4, "gelu": 2})
    own = Tradeoff("auto", 13 * MIB // 2, 0.45, 0.105, 0.005, 0.05, 3, {"gelu": 2, "addmm": 1})
    points = (keep, some, more, least)
    return Frontier(points, own if auto is None else points[auto], 12 * MIB, 2 * MIB, "2.0")


def test_text_of_a_fixed_frontier() -> None:
    assert_expected_inline(
        str(fixed()),
        """\
memory              peak   above resident  x eager       step    added run again
eager          12.00 MiB        10.00 MiB    1.000
keep           10.00 MiB         8.00 MiB    0.800     100 ms    0.0 %         0
0.50x           7.00 MiB         5.00 MiB    0.500     103 ms    3.0 %         2
auto            6.50 MiB         4.50 MiB    0.450     105 ms    5.0 %         3
0.40x           6.00 MiB         4.00 MiB    0.400     107 ms    7.0 %         4
min             4.00 MiB         2.00 MiB    0.200     120 ms   20.0 %        10
Peaks are before placement, 2.00 MiB resident included; times are predicted for
this machine.

-- Peak above resident, x eager, against added time (A: auto) ------------------
    0.80 |o.........
         |         :
    0.68 |         :
         |         :
    0.56 |         :
         |         o............
    0.44 |               A     :
         |                     o......................................
    0.32 |                                                           :
         |                                                           :
    0.20 |                                                           o
         +------------------------------------------------------------
          0 %            5 %            10 %          15 %           20 %

-- What is run again -----------------------------------------------------------
keep        nothing
0.50x       2 ops: gelu x2
auto        3 ops: gelu x2, addmm x1
0.40x       4 ops: gelu x2, addmm x2
min         10 ops: addmm x4, native_layer_norm x4, gelu x2""",
    )


def test_text_marks_auto_where_it_is_one_of_the_points() -> None:
    assert fixed(auto=1).rows == fixed().points
    assert "\n0.50x, auto " in str(fixed(auto=1))
    assert "\nkeep, auto " in str(fixed(auto=0))


@pytest.mark.parametrize("name", ["mlp", "gpt", pytest.param("resnet", marks=pytest.mark.slow)])
def test_text_of_a_zoo_frontier_fits_80_columns_and_is_plain(name: str) -> None:
    text = str(zoo_frontier(name))
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    assert "\x1b" not in text


def test_text_fits_80_columns_whatever_the_sizes() -> None:
    huge = [
        dataclasses.replace(
            t, peak_bytes=t.peak_bytes << 20, step_s=99_999.0, added_share=99.0, rebuilt_ops=99_999, memory="0.123x"
        )
        for t in fixed().points
    ]
    wide = Frontier(tuple(huge), huge[1], 900 << 40, 1 << 40)
    assert max(map(len, str(wide).splitlines())) <= 80


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_points_begin_without_rebuilding_and_each_is_lower_and_slower(name: str) -> None:
    found = zoo_frontier(name)
    first, *_, last = found.points
    assert (first.memory, first.added_s, first.rebuilt_ops, first.rebuilt) == ("keep", 0.0, 0, {})
    assert last.memory == "min"
    assert len(found.points) >= 5
    for here, after in pairwise(found.points):
        assert after.peak_bytes < here.peak_bytes
        assert after.added_s > here.added_s
        assert after.share < here.share
    for t in found.rows:
        assert t.rebuilt_ops == sum(t.rebuilt.values())
        assert t.step_s == pytest.approx(first.step_s + t.added_s)
        assert t.added_share == pytest.approx(t.added_s / first.step_s)
        above = found.eager_peak_bytes - found.resident_bytes
        assert t.share == pytest.approx((t.peak_bytes - found.resident_bytes) / above)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_setting_of_a_point_is_met_by_it_and_not_by_the_one_above(name: str) -> None:
    for above, point in pairwise(zoo_frontier(name).points[:-1]):
        target = memory_target(point.memory)
        assert point.share <= target < above.share


def small() -> tuple[Any, ...]:
    """A step so small that every choice is solved to the end."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    return model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(512, 32)


def test_points_are_what_predict_gives_for_their_setting() -> None:
    found = frontier(*small())
    assert len(found.points) >= 3
    for point in found.rows:
        said = tb.predict(*small(), memory=point.memory)
        assert said.peak_bytes == pytest.approx(point.peak_bytes, rel=0.01)
        assert said.eager_peak_bytes == found.eager_peak_bytes
        assert said.resident_bytes == found.resident_bytes
        assert said.rebuilt_ops == point.rebuilt_ops
        assert said.step_s == pytest.approx(found.points[0].step_s, rel=0.01)
        assert said.added_s == pytest.approx(point.added_s, rel=0.01)


def test_auto_takes_no_more_than_its_share_of_the_step() -> None:
    for name in ("gpt", "resnet"):
        assert 0 < zoo_frontier(name).auto.added_share <= AUTO_SHARE["cpu"] * (1 + 1e-6)


def test_frontier_of_a_step_with_nothing_to_rebuild_is_one_point() -> None:
    model = nn.Linear(4, 2)
    found = frontier(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), torch.ones(3, 4))
    assert len(found.points) == 1
    assert found.auto == found.points[0]
    assert "No way of rebuilding was found" in str(found)
    assert "keep, auto" in str(found)
    checked(as_html(found))


def test_frontier_touches_nothing_and_says_what_it_does() -> None:
    _, told, same = watched_frontier("resnet")
    assert len(same) > 20
    assert all(same.values()), same
    assert any(text.startswith("the cheapest way to ") for text in told)
    assert any(text.startswith("auto: ") for text in told)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "fast"}, r"mode='fast' cannot be predicted: .* predict with mode='exact'"),
        ({"device": "cuda"}, "device='cuda' needs gpu="),
        ({"solve_s": 0}, "solve_s must be a positive number of seconds, got 0"),
    ],
)
def test_bad_option_is_refused(options: dict[str, Any], match: str) -> None:
    case = zoo.case("mlp")
    with pytest.raises(OptionError, match=match):
        frontier(case.model, case.loss_fn, case.optimizer, *case.batch, **options)


# -- JSON and the page -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [fixed(), fixed(auto=1)], ids=["own", "same"])
def test_json_round_trips(found: Frontier) -> None:
    data = json.loads(found.to_json())
    points = tuple(Tradeoff(**each) for each in data.pop("points"))
    assert Frontier(points, Tradeoff(**data.pop("auto")), **data) == found


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_page_is_well_formed_self_contained_and_shows_the_curve(name: str, tmp_path: Path) -> None:
    found = zoo_frontier(name)
    page = found.to_html(tmp_path / "frontier.html").read_text(encoding="utf-8")
    parsed = checked(page)
    assert not {"link", "img", "iframe"} & set(parsed.tags)
    assert not re.search(r"https?://|url\(|@import", page)
    assert parsed.tags.count("circle") == len(found.rows)
    assert page.count('<circle class="dot auto"') == 1
    assert page.count('<path class="curve ours"') == 1
    assert "prefers-color-scheme" in page
    for t in found.rows:
        assert f"{t.share:.3f}" in page


def test_page_escapes_names() -> None:
    evil = "<script>alert(1)</script>"
    found = fixed()
    planted = dataclasses.replace(found, auto=dataclasses.replace(found.auto, memory=evil, rebuilt={evil: 1}))
    assert checked(as_html(planted)).tags == checked(as_html(found)).tags


# -- figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (1.234e-5, "12.3 us"),
        (4.5e-3, "4.50 ms"),
        (0.4123, "412 ms"),
        (0.9996, "1.00 s"),
        (71, "71.0 s"),
    ],
)
def test_seconds_have_sensible_units(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize("most", [1e-4, 0.013, 0.05, 0.1, 0.29, 0.356, 1.0, 7.3])
def test_ticks_are_few_and_within(most: float) -> None:
    ticks = share_ticks(most)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 7
    assert ticks[-1] <= most * (1 + 1e-6)
