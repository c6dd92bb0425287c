"""The documentation site, which `make docs` builds, without building it: navigation, links, reference, figures."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import takeback as tb

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    """A file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


HOOKS, PLOTS, DOCSTRINGS = script("site_hooks"), script("plots"), script("site_docstrings")
SOURCES: list[Path] = HOOKS.sources()
API = (DOCS / "api.md").read_text()


def test_navigation_has_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert nav
    pages = sorted([path.name for path in DOCS.glob("*.md")] + list(HOOKS.PAGES.values()))
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == pages


def prose(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """As GitHub and pymdownx write it, so that a link leads to the same place in both."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(title) for title in re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)}


ANCHORS = {path: anchors(path) for path in SOURCES}


@pytest.mark.parametrize("page", SOURCES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def broken(page: Path, text: str) -> list[str]:
    found = []
    for link in HOOKS.LINK.findall(prose(text)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, part = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (part and part not in ANCHORS.get(target, set())):
            found.append(link)
    return found


def test_a_broken_link_is_noticed() -> None:
    text = "[a](memory.md) [b](nowhere.md) [c](memory.md#nowhere) [d](#memory) [e](../README.md#use-it)"
    assert broken(DOCS / "modes.md", text) == ["nowhere.md", "memory.md#nowhere", "#memory"]


def test_links_of_the_repository_become_links_of_the_site() -> None:
    text = "[a](docs/memory.md#x) [b](LICENSE) [c](CONTRIBUTING.md) [d](tests/guard) ![e](docs/assets/f.svg) [g](#h)"
    expected = "[a](memory.md#x) [b](files/LICENSE) [c](contributing.md) d ![e](assets/f.svg) [g](#h)"
    assert HOOKS.for_site(text, ROOT / "README.md") == expected
    assert HOOKS.for_site("[a](../README.md#use-it)", DOCS / "memory.md") == "[a](index.md#use-it)"
    assert all(path.is_file() for path in HOOKS.linked_files().values())


def test_page_that_loads_something_from_elsewhere_is_noticed() -> None:
    script, _ = HOOKS.WORKER
    page = f'<script src="{script}"></script><img src="assets/a.svg"><a href="https://example.org">there</a>'
    assert HOOKS.by_itself(page) == page.replace(*HOOKS.WORKER)
    assert (DOCS / HOOKS.WORKER[1]).is_file()
    for loads in ('<img src="https://a.b/c.png">', '<link rel="stylesheet" href="//a.b/c.css">'):
        with pytest.raises(ValueError, match="loads nothing from elsewhere"):
            HOOKS.by_itself(page + loads)


PAGE = """<!DOCTYPE html><body><script src="%s"></script><script>
const worker = new Worker("worker.js");
worker.addEventListener("message", (e) => { document.body.dataset.said = e.data; });
worker.postMessage(20);
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium")
def test_worker_runs_in_a_page_that_is_read_from_a_folder(tmp_path: Path) -> None:
    """A browser starts none there: without this the site has no search."""
    (tmp_path / "worker.js").write_text("addEventListener('message', (e) => postMessage(e.data + 1));")
    page = tmp_path / "page.html"
    page.write_text(PAGE % (DOCS / HOOKS.WORKER[1]).as_uri())
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 'data-said="21"' in done.stdout


# -- reference -----------------------------------------------------------------------------------------------------


def test_every_public_name_has_a_docstring_and_is_in_the_reference() -> None:
    directives = set(re.findall(r"^::: (\S+)$", API, re.MULTILINE))
    # Functions named as their modules are found by the function's own path.
    written = {re.sub(r"^takeback\.(\w+)\.\1$", r"takeback.\1", name) for name in directives}
    assert {f"takeback.{name}" for name in tb.__all__} - written == set()
    assert [name for name in tb.__all__ if not documented(getattr(tb, name))] == []


@pytest.mark.parametrize("module", [tb.nn, tb.optim, tb.bucket], ids=lambda module: module.__name__)
def test_every_public_name_of_a_module_has_a_docstring_and_is_in_the_reference(module: ModuleType) -> None:
    part = API.partition(f"::: {module.__name__}\n")[2].partition("\n## ")[0]
    [members] = re.findall(r"members: \[(.+)\]", part)
    assert sorted(members.split(", ")) == sorted(module.__all__)
    assert [name for name in module.__all__ if not documented(getattr(module, name))] == []


def documented(thing: object) -> bool:
    if not isinstance(thing, type) and not callable(thing) and not isinstance(thing, ModuleType):
        return True  # a table: the comment beside it is for readers of the source
    return bool(inspect.getdoc(thing)) and inspect.getdoc(thing) != inspect.getdoc(type(thing).__mro__[-1])


def test_every_public_error_has_a_place_among_the_error_messages() -> None:
    titles = re.findall(r"^## (\w+Error)$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    errors = {name for name in tb.__all__ if name.endswith("Error")} - {"TakebackError"}
    assert errors - set(titles) == set()


def test_tables_of_docstrings_become_tables_of_the_page() -> None:
    text = "Does it.\n\nfirst    one\n         more of it\nsecond   two\n\nEnd."
    table = "Does it.\n\n\n| | |\n|---|---|\n| `first` | one more of it |\n| `second` | two |\n\n\nEnd."
    assert DOCSTRINGS.as_markdown(text) == table
    assert DOCSTRINGS.as_markdown("Just  a line.\n\n    code = 1") == "Just  a line.\n\n    code = 1"


# -- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLOTS.PLOTS)
def test_picture_is_drawn_from_the_committed_results(name: str) -> None:
    """If not: python docs/plots.py"""
    assert (DOCS / "assets" / name).read_text(encoding="utf-8") == PLOTS.drawn(name)


def test_every_picture_has_a_page_and_every_page_its_pictures() -> None:
    shown = {name for path in SOURCES for name in re.findall(r"assets/([\w-]+\.svg)", path.read_text())}
    assert shown == set(PLOTS.PLOTS) == {path.name for path in (DOCS / "assets").glob("*.svg")}


def test_table_of_the_readme_has_the_committed_figures() -> None:
    rows = json.loads((ROOT / "benchmarks/results/gpu-h200.json").read_text())["rows"]
    found = {(row["model"], row["system"]): f"{row['ms']:.0f} ms, {row['peak_mib'] / 1024:.1f} GiB" for row in rows}
    systems = {"auto": "fast@auto", "keep": "fast@keep", "torch.compile": "compile"}
    lines = re.findall(r"^\| ([^|]+) \| (.*\d ms.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == len(systems)
    for label, cells in lines:
        [system] = [value for key, value in systems.items() if key in label]
        for model, cell in zip(("gpt2", "llama", "bert", "resnet50"), cells.split(" | "), strict=True):
            assert cell.replace("*", "") == found.get((model, system), "–"), (label, model)


def test_table_of_gpu_steps_has_the_committed_figures() -> None:
    rows = json.loads((ROOT / "benchmarks/results/gpu-h200.json").read_text())["rows"]
    page = (DOCS / "benchmarks.md").read_text().replace("*", "")
    for row in rows:
        assert f"{row['ms']:.1f}" in page, row["model"]
        assert f"{row['peak_mib']:.0f}, {row['reserved_mib']:.0f}" in page, row["model"]
