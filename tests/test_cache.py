"""What the cache promises: private, whole or nothing, one version, within its limits, and never a reason to fail.

Warnings are errors here, so whatever follows the one that is expected shows that it is said once.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from takeback import cache as module
from takeback import native
from takeback.cache import Cache
from takeback.options import CACHE_BYTES, CACHE_ENTRIES, open_cache


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", set())


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", limit_bytes=1 << 20, limit_entries=100)


def only_file(cache: Cache) -> Path:
    (found,) = cache.folder.iterdir()
    return found


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("key", ["", "k", "../../etc/passwd", "a/b\0c\n", "ключ", "\ud800", "x" * 100_000])
def test_any_string_is_a_key(cache: Cache, key: str) -> None:
    assert cache.read("rates", key) is None
    assert cache.write("rates", key, b"content")
    assert cache.read("rates", key) == b"content"
    assert only_file(cache).parent == cache.folder


def test_kinds_keys_and_folders_are_apart_and_the_last_write_counts(cache: Cache, tmp_path: Path) -> None:
    for kind, key, data in [("a", "k", b"1"), ("b", "k", b""), ("a", "l", b"3"), ("a", "k", b"4")]:
        assert cache.write(kind, key, data)
    assert [cache.read(*e) for e in [("a", "k"), ("b", "k"), ("a", "l"), ("b", "l")]] == [b"4", b"", b"3", None]
    assert Cache(tmp_path / "other", 1 << 20, 100).read("a", "k") is None


def test_folder_and_entries_are_for_the_user_alone_whatever_the_umask(cache: Cache) -> None:
    old = os.umask(0)
    try:
        assert cache.write("rates", "k", b"content")
    finally:
        os.umask(old)
    assert mode_of(cache.folder) == 0o700
    assert mode_of(only_file(cache)) == 0o600


def test_reading_makes_no_folder(cache: Cache) -> None:
    assert cache.read("rates", "k") is None
    assert not cache.folder.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_that_others_can_write_is_refused_with_one_warning(cache: Cache, mode: int) -> None:
    assert cache.write("rates", "k", b"content")
    before = only_file(cache).read_bytes()
    cache.folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"others can write it .mode {mode:o}.*TAKEBACK_CACHE"):
        assert cache.read("rates", "k") is None
    assert cache.path_of("rates", "k") is None
    assert not cache.write("rates", "k", b"other")
    assert only_file(cache).read_bytes() == before
    cache.folder.chmod(0o700)
    assert cache.read("rates", "k") == b"content"


def test_folder_of_somebody_else_is_refused_with_one_warning(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.write("rates", "k", b"content")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match=f"belongs to user {me}, and this is user {me + 1}"):
        assert cache.read("rates", "k") is None
    assert not cache.write("rates", "k", b"other")


def test_entry_of_somebody_else_in_a_folder_of_ours_is_ignored(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.write("rates", "k", b"content")
    honest = os.fstat

    def another(handle: int) -> os.stat_result:
        found = list(honest(handle))
        found[stat.ST_UID] += 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", another)
    assert cache.read("rates", "k") is None
    monkeypatch.undo()
    assert cache.read("rates", "k") == b"content"


def test_folder_that_is_a_link_is_used_where_what_it_leads_to_is_the_users_alone(cache: Cache, tmp_path: Path) -> None:
    """A `~/.cache` on another disk."""
    (tmp_path / "disk").mkdir(mode=0o700)
    cache.folder.symlink_to(tmp_path / "disk")
    assert cache.write("rates", "k", b"content")
    assert cache.read("rates", "k") == b"content"
    (tmp_path / "disk").chmod(0o770)
    with pytest.warns(RuntimeWarning, match="others can write it"):
        assert cache.read("rates", "k") is None
    assert not cache.write("rates", "k", b"other")


def test_entry_that_others_can_write_or_that_is_a_link_is_ignored_and_rewritten(cache: Cache, tmp_path: Path) -> None:
    assert cache.write("rates", "k", b"content")
    path = only_file(cache)
    path.chmod(0o622)
    assert cache.read("rates", "k") is None
    path.chmod(0o600)
    assert cache.read("rates", "k") == b"content"
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert cache.read("rates", "k") is None
    assert cache.write("rates", "k", b"new")
    assert not path.is_symlink()
    assert cache.read("rates", "k") == b"new"


def test_every_changed_byte_and_every_torn_length_is_found_and_mended_by_a_write(cache: Cache) -> None:
    assert cache.write("rates", "k", b"content")
    path = only_file(cache)
    whole = path.read_bytes()
    broken = [whole[:n] for n in range(len(whole))] + [whole + b"x", b"x" + whole]
    broken += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for text in broken:
        path.write_bytes(text)
        assert cache.read("rates", "k") is None, text
        assert cache.path_of("rates", "k") is None, text
    assert cache.write("rates", "k", b"content")
    assert cache.read("rates", "k") == b"content"


def test_entry_under_another_entrys_name_is_not_taken_for_it(cache: Cache) -> None:
    assert cache.write("rates", "k", b"content")
    path = only_file(cache)
    whole = path.read_bytes()
    assert cache.write("rates", "l", b"other")
    path.with_name(module._name("rates", "l")).write_bytes(whole)
    assert cache.read("rates", "l") is None
    assert cache.read("rates", "k") == b"content"


def test_entry_of_another_version_is_not_found_even_under_the_right_name(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.write("rates", "k", b"content")
    old = only_file(cache)
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    assert cache.read("rates", "k") is None
    new = old.with_name(module._name("rates", "k"))
    assert new != old
    new.write_bytes(b"content" + b"".join(module._footer(new.name, b"content")))
    new.chmod(0o600)
    assert cache.read("rates", "k") == b"content", "the footer is not what this test believes"
    whole = new.read_bytes()
    new.write_bytes(whole[:-1] + b"1")
    assert cache.read("rates", "k") is None
    monkeypatch.undo()
    assert cache.read("rates", "k") == b"content", "another version's entry was touched"


def test_path_of_gives_a_file_that_begins_with_the_content(cache: Cache) -> None:
    assert cache.path_of("native", "k") is None
    assert cache.write("native", "k", b"content")
    path = cache.path_of("native", "k")
    assert path is not None
    assert path.read_bytes().startswith(b"content")
    assert path.parent == cache.folder


WRITER = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
sys.modules["cache"] = cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
assert "torch" not in sys.modules
mine, folder = int(sys.argv[2]), sys.argv[3]
made = cache.Cache(cache.Path(folder), limit_bytes=3_000_000, limit_entries=8)
contents = {bytes([n]) * 200_000 for n in (1, 2)}
print("ready", flush=True)
sys.stdin.readline()
for i in range(60):
    assert made.write("native", "shared", bytes([mine]) * 200_000)
    assert made.write("native", f"{mine} {i}", b"own")
    assert made.read("native", "shared") in contents, "a torn read"
"""


def test_processes_that_write_the_same_entry_at_once_never_meet(tmp_path: Path) -> None:
    """Each also evicts, so that files vanish under the other."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, str(module.__file__), str(n), str(tmp_path / "cache")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, err = writer.communicate(timeout=60)
        assert writer.returncode == 0, err
    assert 1 <= len(list((tmp_path / "cache").iterdir())) <= 8


def test_threads_that_write_at_once_never_meet(cache: Cache) -> None:
    wrong: list[object] = []

    def work(mine: int) -> None:
        for _ in range(30):
            if not cache.write("native", "k", bytes([mine]) * 50_000):
                wrong.append("not written")
            found = cache.read("native", "k")
            if found is None or len(set(found)) != 1 or len(found) != 50_000:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(list(cache.folder.iterdir())) == 1


def test_write_that_breaks_off_leaves_the_old_entry_and_no_part(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.write("rates", "k", b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not cache.write("rates", "k", b"new")
    assert not cache.write("rates", "k", b"new"), "and the second time it says nothing"
    assert cache.read("rates", "k") == b"old"
    assert len(list(cache.folder.iterdir())) == 1


def test_entry_is_on_the_disk_before_it_has_its_name(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fsync", "replace"):
        honest = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, honest=honest: (order.append(name), honest(*a))[1])
    assert cache.write("rates", "k", b"content")
    assert order == ["fsync", "replace"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder_is_read_and_not_written(cache: Cache) -> None:
    assert cache.write("rates", "k", b"content")
    cache.folder.chmod(0o500)
    try:
        assert cache.read("rates", "k") == b"content"
        with pytest.warns(RuntimeWarning, match="Permission denied"):
            assert not cache.write("rates", "l", b"content")
        assert cache.read("rates", "k") == b"content"
    finally:
        cache.folder.chmod(0o700)


def test_read_only_file_system_is_read_and_not_written(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.write("rates", "k", b"content")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(module.tempfile, "mkstemp", read_only)
    assert cache.read("rates", "k") == b"content"
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert not cache.write("rates", "l", b"content")
    assert not cache.write("rates", "m", b"content")


@pytest.mark.parametrize("below", ["", "deeper"])
def test_file_in_the_way_is_one_warning_and_no_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / below, 1 << 20, 100)
    with pytest.warns(RuntimeWarning, match="cannot keep anything in the cache folder"):
        assert cache.read("rates", "k") is None
    assert not cache.write("rates", "k", b"content")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use is later than the last: the clock of a file system may tick too slowly for a test."""
    ticks = iter(range(1_000_000_000, 2_000_000_000, 10))
    honest, replace = os.utime, os.replace

    def replaced(source: object, target: object) -> None:
        replace(source, target)  # type: ignore[arg-type]
        used(target)

    def used(path: object) -> None:
        tick = next(ticks)
        honest(path, (tick, tick))  # type: ignore[arg-type]

    monkeypatch.setattr(os, "utime", used)
    monkeypatch.setattr(os, "replace", replaced)


@pytest.mark.usefixtures("clock")
def test_least_recently_used_entries_go_when_there_are_too_many(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=1 << 20, limit_entries=3)
    for key in ("a", "b", "c"):
        assert cache.write("rates", key, b"content")
    assert cache.read("rates", "a") is not None, "used, so b is the oldest now"
    assert cache.write("rates", "d", b"content")
    assert [k for k in "abcd" if cache.read("rates", k) is not None] == ["a", "c", "d"]


@pytest.mark.usefixtures("clock")
def test_least_recently_used_entries_go_when_they_are_too_large(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=10_000, limit_entries=100)
    for key in ("a", "b", "c"):
        assert cache.write("rates", key, b"x" * 3_000)
    assert cache.path_of("rates", "a") is not None
    assert cache.write("rates", "d", b"x" * 6_000)
    assert [k for k in "abcd" if cache.read("rates", k) is not None] == ["a", "d"]


def test_new_entry_stays_even_if_the_clock_says_it_is_the_oldest(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=1 << 20, limit_entries=1)
    assert cache.write("rates", "a", b"content")
    (first,) = tmp_path.iterdir()
    os.utime(first, (time.time() + 1e6, time.time() + 1e6))
    assert cache.write("rates", "b", b"content")
    assert cache.read("rates", "b") == b"content"
    assert cache.read("rates", "a") is None


def test_entry_above_the_limit_is_not_written_and_drives_nothing_out(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=1_000, limit_entries=100)
    assert cache.write("rates", "a", b"content")
    with pytest.warns(RuntimeWarning, match="an entry of 2048 bytes is above the limit of 1000"):
        assert not cache.write("rates", "b", b"x" * 2_000)
    assert cache.read("rates", "a") == b"content"


def test_eviction_removes_what_killed_writers_left_and_nothing_that_is_not_ours(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=1_000, limit_entries=1)
    name = module._name("rates", "k")
    parts = [tmp_path / f"{name}.{part}.part" for part in ("dead", "alive")]
    others = [tmp_path / n for n in ("thesis.tex", f"{name}.txt", "rates-abc.json", "x.part")]
    for path in (*parts, *others):
        path.write_bytes(b"x" * 5_000)
    for path in (parts[0], *others):
        os.utime(path, (1, 1))
    assert cache.write("rates", "k", b"content")
    assert not parts[0].exists()
    assert all(path.exists() for path in (parts[1], *others))


def test_part_of_a_writer_that_was_killed_has_a_name_that_eviction_knows(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: None)  # the part stays, as if the process had ended here
    assert cache.write("rates", "k", b"content")
    part = only_file(cache)
    monkeypatch.undo()
    os.utime(part, (1, 1))
    assert cache.write("rates", "k", b"content")
    assert only_file(cache).name == module._name("rates", "k")


def test_usual_cache_is_where_the_environment_says_and_has_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAKEBACK_CACHE", str(tmp_path / "own"))
    assert open_cache() == Cache(tmp_path / "own", CACHE_BYTES, CACHE_ENTRIES)
    assert open_cache(tmp_path).folder == tmp_path
    monkeypatch.delenv("TAKEBACK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_cache().folder == tmp_path / "takeback"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert open_cache().folder == Path.home() / ".cache" / "takeback"


# ------------------------------------------------------------------------------------------------ native code


class Compiler:
    """A compiler that writes down its source, and how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self.source, self.calls = folder / "answer.cpp", folder / "calls"
        self.source.write_text("the answer")
        self.path = folder / "compiler"
        self.path.write_text(f'#!/bin/sh\necho >> {self.calls}\ncp "$1" "$3"\n')
        self.path.chmod(0o700)

    @property
    def count(self) -> int:
        return len(self.calls.read_text()) if self.calls.exists() else 0

    def load(self, cache: Cache, *built_from: str) -> str:
        def opened(path: Path) -> str:
            return path.read_bytes()[: len("the answer")].decode()

        return native.load(self.source, [], opened, cache=cache, compiler=str(self.path), built_from=built_from)


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_library_is_compiled_once_for_all_that_it_is_built_from(cache: Cache, compiler: Compiler) -> None:
    for _ in range(3):
        assert compiler.load(cache) == "the answer"
    assert compiler.count == 1
    compiler.load(cache, "another torch")
    assert compiler.count == 2
    compiler.source.write_text("The Answer")
    assert compiler.load(cache) == "The Answer"
    assert compiler.count == 3


def test_library_that_was_changed_is_never_opened(cache: Cache, compiler: Compiler) -> None:
    compiler.load(cache)
    path = only_file(cache)
    path.write_bytes(path.read_bytes().replace(b"the answer", b"EVIL CODE!"))
    assert compiler.load(cache) == "the answer"
    assert compiler.count == 2
    assert compiler.load(cache) == "the answer"
    assert compiler.count == 2, "it was not written anew"


def test_library_is_opened_without_a_cache(cache: Cache, compiler: Compiler) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write it"):
        assert compiler.load(cache) == "the answer"
    assert compiler.load(cache) == "the answer"
    assert compiler.count == 2


def test_library_that_cannot_be_opened_from_the_cache_is_opened_beside_it(cache: Cache, compiler: Compiler) -> None:
    """As in a folder that is mounted noexec: said once, and compiled in every process."""

    def opened(path: Path) -> str:
        if path.parent == cache.folder:
            raise OSError("failed to map segment from shared object")
        return "opened"

    def load() -> str:
        return native.load(compiler.source, [], opened, cache=cache, compiler=str(compiler.path))

    with pytest.warns(RuntimeWarning, match="failed to map segment"):
        assert load() == "opened"
    assert load() == "opened"
    assert compiler.count == 2
