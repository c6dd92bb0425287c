"""What mkdocs needs besides the pages: README and its like become pages, and linked files come along.

In: the repository's own links, which lead from file to file and work wherever its files are shown. Out: links of the
site. `site_link` is a plain function, so that tests/test_site.py follows every link without building the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages of the site that lie outside docs/."""
HEADS = {"CHANGELOG.md": "---\nsearch:\n  boost: 0.2\n---\n"}
"""It mentions everything, and explains nothing: the search names other pages first."""
FILES = "files"
"""Where copies of other linked files are, in the site."""
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
ELSEWHERE = ("http://", "https://", "mailto:", "#")
WORKER = "https://unpkg.com/iframe-worker/shim", "assets/worker-in-a-folder.js"
"""What the theme loads from elsewhere so that search works in a folder, and what takes its place."""
LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="((?:https?:)?//[^"]+)"|'
    r'<link\b(?=[^>]*rel="(?:stylesheet|preconnect|preload)")[^>]*\bhref="((?:https?:)?//[^"]+)"'
)
"""What a page would load from another site."""


def site_link(link: str, source: Path) -> str | None:
    """Where a link of the file `source` leads in the site, from its root; None: a folder, which the site has not."""
    name, mark, anchor = link.partition("#")
    target = Path(os.path.normpath(source.parent / name))
    if target.is_dir():
        return None
    if target.is_relative_to(DOCS):
        at = target.relative_to(DOCS).as_posix()
    else:
        at = target.relative_to(ROOT).as_posix()
        at = PAGES.get(at, f"{FILES}/{at}")
    return at + mark + anchor


def for_site(markdown: str, source: Path) -> str:
    """The text of a page with the links of the site. All pages lie at its root, so these need no way up."""

    def replaced(match: re.Match[str]) -> str:
        link = match[0]
        return link if link.startswith(ELSEWHERE) else (site_link(link, source) or "")

    text = LINK.sub(replaced, markdown.replace("```text output", "```text"))  # that word is for tests/test_docs.py
    return re.sub(r"(?<!!)\[([^\]]*)\]\(\)", r"\1", text)  # what linked to a folder is text


def by_itself(html: str) -> str:
    """A page that loads nothing from elsewhere; raises if it does."""
    html = html.replace(*WORKER)
    if loaded := [script or style for script, style in LOADED.findall(html)]:
        raise ValueError(f"a page loads {loaded[0]}: the site loads nothing from elsewhere")
    return html


def linked_files() -> dict[str, Path]:
    """Files outside docs/ that pages link to: their place in the site, and where they are."""
    found: dict[str, Path] = {}
    for source in sources():
        for link in LINK.findall(source.read_text(encoding="utf-8")):
            at = None if link.startswith(ELSEWHERE) else site_link(link, source)
            if at is not None and at.startswith(f"{FILES}/"):
                at = at.partition("#")[0]
                found[at] = ROOT / at.removeprefix(f"{FILES}/")
    return dict(sorted(found.items()))


def sources() -> list[Path]:
    """Every file that becomes a page."""
    return [*(ROOT / name for name in PAGES), *sorted(DOCS.glob("*.md"))]


# -- called by mkdocs ----------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, at in PAGES.items():
        head = HEADS.get(name, "")
        files.append(File.generated(config, at, content=head + (ROOT / name).read_text(encoding="utf-8")))
    for at, path in linked_files().items():
        files.append(File.generated(config, at, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    names = {at: ROOT / name for name, at in PAGES.items()}
    return for_site(markdown, names.get(page.file.src_uri, DOCS / page.file.src_uri))


def on_post_page(output: str, page: Any, config: Any) -> str:
    return by_itself(output)
