"""The list of passes is what runs: for every home and every `memory=`, no pass is idle for nothing, and a broken one is
found at its own door."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import takeback as tb
from takeback.compiler.form import FormError
from takeback.compiler.layout import lay_out
from takeback.compiler.passes import PIPELINE, Draft, Home, PassSettings, Stage, run_passes
from takeback.compiler.passes.recompute import Below, Chooser, Goal, Keep, Lowest, Within
from takeback.compiler.passes.reduce import Sharing, Slice
from takeback.compiler.program import Op, Program
from takeback.flat import cut
from takeback.flat import lay_out as lay_out_flat

EXACT = ("unread", "functionalize", "move", "chunk_loss", "reduce", "advance", "recompute", "overwrite", "pack")
FUSING = ("fuse", "gather", "shadow", "postpone")
NAMES = (
    *EXACT[:3],
    *("align", "pool", "chunk_loss", "chunk_head"),
    *EXACT[4:6],
    *FUSING,
    *("recompute", "join", "bundle"),
    *EXACT[7:],
)
ONLY_FAST = frozenset(("align", "pool", "chunk_head", *FUSING, "join", "bundle"))
#: test_align.py, test_shadow.py ...
ELSEWHERE = frozenset(("unread", "align", "pool", "gather", "shadow", "postpone", "join", "bundle"))


class Net(nn.Module):
    """A bit of everything that a pass looks for: an in-place op, a clone, wide values over the peak, a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 64)
        self.outer = nn.Linear(64, 16)
        self.head = nn.Linear(16, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = F.gelu(self.inner(x)).clone()
            x = x + self.outer(h.mul_(0.5))
        return self.head(x)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = tb.compile_step(
        model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, memory="keep", update="early"
    )  # one update op for each parameter, as `advance` wants it
    step(torch.randn(512, 16), torch.randint(2048, (512,)))
    plan = step._last
    assert plan is not None
    return plan.original


def sharing(program: Program) -> Sharing:
    grads = program.grads
    flat = lay_out_flat([(len(grads), torch.float32), *((r.numel, r.dtype) for r in grads.values())])
    slices = tuple(Slice(i, r.dtype, r.shape, r.stride) for i, r in grads.items())
    return Sharing(slices, cut(flat, 1 << 16))


def by_numel(op: Op) -> float:
    return 1e-9 * sum(r.numel for r in (*op.inputs, *op.outputs))


def ran(program: Program, settings: PassSettings) -> tuple[list[str], Draft]:
    seen: list[str] = []

    def watch(name: str, before: Draft, after: Draft | str) -> None:
        assert before.passes == tuple(seen)
        if isinstance(after, Draft):
            seen.append(name)
        else:
            assert after, "a pass that has nothing to do says why"

    return seen, run_passes(program, settings=settings, watch=watch)


def test_the_list_is_what_the_documents_say() -> None:
    assert tuple(stage.name for stage in PIPELINE) == NAMES


@pytest.mark.parametrize("goal", [Keep(), Lowest(), Within(0.05), Below(1 << 20)], ids=lambda g: type(g).__name__)
@pytest.mark.parametrize("home", Home, ids=lambda h: h.name)
def test_what_ran_is_the_list_less_the_stages_that_say_why_not(program: Program, home: Home, goal: Goal) -> None:
    settings = PassSettings(home=home, goal=goal, chooser=Chooser(by_numel, 60.0))
    seen, draft = ran(program, settings)
    assert seen == [stage.name for stage in PIPELINE if stage.idle(settings) is None]
    assert draft.passes == tuple(seen)
    left_out = set(NAMES) - set(seen)
    assert left_out == (
        {"reduce", "advance"}
        | ONLY_FAST
        | ({"recompute"} if isinstance(goal, Keep) else set())
        | ({"pack"} if home is Home.ALLOCATOR else set())
    )


def test_early_update_and_a_group_bring_their_passes_in(program: Program) -> None:
    assert "advance" in ran(program, PassSettings(early=True))[0]
    assert "pack" not in ran(program, PassSettings(early=True))[0]
    assert "reduce" in ran(program, PassSettings(sharing=sharing(program)))[0]


@pytest.mark.parametrize("memory", ["keep", "auto", "min", "0.9x", "1GiB"])
def test_a_compiled_step_went_through_the_list(memory: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 2))
    step = tb.compile_step(
        model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), memory=memory
    )
    step(torch.randn(256, 8))
    plan = step._last
    assert plan is not None
    idle = {"reduce", "advance"} | ONLY_FAST | ({"recompute"} if memory == "keep" else set())
    assert plan.executor.layout.draft.passes == tuple(n for n in NAMES if n not in idle)


def digest(draft: Draft) -> tuple[object, ...]:
    layout = lay_out(draft)
    arena = layout.arena
    return str(draft.program), draft.placements, layout.alive_bytes, arena and (arena.offsets, arena.size_bytes)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ELSEWHERE])
def test_leaving_a_pass_out_changes_a_plan(program: Program, name: str) -> None:
    settings = {
        "reduce": PassSettings(sharing=sharing(program)),
        "advance": PassSettings(early=True),
        "chunk_head": PassSettings(fast=True),
        "fuse": PassSettings(fast=True),
        "recompute": PassSettings(goal=Lowest(), chooser=Chooser(by_numel, 60.0)),
    }.get(name, PassSettings())
    with_it = run_passes(program, settings=settings)
    assert name in with_it.passes
    without = run_passes(program, settings=settings, stages=[s for s in PIPELINE if s.name != name])
    if name == "overwrite":  # what fills the placement table: without it every value has bytes of its own
        assert lay_out(without).alive_bytes > lay_out(with_it).alive_bytes
    assert digest(with_it) != digest(without)


def broken_reader(draft: Draft) -> Draft:
    """Drops the op whose result the loss is made of."""
    program = draft.program
    maker = next(i for i, op in enumerate(program.ops) if any(r.buffer == program.loss.buffer for r in op.outputs))
    return replace(draft, program=replace(program, ops=(*program.ops[:maker], *program.ops[maker + 1 :])))


def broken_buffer(draft: Draft) -> Draft:
    """Makes a buffer smaller than what is looked at."""
    program = draft.program
    b = next(op.outputs[0].buffer for op in program.ops if op.outputs and op.outputs[0].numel > 4)
    buffers = {**program.buffers, b: replace(program.buffers[b], size_bytes=4)}
    return replace(draft, program=replace(program, buffers=buffers))


@pytest.mark.parametrize("sabotage", [broken_reader, broken_buffer])
@pytest.mark.parametrize("place", range(3))
def test_a_broken_pass_is_found_at_its_own_door(program: Program, sabotage: Any, place: int) -> None:
    seen: list[str] = []
    stages = [*PIPELINE[:place], Stage(sabotage), *PIPELINE[place:]]
    with pytest.raises(FormError):
        run_passes(program, stages=stages, watch=lambda name, before, after: seen.append(name))
    assert seen == [stage.name for stage in PIPELINE[:place]], "the pass after the broken one never ran"


def test_a_stage_before_which_to_stop_is_not_run(program: Program) -> None:
    from takeback.compiler.passes.overwrite import overwrite

    draft = run_passes(program, before=overwrite)
    assert draft.placements == {}
    assert draft.passes == ("unread", "functionalize", "move", "chunk_loss")
