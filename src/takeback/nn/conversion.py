"""What `convert` did with a model, as data and as a table."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass

from takeback.nn.find_norms import Kept

WIDTH = 80
BATCH_NORM = "batch norm"


@dataclass(frozen=True)
class Changed:
    """A module that was replaced: `became` what, and why that form. `activation`: what a batch norm took with it."""

    path: str
    activation: str
    became: str
    reason: str
    what: str = BATCH_NORM


@dataclass(frozen=True)
class Conversion:
    """What `convert` did with each part of a model that it knows; `str()` is a table."""

    changed: tuple[Changed, ...]
    kept: tuple[Kept, ...]

    def __str__(self) -> str:
        counts = Counter(changed.what for changed in self.changed)
        many = ", ".join(f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts.items())
        lines = [f"{many or 'nothing'} converted, {len(self.kept)} kept"]
        groups: dict[tuple[str, str], list[str]] = {}
        for changed in self.changed:
            taken = f" <- {changed.activation}" if changed.activation else ""
            groups.setdefault((changed.became, changed.reason), []).append(f"{changed.path or 'the model'}{taken}")
        for kept in self.kept:
            groups.setdefault(("kept", kept.reason), []).append(kept.path or "the model")
        for (became, reason), members in groups.items():
            lines += ["", *_wrapped(f"{became}: {reason}", "")]
            lines += [line for member in members for line in _wrapped(member, "    ")]
        return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent or "    ", break_on_hyphens=False)
