"""Compiles a C++ source once into the cache and opens the library: source and flags in, what `opened` gives out.

Guaranteed: a library is found again only if everything it was built from is the same, and opened from the cache only
after its digest was checked; one that cannot be opened is built anew; without a cache the library is opened all the
same, and the cache has warned.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from takeback.cache import Cache
from takeback.progress import Doing, Work

Library = TypeVar("Library")


def load(
    source: Path,
    flags: Sequence[str],
    opened: Callable[[Path], Library],
    *,
    cache: Cache,
    compiler: str,
    built_from: Sequence[str] = (),
) -> Library:
    """Open the library of `source`, found in the cache or compiled.

    `built_from` is what else the library depends on: versions, the text of headers. Raises `RuntimeError` with what
    the compiler said, `OSError` or `subprocess.SubprocessError` where there is no library to open.
    """
    key = "\n".join([source.name, source.read_text(), *built_from, *flags])
    found = cache.path_of("native", key)
    if found is not None:
        try:
            return opened(found)
        except OSError:
            pass  # evicted just now, or built where other libraries are: built anew below
    with tempfile.TemporaryDirectory(prefix="takeback-") as folder:
        built = Path(folder) / f"{source.stem}.so"
        work = Work(f"{source.name}, once")
        with work.inside, work:
            work.begin(Doing.COMPILING)
            _compile([compiler, str(source), "-o", str(built), *flags])
        kept = cache.path_of("native", key) if cache.write("native", key, built.read_bytes()) else None
        if kept is not None:
            try:
                return opened(kept)
            except OSError as error:
                cache.warn(str(error))  # a folder that code may not run from
        return opened(built)  # stays mapped after the folder is gone


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"there is no compiler named {command[0]!r}") from error
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[:5])
        raise RuntimeError(f"{command[0]!r} exited with {done.returncode}: {said}")
