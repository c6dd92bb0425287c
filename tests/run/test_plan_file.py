"""What one process decided another finds, checks and uses; whatever is wrong with it counts as absent."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import takeback as tb
from takeback import zoo
from takeback.cache import Cache
from takeback.compiler.passes import recompute
from takeback.compiler.run import plan_file, program_key
from takeback.compiler.run.eager import eager_step
from takeback.options import open_cache
from takeback.step import CompiledStep

NOTE = "choices from the cache"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Plans are kept, in a folder that has nothing but the rates of this machine, and libraries, in it."""
    usual = open_cache().folder
    for file in usual.iterdir():
        if not file.name.startswith("plan-"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
            (tmp_path / file.name).chmod(0o600)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TAKEBACK_PLANS", "1")
    monkeypatch.setattr(plan_file, "FEWEST_OPS", 1)
    found = open_cache(tmp_path)
    for module in ("plan_maker",):
        monkeypatch.setattr(f"takeback.compiler.run.{module}.open_cache", lambda: found)
    return found


def entries(cache: Cache) -> list[Path]:
    return sorted(cache.folder.glob("plan-*"))


def trained(case: zoo.Case, memory: str = "min", steps: int = 3, **options: Any) -> CompiledStep:
    """As another process would: a step of its own, of a model that is the same."""
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tb.compile_step(model, case.loss_fn, optimizer, memory=memory, **options)
    torch.manual_seed(0)
    for _ in range(steps):
        step(*case.batch)
    assert_is_eager(step, case, steps)
    return step


def assert_is_eager(step: CompiledStep, case: zoo.Case, steps: int) -> None:
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    for _ in range(steps):
        eager_step(model, case.loss_fn, optimizer, case.batch)
    for ours, eagers in zip(step._model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, eagers)


def is_from_the_cache(step: CompiledStep) -> bool:
    return any(note.startswith(NOTE) for note in step.report().notes)


def searches_nothing() -> Any:
    return mock.patch.object(recompute, "Search", side_effect=AssertionError("a search"))


def test_second_process_plans_without_a_search_or_a_rehearsal_and_says_so(cache: Cache) -> None:
    case = zoo.case("gpt", batch=2)
    first = trained(case)
    assert not is_from_the_cache(first)
    assert len(entries(cache)) == 1
    before = entries(cache)[0].read_bytes()
    with searches_nothing(), mock.patch("takeback.compiler.layout.solve", side_effect=AssertionError("solved")):
        second = trained(case)
    assert is_from_the_cache(second)
    assert second._last is not None
    assert first._last is not None
    assert second._last.executor.layout is second._last.planned.layout, "it was planned again after a replay"
    assert second._last.executor.layout.placed.offsets == first._last.executor.layout.placed.offsets
    assert any(op.scratch for op in second._last.executor.program.ops)
    assert first._last.executor.layout.draft.rebuilt, "nothing is rebuilt: this shows nothing"
    assert second._last.executor.layout.draft.rebuilt == first._last.executor.layout.draft.rebuilt
    assert second.report().peak_bytes == first.report().peak_bytes
    assert entries(cache)[0].read_bytes() == before


def test_keep_keeps_where_everything_lies(cache: Cache) -> None:
    case = zoo.case("mlp")
    trained(case, "keep")
    with mock.patch("takeback.compiler.layout.solve", side_effect=AssertionError("solved")):
        assert is_from_the_cache(trained(case, "keep"))


def test_targets_find_their_plan_again(cache: Cache) -> None:
    case = zoo.case("mlp")
    trained(case, "0.9x")
    with searches_nothing():
        assert is_from_the_cache(trained(case, "0.9x"))


def test_another_program_other_options_or_other_rates_find_nothing(cache: Cache) -> None:
    case = zoo.case("mlp")
    trained(case, "keep")
    assert not is_from_the_cache(trained(case, "auto"))
    assert not is_from_the_cache(trained(zoo.case("mlp", batch=8), "keep"))
    assert not is_from_the_cache(trained(case, "keep", keep_grads=True))
    with mock.patch("takeback.compiler.run.calibrate.seconds", return_value=1.0):
        assert not is_from_the_cache(trained(case, "keep"))
    with mock.patch.object(program_key, "_source", return_value="another version"):
        assert not is_from_the_cache(trained(case, "keep"))
    assert is_from_the_cache(trained(case, "keep"))


def test_nothing_is_kept_where_that_is_not_wanted_or_not_worth_it(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = zoo.case("mlp")
    monkeypatch.setenv("TAKEBACK_PLANS", "0")
    trained(case, "keep")
    monkeypatch.setenv("TAKEBACK_PLANS", "1")
    monkeypatch.setattr(plan_file, "FEWEST_OPS", 10_000)
    trained(case, "keep")
    assert not entries(cache)


def test_what_the_clock_ended_is_not_kept(cache: Cache) -> None:
    case = zoo.case("mlp")
    note = recompute._STRUCK.format(limit_s=1.0)
    with mock.patch.object(recompute.Search, "notes", (note,)):
        trained(case, "min")
    assert not entries(cache)


def _lower_all(data: dict[str, Any]) -> None:
    data["solution"]["offsets"] = [[item, 0] for item, _ in data["solution"]["offsets"]]


def _outside(data: dict[str, Any]) -> None:
    data["solution"]["offsets"][0][1] = 1 << 50


def _forget_one(data: dict[str, Any]) -> None:
    data["solution"]["offsets"].pop()


def _rebuild_the_last(data: dict[str, Any]) -> None:
    data["rebuilds"] = [[5, 10_000]]


def _rebuild_what_draws(data: dict[str, Any]) -> None:
    data["rebuilds"] = [[before, op] for before in (40, 41) for op in range(3, 8)]


def _other_peak(data: dict[str, Any]) -> None:
    data["peak_bytes"] += 64


def _no_peak(data: dict[str, Any]) -> None:
    data["peak_bytes"] = None


def _no_solution(data: dict[str, Any]) -> None:
    data["solution"] = None


def _scratch_of_nobody(data: dict[str, Any]) -> None:
    data["scratch"] = {"3": [[64, 0, None, 9999]]}


def _words_for_numbers(data: dict[str, Any]) -> None:
    data["rebuilds"] = [["a", "b"]]


def _no_rebuilds(data: dict[str, Any]) -> None:
    del data["rebuilds"]


@pytest.mark.parametrize(
    "spoil",
    [
        *(_lower_all, _outside, _forget_one, _rebuild_the_last, _rebuild_what_draws, _other_peak, _no_peak),
        *(_no_solution, _scratch_of_nobody, _words_for_numbers, _no_rebuilds),
    ],
)
def test_what_is_wrong_is_found_and_planned_anew(cache: Cache, spoil: Callable[[dict[str, Any]], None]) -> None:
    case = zoo.case("mlp")
    trained(case, "min")
    real = Cache.read

    def spoiled(self: Cache, kind: str, key: str) -> bytes | None:
        text = real(self, kind, key)
        if kind != "plan" or text is None:
            return text
        data = json.loads(text)
        spoil(data)
        return json.dumps(data).encode()

    with mock.patch.object(Cache, "read", spoiled):
        step = trained(case, "min")
    if spoil is not _scratch_of_nobody:  # without what it foresees the offsets may still be right
        assert not is_from_the_cache(step)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b'{"rebuilds": 3}'])
def test_what_is_no_plan_counts_as_absent(cache: Cache, text: bytes) -> None:
    cache.write("plan", "key", text)
    assert plan_file.read(cache, "key") is None


def test_a_torn_file_counts_as_absent(cache: Cache) -> None:
    case = zoo.case("mlp")
    trained(case, "keep")
    [file] = entries(cache)
    file.write_bytes(file.read_bytes()[:-9] + b"x" * 9)
    assert not is_from_the_cache(trained(case, "keep"))
    assert is_from_the_cache(trained(case, "keep"))  # it was written anew


def test_a_folder_that_cannot_be_written_is_no_error(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = dataclasses.replace(cache, folder=Path("/proc/takeback"))
    monkeypatch.setattr("takeback.compiler.run.plan_maker.open_cache", lambda: locked)
    with pytest.warns(RuntimeWarning, match="cannot keep anything"):
        trained(zoo.case("mlp"), "keep")
