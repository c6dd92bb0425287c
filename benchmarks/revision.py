"""Which code a result was measured on: the commit, found when this is imported, before anything runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Results and pages are written by runs, so they say nothing about the code.
CODE = (".", ":!benchmarks/results", ":!docs", ":!*.md")


def _git(*asked: str) -> str | None:
    try:
        return subprocess.run(
            ("git", *asked), cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> str | None:
    """Of this checkout, and whether files that git knows were changed since; None where there is no git."""
    found = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *CODE)
    return found if not found or changed == "" else f"{found} with changes"


COMMIT = commit()


def told(abouts: Iterable[Mapping[str, Any]]) -> str:
    """As the end of a sentence, of what was measured: nothing where results name no commit."""
    found = dict.fromkeys(about["commit"] for about in abouts if about.get("commit"))
    short = [" ".join((name.split()[0][:10], *name.split()[1:])) for name in found]
    return f", commit {' and '.join(short)}" if short else ""
