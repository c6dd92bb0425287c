"""Small programs to choose for, and any consistent choice for them.

A program here is drawn, not recorded: sizes, operands and phases are all that planning looks at.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import takeback as tb
from takeback.compiler.passes import Draft, run_passes
from takeback.compiler.passes.candidates import candidates, choice_of
from takeback.compiler.passes.draft import Choice
from takeback.compiler.passes.recompute import recompute
from takeback.compiler.plan.rebuild_rows import RebuildRows
from takeback.compiler.program import Buffer, BufferId, Op, Phase, Program, Region, Role

aten = torch.ops.aten

Recipe = list[tuple[str, int, int, int]]


def recorded(model: nn.Module, loss_fn: Any, *batch: Any) -> Program:
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory="keep")
    step(*batch)
    return step._plans[0].original


def draft_of(program: Program) -> Draft:
    """What recompute gets to see."""
    return run_passes(program, before=recompute)


def a_second(op: Op) -> float:
    return 1.0


class Writer:
    """Writes a program op by op; every value is a row of floats."""

    def __init__(self) -> None:
        self.buffers: dict[BufferId, Buffer] = {}
        self.ops: list[Op] = []
        self.batch = self.value(64, Role.BATCH)

    def value(self, elements: int, role: Role = Role.INTERNAL) -> Region:
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, 4 * elements, role)
        return Region(ident, torch.float32, (elements,), (1,), 0)

    def op(self, target: Any, *args: Any, elements: int | None = None, phase: Phase = Phase.FORWARD) -> Region:
        result = self.value(elements if elements is not None else next(a for a in args if isinstance(a, Region)).numel)
        self.ops.append(Op(target, args, {}, (result,), phase=phase))
        return result

    def program(self, loss: Region) -> Program:
        return Program(tuple(self.ops), self.buffers, {}, {self.batch.buffer: 0}, loss)


def written(recipe: Recipe) -> Program:
    """A forward after the recipe, then a backward that reads the values of the forward from last to first."""
    w = Writer()
    values = [w.op(aten.mm.default, w.batch, w.batch, elements=64)]
    for kind, first, second, elements in recipe:
        a, b = (values[-1 - n % len(values)] for n in (first, second))
        same = [v for v in values if v.numel == a.numel]
        if kind == "gelu":
            values.append(w.op(aten.gelu.default, a))
        elif kind == "add":
            values.append(w.op(aten.add.Tensor, a, same[-1 - second % len(same)]))
        elif kind == "mm":
            values.append(w.op(aten.mm.default, a, b, elements=elements))
        elif kind == "random":
            values.append(w.op(aten.rand_like.default, a))
    grad = w.op(aten.mm.default, values[-1], values[-1], elements=64, phase=Phase.BACKWARD)
    for v in (values[i] for i in reversed(range(len(values))) if i % 3 == 0):
        grad = w.op(aten.mm.default, grad, v, elements=v.numel, phase=Phase.BACKWARD)
        grad = w.op(aten.mul.Tensor, grad, v, phase=Phase.BACKWARD)
    return w.program(grad)


def recipe_of(seed: int) -> Recipe:
    rng = random.Random(seed)
    kinds = ("gelu", "gelu", "add", "mm", "mm", "random")
    return [
        (rng.choice(kinds), rng.randrange(5), rng.randrange(9), rng.choice((32, 64, 128, 256)))
        for _ in range(rng.randrange(3, 20))
    ]


#: Drawn by number: hypothesis left to itself prefers programs too short to rebuild anything in.
recipes = st.integers(0, 1 << 32).map(recipe_of)


def rows_of(draft: Draft) -> RebuildRows:
    return RebuildRows(candidates(draft, a_second))


def consistent(rows: RebuildRows, wanted: Iterable[int], picks: Iterator[int]) -> frozenset[int]:
    """The unknowns in `wanted`, and what they and the step itself ask for besides."""
    ones = set(wanted)
    changed = True
    while changed:
        changed = False
        for rule in rows.rules:
            if (rule.that is None or rule.that in ones) and not ones & set(rule.those):
                ones.add(rule.those[next(picks) % len(rule.those)])
                changed = True
    return frozenset(ones)


def chosen(rows: RebuildRows, ones: frozenset[int]) -> Choice:
    return choice_of(rows.problem, rows.answer(ones))
