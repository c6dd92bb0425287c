"""Targets: a larger budget never costs more time, a smaller one never peaks higher, and an impossible one says how low
it goes. Over drawn programs, and over small models as recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn import functional as F

import takeback as tb
from pairwise import quick_ones
from takeback import zoo
from takeback.compiler.ownership.resident import resident_bytes
from takeback.compiler.ownership.writes import undo_bytes
from takeback.compiler.passes.pipeline import search_of
from takeback.compiler.passes.recompute import Search
from takeback.compiler.planning import Planned, plan_within, settings_for
from takeback.compiler.program import Op, Program
from takeback.compiler.run.calibrate import cost_of
from takeback.errors import MemoryTargetError
from takeback.options import Options

sys.path.insert(0, str(Path(__file__).parent / "passes"))

from drawn_programs import Recipe, a_second, draft_of, recipes, recorded, written


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def planned(program: Program, memory: str, seconds: Callable[[Op], float] | None = None) -> Planned:
    options = Options(memory=memory)
    return plan_within(program, frozenset(), options, settings_for(program, options, seconds or cost_of(program)))


def peak_of(program: Program, plan: Planned) -> int:
    layout = plan.layout
    outside = resident_bytes(program) + undo_bytes(layout.draft.program)
    return outside + layout.alive_bytes + layout.placed.size_bytes - layout.placed.lower_bound_bytes


def small_mlp() -> Program:
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()))
    return recorded(nn.Sequential(*layers), lambda m, x: m(x).square().mean(), torch.randn(128, 16))


def small_gpt() -> Program:
    case = zoo.case("gpt", batch=2)
    return recorded(case.model, case.loss_fn, *case.batch)


def assert_monotone(program: Program, levels: int, seconds: Callable[[Op], float] | None = None) -> None:
    """Targets from below what is possible up to what needs no rebuilding."""
    most, least = (peak_of(program, planned(program, m, seconds)) for m in ("keep", "min"))
    before: tuple[int, float] | None = None
    for level in range(-1, levels + 1):
        target = least + (most - least) * level // levels
        if target <= 0:
            continue
        try:
            plan = planned(program, f"{target}B", seconds)
        except MemoryTargetError:
            assert before is None, "a larger budget failed where a smaller one did not"
            assert target < least
            continue
        peak = peak_of(program, plan)
        assert peak <= target
        if before is not None:
            assert plan.added_s <= before[1] * (1 + 1e-9)
            assert peak >= before[0]
        before = (peak, plan.added_s)
    assert before is not None


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(recipes)
def test_peak_and_time_are_monotone_in_the_budget_of_a_random_program(recipe: Recipe) -> None:
    assert_monotone(written(recipe), levels=4, seconds=a_second)


@pytest.mark.parametrize("make", quick_ones([small_mlp, small_gpt], [small_mlp]))
def test_peak_and_time_are_monotone_in_the_budget_of_a_recorded_model(make: object) -> None:
    assert callable(make)
    assert_monotone(make(), levels=2)


def test_lowest_peak_is_no_higher_than_any_of_the_frontier() -> None:
    program = small_mlp()
    points = search_of(program, frozenset(), settings_for(program, Options(), cost_of(program))).frontier()
    least = planned(program, "min").layout
    assert len(points) > 2
    assert least.alive_bytes <= min(p.peak_bytes for p in points)


def test_lowest_peak_is_no_higher_than_what_a_share_of_the_time_buys() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.ParameterList(torch.randn(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.cat([x[:, 1:4], x[:, ::2]], 1).masked_fill(self.w[2] > 0, 0.3)
            b = torch.maximum(x[torch.tensor([0, 0, 2, 5, 1, 4])], x)
            F.layer_norm(self.w[1], (6,))
            b = torch.maximum(self.w[0], b)
            ends = (b, a.tanh().exp() * 0.5, x.tanh().exp() * 0.5, self.w[0])
            return torch.stack([v.square().mean() for v in ends]).sum()

    torch.manual_seed(0)
    draft = draft_of(recorded(Model(), lambda m, x: m(x), torch.randn(6, 7)[:, 1:]))
    search = Search(draft, a_second, 3.0)
    others = [search.lowest(share) for share in (0.03, 0.06, 0.12)] + [*search.frontier()]
    assert search.lowest().peak_bytes <= min(p.peak_bytes for p in others)


def test_lowest_bytes_of_an_impossible_target_can_be_had() -> None:
    program = small_mlp()
    with pytest.raises(MemoryTargetError) as caught:
        planned(program, "64B")
    lowest = caught.value.lowest_bytes
    assert caught.value.target_bytes == 64 < lowest
    assert peak_of(program, planned(program, f"{lowest}B")) <= lowest
    with pytest.raises(MemoryTargetError):
        planned(program, f"{int(lowest * 0.99) - 1}B")


def test_message_of_an_impossible_target_says_what_was_asked_what_is_possible_and_what_to_do() -> None:
    with pytest.raises(
        MemoryTargetError, match=r"memory='0.01x' is .* MiB .*lowest peak .*alive between.*memory='min'"
    ):
        planned(small_mlp(), "0.01x")


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("memory", ["auto", "min", "0.7x"])
def test_measured_peak_of_the_replayed_step_is_the_reported_one(memory: str) -> None:
    """What the allocator served after the first rehearsal is what was planned: nothing asked for more."""
    case = zoo.case("gpt", batch=2)
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=memory)
    step(*case.batch)
    predicted = step.report()
    for _ in range(3):
        step(*case.batch)
    now = step.report()
    if not now.placed:
        pytest.skip("no native allocator here")
    assert now.measured is not None
    assert now.measured.misses == 0
    above, before = (r.peak_bytes - r.resident_bytes for r in (now, predicted))
    assert abs(above - before) <= 0.03 * before
    assert max(now.peak_curve) == step._plans[0].executor.layout.alive_bytes
    if memory == "0.7x":
        assert above <= 0.7 * (now.eager_peak_bytes - now.resident_bytes)


def test_predicted_target_is_that_of_the_compiled_step() -> None:
    case = zoo.case("gpt", batch=2)
    predicted = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="0.6x")
    assert predicted.peak_bytes - predicted.resident_bytes <= 0.6 * (
        predicted.eager_peak_bytes - predicted.resident_bytes
    )
    assert predicted.added_s > 0
    assert predicted.step_s > predicted.added_s


def test_nothing_is_rebuilt_where_the_budget_is_large() -> None:
    program = small_mlp()
    plan = planned(program, "1GiB")
    assert plan.added_s == 0
    assert plan.layout.draft.rebuilt == frozenset()
    assert planned(program, "keep").layout.draft.rebuilt == frozenset()


@pytest.mark.parametrize("name", quick_ones(["dit", "ssm"], ["dit"]))
def test_auto_peaks_at_no_more_than_0_7_of_eagers(name: str) -> None:
    of = zoo.case(name, optimizer="adamw")
    report = tb.predict(of.model, of.loss_fn, of.optimizer, *of.batch)
    assert report.peak_bytes - report.resident_bytes <= 0.7 * (report.eager_peak_bytes - report.resident_bytes)
