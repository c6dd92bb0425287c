"""Who reads which bytes: found readers in, an `OverwriteError` with node, tensor, readers and lines out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from takeback.errors import OverwriteError
from takeback.guard.sites import NodeSite

WIDTH = 80
_INDENT = 12
_NO_LINE = "made before the guard was entered, or where no line is known"


@dataclass(frozen=True)
class Reader:
    """Somebody who can read some bytes later."""

    text: str  #: who, and as what
    site: NodeSite | None = None  #: where in the forward it was made
    node: bool = True  #: whether it is a node, which has such a place

    def __str__(self) -> str:
        return f"{self.text}, {_where(self.site)}" if self.node else self.text


@dataclass(frozen=True)
class Overwrite:
    """One tensor overwritten by one node."""

    node: str
    site: NodeSite | None
    tensor: str
    readers: Sequence[Reader]


def error_of(found: Sequence[Overwrite]) -> OverwriteError:
    """The error for what one node did."""
    first = found[0]
    lines = [_wrap(f"{first.node} overwrote {first.tensor}, which others can still read.", "")]
    lines += _row("made at", _where(first.site), first.site)
    for i, overwrite in enumerate(found):
        if i:
            lines.append(_wrap(f"it also overwrote {overwrite.tensor}.", ""))
        for reader in overwrite.readers:
            lines += _row("read by", reader.text, None)
            if reader.node:
                lines += _row("", _where(reader.site), reader.site)
    lines += _row("do", "write into a new tensor, or overwrite only what nobody else holds", None)
    return OverwriteError(
        "\n".join(lines),
        node=first.node,
        tensor=first.tensor,
        line=str(first.site) if first.site else None,
        readers=tuple(str(reader) for overwrite in found for reader in overwrite.readers),
    )


def _where(site: NodeSite | None) -> str:
    return str(site) if site is not None else _NO_LINE


def _row(label: str, text: str, site: NodeSite | None) -> list[str]:
    rows = [_wrap(text, f"  {label}")]
    if site is not None and site.text:
        source = site.text
        room = WIDTH - _INDENT - 2
        rows.append(" " * (_INDENT + 2) + (source if len(source) <= room else source[: room - 3] + "..."))
    return rows


def _wrap(text: str, label: str) -> str:
    indent = " " * _INDENT if label else ""
    return textwrap.fill(
        text, WIDTH, initial_indent=label.ljust(len(indent)), subsequent_indent=indent, break_on_hyphens=False
    )
