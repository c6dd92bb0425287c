"""reduce adds a group's averaging to the program: a slice for every trainable parameter, and nothing touches a slice
between the time when its bucket is handed over and the time when the group is done with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import takeback as tb
from takeback.compiler import layout as layout_module
from takeback.compiler.layout import Layout, lay_out
from takeback.compiler.passes import Draft, Packed, PassSettings, run_passes
from takeback.compiler.passes.draft import owner_of
from takeback.compiler.passes.reduce import Sharing, Slice
from takeback.compiler.plan import Problem, Solution
from takeback.compiler.program import Program, Special
from takeback.errors import BorrowError, PlanError
from takeback.flat import cut
from takeback.flat import lay_out as lay_out_flat


class Net(nn.Module):
    """Three layers in a row, one beside them that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.beside = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def recorded(model: nn.Module, optimized: nn.Module) -> Program:
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(optimized.parameters(), lr=0.1))
    step(torch.randn(5, 8))
    return step._plans[0].original


def sharing_for(model: nn.Module, bucket_bytes: int = 300) -> Sharing:
    parameters = list(model.parameters())
    layout = lay_out_flat([(len(parameters), torch.float32), *((p.numel(), p.dtype) for p in parameters)])
    slices = tuple(Slice(i, p.dtype, tuple(p.shape), p.stride()) for i, p in enumerate(parameters))
    return Sharing(slices, cut(layout, bucket_bytes))


@pytest.fixture
def draft() -> Draft:
    """The optimizer has the last layer alone: nobody but the group reads the other gradients."""
    torch.manual_seed(0)
    model = Net()
    return run_passes(recorded(model, model.layers[2]), settings=PassSettings(sharing=sharing_for(model)))


def places(program: Program, target: Special) -> list[int]:
    return [i for i, op in enumerate(program.ops) if op.target is target]


def test_every_bucket_is_handed_over_once_in_order_when_its_last_slice_is_complete(draft: Draft) -> None:
    program = draft.program
    handed = places(program, Special.REDUCE)
    assert [program.ops[i].args[0] for i in handed] == list(range(len(handed)))
    assert len(handed) > 2
    for i in handed:
        mine = set(program.ops[i].mutates)
        writes = [k for k, op in enumerate(program.ops[:i]) if mine & {r.buffer for r in op.outputs}]
        assert mine <= {r.buffer for k in writes for r in program.ops[k].outputs}
    backward = [op.name for op in program.ops[handed[0] : handed[-1]]]
    assert "mm" in backward, "all buckets are handed over at the end"


def test_slices_live_until_the_group_is_done_though_nobody_else_reads_them(draft: Draft) -> None:
    layout = lay_out(draft)
    program = layout.draft.program
    [wait] = places(program, Special.WAIT)
    assert len(program.slices) == 8
    for region in (*program.slices.values(), program.flags):
        assert region is not None
        assert layout.alive[region.buffer].end > wait


def test_parameter_without_a_gradient_gives_zeros_and_no_flag(draft: Draft) -> None:
    program = draft.program
    assert sorted(program.grads) == [0, 1, 2, 3, 4, 5]
    filled = {r.buffer for op in program.ops if op.name == "zeros" for r in op.outputs}
    assert {program.slices[6].buffer, program.slices[7].buffer} <= filled
    [used] = [t for b, t in program.externals.items() if program.buffers[b].name == "used"]
    assert used.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


def test_bucket_is_one_piece_of_the_arena(draft: Draft) -> None:
    layout = lay_out(draft)
    for i in places(layout.draft.program, Special.REDUCE):
        _, numel, members = layout.draft.program.ops[i].args
        assert isinstance(members, tuple)
        first, last = members[0], members[-1]
        start, end = layout.placed.offsets[first.buffer], layout.placed.offsets[last.buffer] + 4 * last.numel
        assert end - start == 4 * numel


def test_slices_of_a_group_are_packed_even_where_that_costs_arena(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = layout_module.solve

    def wasteful(problem: Problem, *known: object) -> Solution:
        found = solve(problem)
        return replace(found, arena_bytes=found.arena_bytes + 640) if problem.packs else found

    monkeypatch.setattr(layout_module, "solve", wasteful)
    layout = lay_out(draft)
    grads = layout.draft.program.grads.values()
    assert all(isinstance(layout.draft.placements[owner_of(draft, r.buffer)], Packed) for r in grads)


def test_value_that_is_put_onto_a_slice_in_the_group_s_hands_is_caught(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validator finds it; and so does the borrow check, when the validator looks away."""
    layout: Layout = lay_out(draft)
    program = layout.draft.program
    first = places(program, Special.REDUCE)[0]
    target = program.ops[first].mutates[0]
    [wait] = places(program, Special.WAIT)
    victim = next(
        r.buffer
        for op in program.ops[first + 1 : wait]
        for r in op.outputs
        if r.buffer in layout.alive
        and layout.owners[r.buffer] == r.buffer
        and r.buffer not in program.ops[wait].mutates
    )
    solve = layout_module.solve

    def careless(problem: Problem, *known: object) -> Solution:
        found = solve(problem)
        at = found.offsets[layout.owners[target]]  # type: ignore[index]
        return replace(found, offsets={**found.offsets, victim: at})  # type: ignore[dict-item]

    monkeypatch.setattr(layout_module, "solve", careless)
    with pytest.raises(PlanError, match="overlap in time and in bytes"):
        lay_out(draft)
    monkeypatch.setattr(layout_module, "validate", lambda problem, solution: None)
    with pytest.raises(BorrowError):
        lay_out(draft)


def test_gradients_that_share_a_buffer_are_copied_and_the_update_reads_the_copies() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(2, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, torch.cat([self.a, self.b]))

    model = Joined()
    draft = run_passes(recorded(model, model), settings=PassSettings(sharing=sharing_for(model)))
    program = draft.program
    [wait] = places(program, Special.WAIT)
    mine = {r.buffer for r in program.grads.values()}
    assert len(mine) == 2
    assert mine == {r.buffer for op in program.ops[wait + 1 :] for r in op.inputs if r.buffer in mine}
    copies = [op for op in program.ops if op.name == "clone" and {r.buffer for r in op.outputs} & mine]
    assert len(copies) == 2
    lay_out(draft)
