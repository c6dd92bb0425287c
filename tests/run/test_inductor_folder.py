"""Inductor's pickles are loaded from a folder that is the user's own, or not at all."""

from __future__ import annotations

import os
import pickle
import stat
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._inductor.codecache import FxGraphCache
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import cache_dir_utils

from takeback.compiler.program import BufferId, Cluster, Op, Phase, Region
from takeback.compiler.run import inductor, kernel_file, symbolic
from takeback.compiler.run.cluster_family import family_of
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
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
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


@pytest.mark.parametrize("how", HOW)
def test_tritons_folder_that_others_can_write_is_not_used_either(
    usual: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = usual.parent / "triton"
    spoil(named, how, monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(named))
    with pytest.raises(PermissionError, match=r"load code in .*triton: .* or set TRITON_CACHE_DIR"):
        check_folder_()


def test_tritons_folder_that_inductor_has_named_in_its_own_is_as_good_as_that(
    usual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder_()
    (usual / "triton").mkdir()
    (usual / "triton").chmod(0o775)  # as torch makes it for who lets a group write; nobody else comes as far
    monkeypatch.setenv("TRITON_CACHE_DIR", str(usual / "triton"))
    check_folder_()


# -- whoever asks ------------------------------------------------------------------------------------------------------


class Planted:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.trace),)


def cluster_of(rows: int) -> Cluster:
    x, y = (Region(BufferId(i), torch.float32, (rows,), (1,), 0) for i in range(2))
    op = Op(torch.ops.aten.mul.Tensor, (x, 2.0), {}, y, (), Phase.FORWARD, False, None)  # type: ignore[arg-type]
    return Cluster((op,), {}, (x,), (y,))


MEMBERS = tuple(map(cluster_of, (20, 24, 32)))
CPU = torch.device("cpu")
_seen = family_of([member.key for member in MEMBERS])
assert _seen is not None
FAMILY = _seen[0]
ASK: dict[str, Callable[[], object]] = {
    "compile_cluster": lambda: compile_cluster(MEMBERS[-1], CPU),
    "compile_family": lambda: symbolic.compile_family(FAMILY, MEMBERS, 32, CPU),
    "is_kept": lambda: symbolic.is_kept(FAMILY, MEMBERS, 32, CPU),
    "found": lambda: kernel_file.found(key_for("compile_cluster")),
}


def key_for(who: str) -> str:
    text = MEMBERS[-1].key if who in ("compile_cluster", "found") else FAMILY.text
    key = kernel_file.key_of(text, CPU, inductor.settings_of(MEMBERS[-1]))
    assert key is not None
    return key


def plant(who: str, content: object) -> None:
    folder = Path(FxGraphCache._get_tmp_dir_for_key(key_for(who)))
    folder.mkdir(parents=True, mode=0o700)
    (folder / "entry").write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("who", ASK)
def test_pickle_that_somebody_else_could_have_planted_is_never_loaded(
    usual: Path, who: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, trace = usual.parent / "named", usual.parent / "the pickle has run"
    spoil(named, how, monkeypatch)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(named))
    plant(who, Planted(trace))
    if who.startswith("compile"):
        with pytest.warns(RuntimeWarning, match="only you can write"), pytest.raises(NotCompiled):
            ASK[who]()
    else:
        assert not ASK[who]()
    assert not trace.exists()


@pytest.mark.parametrize("who", ASK)
def test_planted_pickle_does_run_where_the_folder_is_the_users_own(
    usual: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above shows nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(usual))
    for module, name in ((inductor, "_compile"), (symbolic, "_compile")):
        monkeypatch.setattr(module, name, lambda *args: kernel_file.Generated(lambda operands: operands))
    trace = usual.parent / "the pickle has run"
    check_folder_()
    plant(who, Planted(trace))
    ASK[who]()
    assert trace.exists()


@pytest.mark.parametrize("who", ASK)
def test_sound_pickle_of_something_else_counts_as_absent(
    usual: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(usual))
    made = kernel_file.Generated(lambda operands: operands)
    for module in (inductor, symbolic):
        monkeypatch.setattr(module, "_compile", lambda *args: made)
    check_folder_()
    plant(who, {"a": 1})
    expected = {"compile_cluster": made.call, "compile_family": symbolic.SymbolicKernel(made), "is_kept": False}
    assert ASK[who]() == expected.get(who)


def test_kept_graph_whose_guards_cannot_be_read_counts_as_absent(monkeypatch: pytest.MonkeyPatch, usual: Path) -> None:
    graphs = [
        mock.Mock(spec=CompiledFxGraph, guards_expr=said) for said in ("no(expression", "L['s0'] > 5 and", "True")
    ]
    candidates = mock.Mock(return_value=iter([(graph, b"", True) for graph in graphs]))
    monkeypatch.setattr(FxGraphCache, "iterate_over_candidates", candidates)
    assert kernel_file._kept("a key", 32) is graphs[-1]
    assert candidates.call_count == 1
