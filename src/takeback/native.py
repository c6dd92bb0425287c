"""Compiles a C++ source once into the cache folder and opens the library: source and flags in, what `opened` gives out.

Guaranteed: the file's name says everything it was built from; processes that compile at once never meet; a torn file
is built anew; where the cache cannot be written the library is still opened, and why it was not kept is returned.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

Library = TypeVar("Library")


def load(
    source: Path,
    flags: Sequence[str],
    opened: Callable[[Path], Library],
    *,
    cache_dir: Path,
    compiler: str,
    built_from: Sequence[str] = (),
) -> tuple[Library, OSError | None]:
    """Open the library of `source`, found in the cache or compiled; and, if it could not be kept there, why.

    `built_from` is what else the library depends on: versions, the text of headers. Raises `RuntimeError` with what
    the compiler said, `OSError` or `subprocess.SubprocessError` where there is no library to open.
    """
    key = hashlib.sha256("\n".join([source.read_text(), *built_from, *flags]).encode()).hexdigest()[:24]
    target = cache_dir / f"{source.stem}-{key}.so"
    try:
        if target.exists():
            return opened(target), None
    except OSError:
        pass  # a torn file, or a folder we may not look into: built anew below
    with tempfile.TemporaryDirectory(prefix="takeback-") as folder:
        built = Path(folder) / f"{source.stem}.so"
        _run([compiler, str(source), "-o", str(built), *flags])
        try:
            return opened(_store(built, target)), None
        except OSError as error:
            unkept = error
        return opened(built), unkept  # stays mapped after the folder is gone


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"there is no compiler named {command[0]!r}") from error
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[:5])
        raise RuntimeError(f"{command[0]!r} exited with {done.returncode}: {said}")
    return done.stdout


def _store(built: Path, target: Path) -> Path:
    """Copy to a name of our own beside the target, then rename: processes that compile at once never meet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, own = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as sink, built.open("rb") as source:
            shutil.copyfileobj(source, sink)
        os.replace(own, target)
    except BaseException:
        Path(own).unlink(missing_ok=True)
        raise
    return target
