"""The README and the pages of docs/ are true: their examples run, their links lead somewhere, their messages exist.

A block marked ```python is run; the blocks of one page share a namespace. One marked ```py needs another library, or
the processes of torchrun, and is run by a slow test. A block marked ```text output must be what the block before it
printed. The messages in the tables of docs/assumptions.md and docs/errors.md must be found in the source.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from takeback.compiler.explain.passes import passes_text
from takeback.compiler.passes.pipeline import PIPELINE
from takeback.predict import passes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
PYTHON, SLOW_PYTHON, OUTPUT = "python", "py", "text output"
ANY = "…"


@dataclass(frozen=True)
class Block:
    """A fenced block: what is written behind the fence, its first line's number (from 0), and its text."""

    kind: str
    line: int
    text: str


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    kind, start = None, 0
    lines = page.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("```"):
            if kind is None:
                kind, start = line[3:].strip(), i + 1
            else:
                found.append(Block(kind, start, "\n".join(lines[start:i])))
                kind = None
    assert kind is None, f"the block at line {start} is never closed"
    return found


def run_page(page: str, name: str, kinds: tuple[str, ...] = (PYTHON,)) -> None:
    """Runs the Python blocks of a page in order, and compares what they print with the output blocks."""
    namespace: dict[str, object] = {"__name__": "page"}
    printed = ""
    for block in blocks(page):
        if block.kind in kinds:
            # Under the page's own name and line, so that an error points into the page.
            code = compile("\n" * block.line + block.text, name, "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            printed = out.getvalue()
        elif block.kind == OUTPUT:
            assert printed.rstrip() == block.text.rstrip()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages may write files, and use torch's random numbers and threads as they like."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("elsewhere", "short_search")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_examples_of_page_run_and_print_what_it_says(page: Path) -> None:
    run_page(page.read_text(), str(page))


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_examples_of_page_print_what_it_says_after_a_whole_search(page: Path) -> None:
    run_page(page.read_text(), str(page))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the other libraries
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if f"```{SLOW_PYTHON}\n" in p.read_text()], ids=lambda path: path.name
)
def test_examples_with_other_libraries_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one process of torchrun's, which is what a group needs to be found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(True)  # it is one for a process, and pages have different ones
    run_page(page.read_text(), str(page), (PYTHON, SLOW_PYTHON))


def test_readme_has_an_example() -> None:
    assert any(block.kind == PYTHON for block in blocks((ROOT / "README.md").read_text()))


def test_a_wrong_output_is_noticed() -> None:
    page = "```python\nprint(1)\n```\n```text output\n{}\n```"
    run_page(page.format(1), "page.md")
    with pytest.raises(AssertionError):
        run_page(page.format(2), "page.md")


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.name)
def test_every_link_and_named_file_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_report_in_how_it_works_is_the_one_its_example_prints(elsewhere: None) -> None:
    found = blocks((ROOT / "docs" / "how-it-works.md").read_text())
    example = next(block for block in found if block.kind == PYTHON)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(example.text, "mlp.py", "exec", dont_inherit=True), {"__name__": "mlp"})
    [shown] = [block.text for block in found if "-- Fates" in block.text]
    assert without_seconds(out.getvalue().rstrip()) == without_seconds(shown.rstrip())


def without_seconds(report: str) -> str:
    """Seconds of the plans are others in each run; how they are shown is not."""
    head, plans, rest = report.partition("-- Plans")
    section, fates, more = rest.partition("-- Fates")
    section = re.sub(r"^once.*\n", "", section, flags=re.MULTILINE)
    return head + plans + re.sub(r" +\d+\.\d(?= )", " .", section) + fates + more


def test_program_in_how_it_works_is_the_one_its_example_records(elsewhere: None) -> None:
    found = blocks((ROOT / "docs" / "how-it-works.md").read_text())
    example = next(block for block in found if block.kind == PYTHON)
    namespace: dict[str, Any] = {"__name__": "mlp"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(example.text, "mlp.py", "exec", dont_inherit=True), namespace)
    [shown] = [block.text for block in found if "addmm(0.bias" in block.text]
    parts = [namespace[name] for name in ("model", "loss_fn", "optimizer", "x", "y")]
    assert shown.rstrip() in "\n".join(passes_text(passes(*parts)))


def test_how_it_works_names_the_passes_in_their_order_in_its_text_and_in_its_drawing() -> None:
    names = [stage.name for stage in PIPELINE]
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    assert re.findall(r"^\*\*(\w+)\*\* ", page, re.MULTILINE) == names
    [drawing] = [b.text for b in blocks(page) if "your step" in b.text]
    assert re.findall(rf"\b({'|'.join(names)})\b", drawing) == names


# -- messages ----------------------------------------------------------------------------------------------------


def template(node: ast.JoinedStr | ast.Constant) -> str:
    """A string of the source as one line, with ... for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)


@functools.cache
def messages() -> list[str]:
    found = []
    for path in sorted((ROOT / "src" / "takeback").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                found.append(template(node))
    return found


def is_real(message: str, known: list[str]) -> bool:
    """Whether the message is a part of a known one; its ... stands for whatever is there."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split(ANY)), re.DOTALL)
    return any(pattern.search(text) for text in known)


@pytest.mark.parametrize("page", ["assumptions.md", "errors.md"])
def test_messages_of_refusals_are_those_of_the_source(page: str) -> None:
    rows = re.findall(r"^\| `(?:\w+Error: )?([^`]+)` \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert len(rows) > 25
    known = messages()
    assert [row for row in rows if not is_real(row, known)] == []


def test_a_message_that_is_not_in_the_source_is_noticed() -> None:
    assert is_real("at least … of", ["there are at least … of them"])
    assert not is_real("the loss that … returned has form …", messages())
