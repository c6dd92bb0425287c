"""One folder of bytes that outlive a process: a kind and a key in, the bytes or the path of a file with them out.

Guaranteed: a folder or an entry that is not the user's own, or that others can write, is not used; what comes out is
what went in under that very kind and key and this version, or nothing; processes and threads that write at once never
meet; the folder stays within its limits, and the least recently used entries go first. To have no cache is never an
error: one warning for each folder says why there is none.

    content | SHA-256 of name and content | magic and version

is one file, so one rename replaces all of it. Loaders of shared libraries do not look behind the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

VERSION = 1
"""Of the format of an entry, and of what the kinds mean: entries of another version are not found."""

_ENTRY = re.compile(r"[a-z]+-[0-9a-f]{40}")
_PART = re.compile(r"[a-z]+-[0-9a-f]{40}\.[^.]+\.part")
_ABANDONED_S = 3600.0  #: a part this old has no writer any more

_warned: set[Path] = set()
_lock = threading.Lock()


@dataclass(frozen=True)
class Cache:
    """A folder that is made when first written, and how much it may hold. `options.open_cache` makes the usual one."""

    folder: Path
    limit_bytes: int
    limit_entries: int

    def read(self, kind: str, key: str) -> bytes | None:
        """What was written under this kind and key, unless it is gone, torn, changed or not ours."""
        return self._content(_name(kind, key))

    def path_of(self, kind: str, key: str) -> Path | None:
        """The file with what was written, checked as `read` checks it: for what only opens files, such as dlopen.

        The file ends with bytes of ours. It may be replaced or evicted at any time: an open one stays as it is.
        """
        name = _name(kind, key)
        return None if self._content(name) is None else self.folder / name

    def write(self, kind: str, key: str, data: bytes) -> bool:
        """Keep `data`, in place of what was there. False, after the warning, if that cannot be."""
        name = _name(kind, key)
        whole = b"".join((data, *_footer(name, data)))
        if len(whole) > self.limit_bytes:
            self.warn(f"an entry of {len(whole)} bytes is above the limit of {self.limit_bytes}")
            return False
        try:
            make_private(self.folder)
            if not self._is_ours():
                return False
            _write_whole(self.folder, name, whole)
            self._evict_(newest=name)
        except OSError as error:
            self.warn(str(error))
            return False
        return True

    def warn(self, why: str) -> None:
        """Say once in a process why this folder does not keep something."""
        with _lock:
            if self.folder in _warned:
                return
            _warned.add(self.folder)
        text = (
            f"takeback: cannot keep anything in the cache folder {self.folder}: {why}. Everything works, but native "
            "code is compiled and rates are measured anew in every process, which takes seconds. Make it a folder "
            "that you own and only you can write, or set TAKEBACK_CACHE to such a one."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _is_ours(self) -> bool:
        try:
            found = os.stat(self.folder)
        except FileNotFoundError:
            return False  # nothing was written yet
        except OSError as error:
            self.warn(str(error))
            return False
        fault = _fault(found) if stat.S_ISDIR(found.st_mode) else "it is not a folder"
        if fault is not None:
            self.warn(fault)
        return fault is None

    def _content(self, name: str) -> bytes | None:
        if not self._is_ours():
            return None
        path = self.folder / name
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:
                found = os.fstat(source.fileno())
                if not stat.S_ISREG(found.st_mode) or _fault(found) is not None:
                    return None
                whole = source.read()
        except OSError:
            return None  # gone, or not to be read: made anew, and then written or warned about
        content = whole[:-_FOOTER_BYTES]
        if whole[-_FOOTER_BYTES:] != b"".join(_footer(name, content)):
            return None
        with contextlib.suppress(OSError):  # a folder that cannot be written is as good to read
            os.utime(path)
        return content

    def _evict_(self, newest: str) -> None:
        """Remove what the limits do not allow, and what killed writers left. Other files in the folder are not ours."""
        entries: list[tuple[bool, int, str, int]] = []
        for item in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process evicts too
                found = item.stat(follow_symlinks=False)
                if _ENTRY.fullmatch(item.name):
                    entries.append((item.name == newest, found.st_mtime_ns, item.name, found.st_size))
                elif _PART.fullmatch(item.name) and time.time() - found.st_mtime > _ABANDONED_S:
                    os.unlink(item.path)
        held_bytes = 0
        for count, (_, _, name, size_bytes) in enumerate(sorted(entries, reverse=True), start=1):
            held_bytes += size_bytes
            if count > self.limit_entries or held_bytes > self.limit_bytes:
                (self.folder / name).unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Makes a folder for the user alone, if there is none."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def why_not_private(folder: Path) -> str | None:
    """Why what lies in a folder could be somebody else's; None if it is a folder that the user alone can write."""
    found = os.lstat(folder)
    return _fault(found) if stat.S_ISDIR(found.st_mode) else "it is a link, or no folder"


def _name(kind: str, key: str) -> str:
    """A file's name: any string is a key, and versions do not share files."""
    assert re.fullmatch(r"[a-z]+", kind), kind
    digest = hashlib.sha256(f"{VERSION}\0{kind}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{kind}-{digest[:40]}"


def _footer(name: str, content: bytes) -> tuple[bytes, bytes]:
    """The name is part of the digest: a file under another's name is as wrong as one with other content."""
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return digest.digest(), b"takeback%08d" % VERSION


_FOOTER_BYTES = hashlib.sha256().digest_size + len(b"takeback%08d" % VERSION)


def _fault(found: os.stat_result) -> str | None:
    """Why a folder or file cannot be trusted."""
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write it (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _write_whole(folder: Path, name: str, whole: bytes) -> None:
    """To a name of our own, to the disk, then in place: no reader sees a part, no other writer this file."""
    handle, own = tempfile.mkstemp(dir=folder, prefix=f"{name}.", suffix=".part")  # for the user alone
    try:
        with open(handle, "wb") as sink:
            sink.write(whole)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(own, folder / name)
    except BaseException:
        Path(own).unlink(missing_ok=True)
        raise
