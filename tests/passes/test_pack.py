"""pack gives gradients fixed places in one flat buffer, in the order of the parameters, and costs no arena."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import takeback as tb
from pairwise import in_turns
from takeback import zoo
from takeback.compiler import layout as layout_module
from takeback.compiler.explain.ledger import Fate
from takeback.compiler.layout import Layout, lay_out
from takeback.compiler.passes import Overwrites, Packed, run_passes
from takeback.compiler.passes.draft import owner_of
from takeback.compiler.plan import Problem, Solution
from takeback.compiler.program import Program
from takeback.errors import PlanError

pytestmark = pytest.mark.usefixtures("short_search")


def compiled(model: nn.Module, loss_fn: Callable[..., Any], *batch: Any, **options: Any) -> tb.CompiledStep:
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    step(*batch)
    return step


def original(model: nn.Module, loss_fn: Callable[..., Any], *batch: Any, **options: Any) -> Program:
    return compiled(model, loss_fn, *batch, **options)._plans[0].original


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def squares(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def entropy(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


BATCH = (torch.randn(256, 32), torch.randint(10, (256,)))


def offsets(layout: Layout) -> list[int]:
    """Of the gradients, in the order of the parameters."""
    return [layout.placed.offsets[r.buffer] for _, r in sorted(layout.draft.program.grads.items())]


def test_slices_lie_one_after_the_other_in_the_order_of_the_parameters() -> None:
    layout = lay_out(run_passes(original(mlp(), entropy, *BATCH)))
    sizes = [4 * 64 * 32, 4 * 64, 4 * 10 * 64, 64]
    found = offsets(layout)
    assert [b - a for a, b in itertools.pairwise(found)] == sizes[:-1]


def test_there_is_one_flat_buffer_for_each_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].to(torch.float64)
    program = original(model, lambda m, x: m[1](m[0](x).double()).square().mean(), torch.randn(5, 8))
    draft = run_passes(program)
    packed = [draft.placements[owner_of(draft, r.buffer)] for _, r in sorted(program.grads.items())]
    assert packed == [Packed("float32", 0), Packed("float32", 256), Packed("float64", 0), Packed("float64", 512)]


def test_gradient_that_overwrites_a_dying_operand_takes_its_slot_along() -> None:
    model = nn.Linear(4, 4, bias=False)
    program = original(model, lambda m, x: (m(m(x)) + m(x)).square().mean(), torch.randn(3, 4))
    draft = run_passes(program)
    [grad] = draft.program.grads.values()
    assert isinstance(draft.placements[grad.buffer], Overwrites), "no sum of gradients here: it shows nothing"
    assert draft.placements[owner_of(draft, grad.buffer)] == Packed("float32", 0)


def test_gradients_that_are_parts_of_one_buffer_are_refused() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, torch.cat([self.a, self.b]))

    step = compiled(Joined(), squares, torch.randn(6, 4))
    refused = [r.reason for r in step.report().refusals if r.decision == "pack"]
    assert refused == ["the gradient is only a part of its buffer"] * 2


def test_gradients_are_not_packed_where_they_never_live_together() -> None:
    step = compiled(mlp(), entropy, *BATCH, update="early")
    assert not [e for e in step.report().ledger if e.fate is Fate.PACKED]


def test_ledger_names_every_gradient_as_packed_with_its_distance() -> None:
    step = compiled(mlp(), entropy, *BATCH)
    packed = [e for e in step.report().ledger if e.fate is Fate.PACKED]
    assert len(packed) == 4
    distances = {e.reason.split(":")[1].split(" bytes")[0].strip() for e in packed}
    assert distances == {"0", "8,192", "8,448", "11,008"}


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(("name", "memory"), in_turns(zoo.CASES, ["keep", "auto"]))
def test_packing_never_makes_the_arena_of_the_zoo_larger(name: str, memory: str) -> None:
    case = zoo.case(name)
    step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory=memory)
    step(*case.batch)
    step(*case.batch)
    layout = step._plans[0].executor.layout
    packed = [p for p in layout.draft.placements.values() if isinstance(p, Packed)]
    assert packed or any("larger" in r.reason for r in layout.draft.refusals if r.decision == "pack")
    draft = layout.draft
    loose = {b: layout_module.Fresh() if isinstance(p, Packed) else p for b, p in draft.placements.items()}
    assert layout.placed.size_bytes <= lay_out(replace(draft, placements=loose)).placed.size_bytes


def test_slices_that_would_cost_arena_are_placed_one_by_one_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = original(mlp(), entropy, *BATCH)
    solve = layout_module.solve

    def wasteful(problem: Problem, *known: object) -> Solution:
        found = solve(problem)
        return replace(found, arena_bytes=found.arena_bytes + 640) if problem.packs else found

    monkeypatch.setattr(layout_module, "solve", wasteful)
    layout = lay_out(run_passes(program))
    assert not any(isinstance(p, Packed) for p in layout.draft.placements.values())
    reasons = {r.reason for r in layout.draft.refusals if r.decision == "pack"}
    assert reasons == {"packed, the arena would be 640 bytes larger"}


def test_a_slice_that_is_put_elsewhere_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = run_passes(original(mlp(), entropy, *BATCH))
    solve = layout_module.solve

    def tearing(problem: Problem, *known: object) -> Solution:
        found = solve(problem)
        [pack] = problem.packs
        torn = pack.members[-1][0]
        return replace(
            found, offsets={**found.offsets, torn: found.arena_bytes + 64}, arena_bytes=found.arena_bytes + 4096
        )

    monkeypatch.setattr(layout_module, "solve", tearing)
    monkeypatch.setattr(layout_module, "lower_bound_bytes", lambda problem: 1 << 60)
    with pytest.raises(PlanError, match="Pack 0 is torn"):
        lay_out(draft)
