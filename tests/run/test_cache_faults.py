"""Whatever becomes of the cache folder, full, read-only or corrupted, steps have eager's bits: plan files and
remembered proofs are taken if they are whole, made anew if not, and what cannot be kept is one warning.
"""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback import cache as cache_module
from takeback.cache import Cache
from takeback.compiler.run import plan_file, proof_file, recorded_step
from takeback.compiler.run.eager import eager_step
from takeback.options import open_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Plans and proofs of the smallest steps are kept here, and nothing else: rates and libraries have their own."""
    found = open_cache(tmp_path / "cache")
    monkeypatch.setenv("TAKEBACK_PLANS", "1")
    monkeypatch.setattr(plan_file, "FEWEST_OPS", 1)
    monkeypatch.setattr(proof_file, "FEWEST_OPS", 1)
    monkeypatch.setattr(proof_file, "LEAST_BYTES", 1)
    monkeypatch.setattr("takeback.compiler.run.plan_maker.open_cache", lambda: found)
    monkeypatch.setattr(cache_module, "_warned", set())
    return found


class Found(NamedTuple):
    """What a process took from the cache, and what it warned of."""

    plan: bool
    proof: bool
    warned: list[str]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def made() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), (torch.randn(6, 8), torch.randint(4, (6,)))


def trained() -> Found:
    """As another process would; eager's bits are asserted."""
    model, optimizer, batch = made()
    twin, twins, _ = made()
    with (
        warnings.catch_warnings(record=True) as seen,
        mock.patch.object(recorded_step, "prove_recording", wraps=recorded_step.prove_recording) as proofs,
    ):
        warnings.simplefilter("always")
        step = tb.compile_step(model, loss_fn, optimizer, memory="min")
        for _ in range(3):
            step(*batch)
            eager_step(twin, loss_fn, twins, batch)
    for ours, eagers in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, eagers)
    notes = step.report().notes
    plan = any(note.startswith("choices from the cache") for note in notes)
    return Found(plan, not proofs.called, [str(each.message) for each in seen])


def kinds(cache: Cache) -> list[str]:
    return sorted(file.name.partition("-")[0] for file in cache.folder.iterdir())


def refuse(number: int) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return raises


def test_another_process_finds_plan_and_proof(cache: Cache) -> None:
    """Without which the tests below show nothing."""
    assert trained() == (False, False, [])
    assert kinds(cache) == ["plan", "recording"]
    assert trained() == (True, True, [])


@pytest.mark.parametrize(
    ("function", "number"), [("mkstemp", errno.EROFS), ("mkstemp", errno.EDQUOT), ("fsync", errno.ENOSPC)]
)
def test_folder_that_is_full_or_read_only_is_one_warning(
    cache: Cache, function: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile if function == "mkstemp" else os, function, refuse(number))
    found = trained()
    assert found[:2] == (False, False)
    [warning] = found.warned
    assert "cannot keep anything in the cache folder" in warning
    assert os.strerror(number) in warning
    assert kinds(cache) == []  # no part was left behind
    assert trained() == (False, False, [])  # it warns once


def test_folder_that_became_read_only_is_read(cache: Cache) -> None:
    trained()
    with (
        mock.patch.object(tempfile, "mkstemp", refuse(errno.EROFS)),
        mock.patch.object(os, "utime", refuse(errno.EROFS)),
    ):
        assert trained() == (True, True, [])


def test_disk_that_is_full_half_way_keeps_the_earlier_entries(cache: Cache) -> None:
    trained()
    before = {file.name: file.read_bytes() for file in cache.folder.iterdir()}
    with mock.patch.object(os, "fsync", refuse(errno.ENOSPC)):
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert not cache.write("plan", "another", b"x" * 100)
        assert trained()[:2] == (True, True)
    assert {file.name: file.read_bytes() for file in cache.folder.iterdir()} == before


def garbage(file: Path) -> None:
    file.write_bytes(os.urandom(file.stat().st_size))


def one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def everybody(file: Path) -> None:
    file.chmod(0o666)


@pytest.mark.parametrize("spoil", [garbage, one_bit, empty, torn, everybody])
def test_spoiled_entries_count_as_absent_and_are_mended(cache: Cache, spoil: Callable[[Path], None]) -> None:
    trained()
    for file in cache.folder.iterdir():
        spoil(file)
    assert trained() == (False, False, [])
    assert trained() == (True, True, [])


def test_folders_in_the_place_of_entries_are_no_error(cache: Cache) -> None:
    trained()
    for file in list(cache.folder.iterdir()):
        file.unlink()
        file.mkdir()
    found = trained()
    assert found[:2] == (False, False)
    assert len(found.warned) == 1


def test_entries_under_each_others_names_count_as_absent(cache: Cache) -> None:
    trained()
    first, second = cache.folder.iterdir()
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert trained()[:2] == (False, False)


def test_file_in_the_place_of_the_folder_is_one_warning(cache: Cache) -> None:
    cache.folder.write_bytes(b"")
    found = trained()
    assert found[:2] == (False, False)
    assert len(found.warned) == 1


def test_folder_that_goes_away_between_two_processes_is_made_anew(cache: Cache) -> None:
    trained()
    for file in cache.folder.iterdir():
        file.unlink()
    cache.folder.rmdir()
    assert trained() == (False, False, [])
    assert trained() == (True, True, [])
