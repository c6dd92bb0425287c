"""The audit of generated code where the device's own allocator places: it passes what is written for real programs, and
finds every name that is dropped too early, too late, or stands for the wrong bytes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import takeback as tb
from takeback.compiler.layout import Layout, lay_out
from takeback.compiler.passes import Home, PassSettings, run_passes
from takeback.compiler.passes.draft import Overwrites
from takeback.compiler.program import Program, Region
from takeback.compiler.run.allocator_code import AllocatorCode, generate_for_allocator
from takeback.compiler.run.audit import audit
from takeback.errors import BorrowError

Lines = list[tuple[int, str]]


def recorded() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tb.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, memory="keep")
    step(torch.randn(5, 8), torch.randint(4, (5,)))
    assert step._last is not None
    return step._last.original


@pytest.fixture(scope="module")
def written() -> tuple[AllocatorCode, Layout]:
    layout = lay_out(run_passes(recorded(), settings=PassSettings(home=Home.ALLOCATOR)))
    return generate_for_allocator(layout), layout


def test_a_layout_without_an_arena_has_no_offsets(written: tuple[AllocatorCode, Layout]) -> None:
    layout = written[1]
    assert layout.arena is None
    assert layout.alive_bytes > 0


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("poison", [False, True])
def test_honest_code_passes(written: tuple[AllocatorCode, Layout], watched: bool, poison: bool) -> None:
    layout = written[1]
    code = generate_for_allocator(layout, watched=watched, poison=poison)
    audit(code.lines, code.claims, layout)


def drops(lines: Lines) -> list[int]:
    return [i for i, (_, text) in enumerate(lines) if re.fullmatch(r"(v\d+ = )+None", text)]


def test_every_drop_that_is_left_out_is_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    assert len(drops(lines)) > 10
    for i in drops(lines):
        with pytest.raises(BorrowError, match="which is dead"):
            audit(lines[:i] + lines[i + 1 :], code.claims, layout)


def test_every_drop_that_comes_one_op_too_early_is_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    for i in drops(lines):
        position, text = lines[i]
        start = next(k for k, (p, _) in enumerate(lines) if p == position)
        if any(
            name in line for name in re.findall(r"v\d+", text) for _, line in lines[start:i] if f"{name} = " in line
        ):
            continue  # made by this very op: there is no earlier place
        moved = [*lines[:start], (position, text), *lines[start:i], *lines[i + 1 :]]
        with pytest.raises(BorrowError):
            audit(moved, code.claims, layout)


def test_an_op_that_reads_another_value_of_the_same_size_is_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    found = tried = 0
    for i, (position, text) in enumerate(lines):
        called = re.fullmatch(r"(v\d+) = (f\d+)\((.*)\)", text)
        names = re.findall(r"\bv\d+\b", called[3]) if called else []
        alive = [n for n in code.claims if n not in text and any(f"{n} = " in t for _, t in lines[:i])]
        for name in names:
            for other in alive[-3:]:
                tried += 1
                changed = [*lines[:i], (position, re.sub(rf"\b{name}\b", other, text)), *lines[i + 1 :]]
                with pytest.raises(BorrowError):
                    audit(changed, code.claims, layout)
                found += 1
    assert found == tried > 10


def test_a_result_that_takes_new_bytes_where_it_was_to_overwrite_is_found(
    written: tuple[AllocatorCode, Layout],
) -> None:
    code, layout = written
    lines = list(code.lines)
    onto = [i for i, (_, text) in enumerate(lines) if re.search(r"out=v\d+\)$", text)]
    assert onto
    for i in onto:
        position, text = lines[i]
        name = text.rsplit("out=", 1)[1].rstrip(")")
        claims = {**code.claims, "v999": code.claims[name]}
        changed = [*lines[:i], (position, f"v999 = {text.replace(f', out={name}', '')}"), *lines[i + 1 :]]
        with pytest.raises(BorrowError):
            audit(changed, claims, layout)


def test_what_the_caller_gets_must_still_be_there(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    *lines, (position, text) = code.lines
    assert text.startswith("return [v")
    with pytest.raises(BorrowError, match="the step was to end with"):
        audit([*lines, (position, "return []")], code.claims, layout)


def test_product_onto_its_own_operand_is_found_whatever_the_plan_says(written: tuple[AllocatorCode, Layout]) -> None:
    draft = written[1].draft
    found = 0
    for position, op in enumerate(draft.program.ops):
        result = op.results[0] if op.results else None
        for operand in op.inputs if op.name == "mm" else ():
            if operand.buffer in written[1].alive and written[1].alive[operand.buffer].end == position + 1:
                assert isinstance(result, Region)
                placements = {**draft.placements, result.buffer: Overwrites(operand.buffer, position)}
                with pytest.raises(BorrowError, match="as it reads it"):
                    generate_for_allocator(lay_out(replace(draft, placements=placements)))
                found += 1
    assert found
