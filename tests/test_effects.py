"""What the borrow check is told of a layout: nothing that was decided is taken on trust."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import takeback as tb
from takeback.compiler.layout import Layout, Request, check_layout, lay_out, propose
from takeback.compiler.ownership.lifetimes import Lifetime
from takeback.compiler.passes import PassSettings, run_passes
from takeback.compiler.passes.draft import Overwrites
from takeback.compiler.passes.reduce import Sharing, Slice
from takeback.compiler.program import BufferId, Program, Region
from takeback.errors import BorrowError, PlanError
from takeback.flat import cut
from takeback.flat import lay_out as lay_out_flat


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def recorded(net: nn.Module) -> Program:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    step = tb.compile_step(net, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, memory="keep")
    step(torch.randn(8, 8), torch.randint(8, (8,)))
    return step._plans[0].original


@pytest.fixture(scope="module")
def layout() -> Layout:
    program = recorded(model())
    return lay_out(run_passes(program, frozenset(r.buffer for r in program.grads.values())))


def put(layout: Layout, buffer: BufferId, offset: int) -> Layout:
    return replace(layout, arena=replace(layout.placed, offsets={**layout.placed.offsets, buffer: offset}))


def dying(layout: Layout, buffer: BufferId) -> Layout:
    life = layout.alive[buffer]
    return replace(layout, alive={**layout.alive, buffer: Lifetime(life.start, life.end - 1)})


def last_of_its_own(layout: Layout) -> BufferId:
    """A value of the update that nobody else's bytes are."""
    owners = list(layout.owners.values())
    small = [b for b in layout.alive if owners.count(b) == 1 and layout.program.buffers[b].size_bytes]
    return max(small, key=lambda b: layout.alive[b].start)


def test_honest_layout_passes(layout: Layout) -> None:
    check_layout(layout)


def test_value_on_what_the_caller_gets_is_found_though_no_op_reads_that_again(layout: Layout) -> None:
    loss = layout.program.loss.buffer
    late = last_of_its_own(layout)
    wrong = put(layout, late, layout.placed.offsets[loss])
    with pytest.raises(PlanError, match="overlap in time"):
        check_layout(wrong)
    # And where whoever placed believed that the loss is dead by then.
    short = replace(wrong, alive={**wrong.alive, loss: Lifetime(layout.alive[loss].start, layout.alive[late].start)})
    with pytest.raises(BorrowError, match=r"outside of its lifetime"):
        check_layout(short)


def test_value_on_a_gradient_that_is_kept_is_found(layout: Layout) -> None:
    grad = layout.owners[next(iter(layout.program.grads.values())).buffer]
    late = last_of_its_own(layout)
    wrong = put(layout, late, layout.placed.offsets[grad])
    with pytest.raises((BorrowError, PlanError)):
        check_layout(replace(wrong, alive={**wrong.alive, grad: Lifetime(0, layout.alive[late].start)}))


def test_use_outside_of_a_lifetime_is_found(layout: Layout) -> None:
    longer = [b for b, life in layout.alive.items() if life.end - life.start > 1]
    assert len(longer) > 10
    for b in longer:
        with pytest.raises((BorrowError, PlanError)):
            check_layout(dying(layout, b))


def test_product_on_its_own_operand_is_found_whatever_the_plan_says(layout: Layout) -> None:
    program = layout.program
    found = 0
    for position, op in enumerate(program.ops):
        if op.name not in ("mm", "addmm"):
            continue
        result = op.results[0]
        assert isinstance(result, Region)
        for operand in op.inputs:
            if operand.buffer in layout.alive and layout.alive[operand.buffer].end == position + 1:
                found += 1
                placements = {**layout.draft.placements, result.buffer: Overwrites(operand.buffer, position)}
                with pytest.raises(BorrowError, match="not declared safe"):
                    check_layout(propose(replace(layout.draft, placements=placements)))
    assert found


def test_result_that_needs_more_bytes_than_what_it_overwrites_is_found(layout: Layout) -> None:
    program = layout.program
    onto = next(b for b, p in layout.draft.placements.items() if isinstance(p, Overwrites))
    bigger = replace(program.buffers[onto], size_bytes=layout.placed.size_bytes)
    draft = replace(layout.draft, program=replace(program, buffers={**program.buffers, onto: bigger}))
    with pytest.raises(BorrowError):
        check_layout(replace(layout, draft=draft))


def test_request_for_a_result_beyond_its_bytes_is_found(layout: Layout) -> None:
    broken = 0
    for position, asked in enumerate(layout.placed.requests):
        for k, request in enumerate(asked):
            if request.result is None or request.offset_bytes < 0:
                continue
            larger = Request(layout.placed.size_bytes - request.offset_bytes, request.offset_bytes, request.result)
            requests = list(layout.placed.requests)
            requests[position] = (*asked[:k], larger, *asked[k + 1 :])
            try:
                check_layout(replace(layout, arena=replace(layout.placed, requests=tuple(requests))))
            except BorrowError:
                broken += 1
    assert broken or not any(r.result is not None for asked in layout.placed.requests for r in asked)


def test_values_of_one_owner_lie_at_one_place(layout: Layout) -> None:
    onto = next(b for b, owner in layout.owners.items() if owner != b)
    with pytest.raises(PlanError, match="lies elsewhere"):
        check_layout(put(layout, onto, layout.placed.offsets[onto] + 64))


def test_slices_that_have_changed_places_are_found() -> None:
    net = model()
    parameters = list(net.parameters())
    flat = lay_out_flat([(len(parameters), torch.float32), *((p.numel(), p.dtype) for p in parameters)])
    slices = tuple(Slice(i, p.dtype, tuple(p.shape), p.stride()) for i, p in enumerate(parameters))
    draft = run_passes(recorded(net), settings=PassSettings(sharing=Sharing(slices, cut(flat, 300))))
    honest = lay_out(draft)
    one, other = (honest.owners[honest.program.slices[i].buffer] for i in (0, 2))
    placements, at = dict(draft.placements), honest.placed.offsets
    placements[one], placements[other] = placements[other], placements[one]
    swap = {one: at[other], other: at[one]}
    offsets = {b: swap.get(honest.owners[b], offset) for b, offset in at.items()}
    wrong = replace(
        honest, draft=replace(honest.draft, placements=placements), arena=replace(honest.placed, offsets=offsets)
    )
    with pytest.raises((BorrowError, PlanError)):
        check_layout(wrong)
