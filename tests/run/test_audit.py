"""The audit of generated code where the device's own allocator places: it passes what is written for real programs, and
finds every name that is dropped too early, too late, or stands for the wrong bytes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import takeback as tb
from takeback import zoo
from takeback.compiler.explain.half import Autocast
from takeback.compiler.layout import Layout, lay_out
from takeback.compiler.passes import Home, PassSettings, run_passes
from takeback.compiler.passes.draft import Overwrites
from takeback.compiler.program import Program, Region
from takeback.compiler.run.allocator_code import AllocatorCode, generate_for_allocator
from takeback.compiler.run.audit import audit
from takeback.compiler.run.gpu_table import gpu_named
from takeback.errors import BorrowError
from takeback.options import Options
from takeback.tracing import TracedStep, planned

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
    audit(code.lines, code.meant, layout)


def drops(lines: Lines) -> list[int]:
    return [i for i, (_, text) in enumerate(lines) if re.fullmatch(r"(v\d+ = )+None", text)]


def test_every_drop_that_is_left_out_is_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    assert len(drops(lines)) > 10
    for i in drops(lines):
        with pytest.raises(BorrowError, match="which is dead"):
            audit(lines[:i] + lines[i + 1 :], code.meant, layout)


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
            audit(moved, code.meant, layout)


def test_bytes_that_are_poisoned_under_another_name_before_they_are_read_are_found(
    written: tuple[AllocatorCode, Layout],
) -> None:
    code = generate_for_allocator(written[1], poison=True)
    lines = list(code.lines)
    early = 0
    for i, (position, text) in enumerate(lines):
        start = next(k for k, (p, _) in enumerate(lines) if p == position)
        if text.startswith("poison(") and not any(text[7:-1] in t.partition("=")[0] for _, t in lines[start:i]):
            early += 1
            with pytest.raises(BorrowError):
                audit([*lines[:start], (position - 1, text), *lines[start:i], *lines[i + 1 :]], code.meant, written[1])
    assert early > 5


def test_an_op_that_reads_another_value_of_the_same_size_is_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    found = tried = 0
    for i, (position, text) in enumerate(lines):
        called = re.fullmatch(r"(v\d+) = (f\d+)\((.*)\)", text)
        names = re.findall(r"\bv\d+\b", called[3]) if called else []
        alive = [n for n in code.meant.claims if n not in text and any(f"{n} = " in t for _, t in lines[:i])]
        for name in names:
            for other in alive[-3:]:
                tried += 1
                changed = [*lines[:i], (position, re.sub(rf"\b{name}\b", other, text)), *lines[i + 1 :]]
                with pytest.raises(BorrowError):
                    audit(changed, code.meant, layout)
                found += 1
    assert found == tried > 10


def calls(lines: Lines, pattern: str) -> list[tuple[int, int, str]]:
    return [(i, position, text) for i, (position, text) in enumerate(lines) if re.search(pattern, text)]


def test_operands_that_have_changed_places_are_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    tried = 0
    for i, position, text in calls(lines, r"= f\d+\(|out="):
        names = list(dict.fromkeys(re.findall(r"\b[vtx]\d+\b", text.partition("(")[2])))
        for one, other in itertools.combinations(names, 2):
            swapped = re.sub(rf"\b({one}|{other})\b", lambda m, a=one, b=other: b if m[0] == a else a, text)
            if swapped.partition("(")[0] == text.partition("(")[0]:
                tried += 1
                with pytest.raises(BorrowError):
                    audit([*lines[:i], (position, swapped), *lines[i + 1 :]], code.meant, layout)
    assert tried > 30


def test_results_that_have_changed_places_are_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    several = calls(lines, r"^v\d+, v\d+, .*= f\d+")
    assert several
    for i, position, text in several:
        one, other = re.findall(r"v\d+", text)[:2]
        swapped = text.replace(f"{one}, {other},", f"{other}, {one},", 1)
        with pytest.raises(BorrowError, match="takes another result"):
            audit([*lines[:i], (position, swapped), *lines[i + 1 :]], code.meant, layout)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_another_kernel_number_or_order_of_scalars_is_found(written: tuple[AllocatorCode, Layout], every: int) -> None:
    code, layout = written
    lines = list(code.lines)
    functions = [name for name in code.constants if name.startswith("f")]
    numbers = [name for name in code.constants if name.startswith("n")]
    other = {name: next(f for f in functions if code.constants[f] != code.constants[name]) for name in functions}
    other |= {name: next(n for n in numbers if code.constants[n] != code.constants[name]) for name in numbers}
    found = {"f": 0, "n": 0, "S": 0}
    for i, position, text in calls(lines, r"f\d+\(")[::every]:
        for name in {*re.findall(r"\b[fn]\d+\b", text), *re.findall(r"S\[\d+\]", text)}:
            instead = other.get(name, "S[99]")
            changed = re.sub(rf"{re.escape(name)}(?!\d)", instead, text)
            with pytest.raises(BorrowError):
                audit([*lines[:i], (position, changed), *lines[i + 1 :]], code.meant, layout)
            found[name[0]] += 1
    assert min(found.values()) > 3, found


def test_a_look_with_another_geometry_is_found(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    lines = list(code.lines)
    looks = calls(lines, r"= (as_strided|over|empty_strided|raw)\(")
    assert looks
    for i, position, text in looks:
        changed = re.sub(r"\((\d+),", lambda m: f"({int(m[1]) + 1},", text, count=1)
        assert changed != text
        with pytest.raises(BorrowError, match="is not the look that"):
            audit([*lines[:i], (position, changed), *lines[i + 1 :]], code.meant, layout)
    [*others, last] = code.meant.prologue
    spoiled = replace(code.meant, prologue=[*others, re.sub(r"B\[\d+\]", "B[7]", last)])
    with pytest.raises(BorrowError, match="look into the batch"):
        audit(lines, spoiled, layout)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_call_that_is_left_out_or_made_twice_is_found(written: tuple[AllocatorCode, Layout], every: int) -> None:
    code, layout = written
    lines = list(code.lines)
    for i, _, _ in calls(lines, r"f\d+\(")[::every]:
        for changed in (lines[:i] + lines[i + 1 :], [*lines[: i + 1], *lines[i:]]):
            with pytest.raises(BorrowError):
                audit(changed, code.meant, layout)


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
        claims = {**code.meant.claims, "v999": code.meant.claims[name]}
        changed = [*lines[:i], (position, f"v999 = {text.replace(f', out={name}', '')}"), *lines[i + 1 :]]
        with pytest.raises(BorrowError):
            audit(changed, replace(code.meant, claims=claims), layout)


def test_what_the_caller_gets_must_still_be_there(written: tuple[AllocatorCode, Layout]) -> None:
    code, layout = written
    *lines, (position, text) = code.lines
    assert text.startswith("return [v")
    with pytest.raises(BorrowError, match="the step was to end with"):
        audit([*lines, (position, "return []")], code.meant, layout)


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


class Headed(nn.Module):
    """Logits that are large enough for a GPU to be cut into parts, with a vocabulary that it likes to have padded."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 20011)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.body(x)))


def on_a_gpu(name: str, mode: str) -> Layout:
    """A plan for an H200, which need not be there, under autocast."""
    if name == "headed":
        model: nn.Module = Headed()
        case = zoo.Case(
            name,
            model,
            lambda m, x, y: F.cross_entropy(m(x), y),
            torch.optim.AdamW(model.parameters()),
            (torch.zeros(6144, 16), torch.zeros(6144, dtype=torch.long)),
        )
    else:
        case = zoo.case(name)
    options, gpu = Options(mode=mode, memory="auto"), gpu_named("H200")
    loss_fn = Autocast(case.loss_fn, "cuda")
    step = TracedStep(case.model, loss_fn, case.optimizer, case.batch, {}, options, gpu)
    return planned(step.traced().finished, options, gpu=gpu).layout


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    ("name", "mode"),
    [("headed", "fast"), ("gpt", "fast"), pytest.param("resnet", "exact", marks=pytest.mark.slow)],
)
def test_honest_code_for_a_gpu_passes(name: str, mode: str) -> None:
    layout = on_a_gpu(name, mode)
    called = {str(op.target) for op in layout.program.ops}
    assert name != "headed" or {"aten.mm.dtype_out", "aten.addmm.dtype_out"} <= called
    for watched in (False, True):
        generate_for_allocator(layout, watched=watched, poison=watched)
