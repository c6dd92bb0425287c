"""Inductor's pickles are loaded from a folder that is the user's own, or not at all."""

from __future__ import annotations

import os
import stat
import types
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from takeback.compiler.program import Cluster
from takeback.compiler.run import inductor
from takeback.compiler.run.inductor import NotCompiled, compile_cluster
from takeback.compiler.run.inductor_folder import check_folder_
from takeback.options import inductor_folder

NOTHING = Cluster((), {}, (), ())


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's usual folder, and takeback's cache, of this test alone."""
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(tmp_path / "usual"))
    monkeypatch.setenv("TAKEBACK_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "usual"


def spoil(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
        return
    folder.mkdir()
    if how == "somebody else's":
        uid, real = folder.stat().st_uid, os.lstat

        def owned(path: object) -> os.stat_result:
            found = real(path)
            return os.stat_result((*found[:4], uid + 1, *found[5:])) if Path(str(path)) == folder else found

        monkeypatch.setattr(os, "lstat", owned)
    else:
        folder.chmod({"group": 0o770, "everybody": 0o777}[how])


HOW = ["group", "everybody", "link", "somebody else's"]


def test_folder_that_is_not_there_is_made_for_the_user_alone(usual: Path) -> None:
    before = os.umask(0o002)
    try:
        check_folder_()
    finally:
        os.umask(before)
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    assert inductor_folder() == str(usual)


@pytest.mark.parametrize("how", HOW)
def test_usual_folder_that_others_can_write_is_left_for_one_of_our_own(
    usual: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(usual, how, monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(usual))  # as torch itself does
    check_folder_()
    ours = usual.parent / "ours" / "inductor"
    assert inductor_folder() == str(ours)
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", HOW)
def test_folder_of_the_users_that_others_can_write_is_not_used_and_says_so(
    usual: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = usual.parent / "named"
    spoil(named, how, monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(named))
    monkeypatch.setattr(inductor, "found_or_compiled", pytest.fail)
    with (
        pytest.warns(RuntimeWarning, match="only you can write"),
        pytest.raises(NotCompiled, match=r"Inductor would keep and load code in .*named"),
    ):
        compile_cluster(NOTHING, torch.device("cpu"))
    assert inductor_folder() == str(named)


def test_private_folder_of_the_users_is_used(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = usual.parent / "named"
    named.mkdir(mode=0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(named))
    monkeypatch.setattr(inductor, "found_or_compiled", lambda key, compile_: types.SimpleNamespace(call="compiled"))
    assert compile_cluster(NOTHING, torch.device("cpu")) == "compiled"
    assert inductor_folder() == str(named)
