"""Docstrings for the API reference: our tables of `name   what it means` become tables of Markdown.

A griffe extension, for mkdocstrings. `as_markdown` is a plain function of text.
"""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # the tests run as_markdown without the tools of the site
    Extension = object

ROW = re.compile(r"^(\w+(?:, \w+)*|`[^`]+`) {2,}(\S.*)$")
SURE = re.compile(r"^\w+ {3,}\S")
"""A row that needs no second one beside it."""


def as_markdown(text: str) -> str:
    """A row is a name, at least two spaces (three, if it is the only one) and text that may go on in lines below,
    indented."""
    out: list[str] = []
    rows: list[list[str]] = []

    def end() -> None:
        if rows:
            cells = (f"| `{name.strip('`')}` | {' '.join(words.split())} |".replace("||", "|") for name, words in rows)
            out.extend(["", "| | |", "|---|---|", *cells, ""])
        rows.clear()

    lines = text.splitlines()
    table = sum(ROW.match(line) is not None for line in lines) > 1
    for line in lines:
        match = ROW.match(line)
        if match and (table or SURE.match(line)):
            rows.append([match[1], match[2]])
        elif rows and line.startswith("  ") and line.strip():
            rows[-1][1] += " " + line.strip()
        else:
            end()
            out.append(line)
    end()
    return "\n".join(out)


class DocstringTables(Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
