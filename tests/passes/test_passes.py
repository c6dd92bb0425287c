"""move, chunk_loss, functionalize and overwrite on small recorded steps: what each decides, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import takeback as tb
from takeback.compiler import layout as layout_module
from takeback.compiler.layout import lay_out
from takeback.compiler.passes import Draft, Overwrites, run_passes
from takeback.compiler.passes import chunk_loss as chunk_loss_module
from takeback.compiler.passes.chunk_loss import chunk_loss
from takeback.compiler.passes.functionalize import functionalize
from takeback.compiler.passes.move import move
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.program import Program
from takeback.compiler.run.eager import eager_step
from takeback.errors import BorrowError, PlanError

aten = torch.ops.aten


def recorded(model: nn.Module, loss_fn: Callable[..., Any], *batch: Any) -> Program:
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    step(*batch)
    return step._plans[0].original


def named(program: Program, name: str) -> list[int]:
    return [i for i, op in enumerate(program.ops) if op.name == name]


def test_move_drops_a_copy_of_a_dying_value_and_keeps_one_that_is_read_again() -> None:
    model = nn.Linear(4, 4)
    moved = recorded(model, lambda m, x: m(x).clone().square().mean(), torch.randn(3, 4))
    draft = move(Draft(moved))
    assert [m.op for m in draft.moves] == ["clone"]
    assert not named(draft.program, "clone")

    def again(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m(x)
        return (h.clone().square() + h).mean()

    draft = move(Draft(recorded(model, again, torch.randn(3, 4))))
    assert not draft.moves
    assert [(r.op, str(r.reason)) for r in draft.refusals] == [("clone", "the operand is read again later")]


def test_gradient_sum_is_added_onto_its_first_contribution() -> None:
    model = nn.Linear(4, 4, bias=False)
    program = recorded(model, lambda m, x: (m(m(x)) + m(x)).square().mean(), torch.randn(3, 4))
    draft = run_passes(program)
    sums = [op for op in draft.program.ops if op.phase.value == "backward" and op.name.startswith("add")]
    assert sums, "no sum of gradients in this step: it shows nothing"
    for op in sums:
        wrote = op.mutates or isinstance(draft.placements[next(iter(op.outputs)).buffer], Overwrites)
        assert wrote, "a sum of gradients got a buffer of its own"


def test_functionalize_names_the_values_of_in_place_ops_and_overwrite_gives_them_the_same_bytes() -> None:
    model = nn.Linear(4, 4)
    program = recorded(model, lambda m, x: m(x).mul_(2.0).relu_().sum(), torch.randn(3, 4))
    draft = functionalize(Draft(program))
    assert [op.name for op in draft.program.ops if "relu" in op.name or op.name == "mul.Tensor"][:2] == [
        "mul.Tensor",
        "relu",
    ]
    placed = overwrite(draft)
    for name in ("relu", "mul.Tensor"):
        result = placed.program.ops[named(placed.program, name)[0]].outputs[0]
        assert isinstance(placed.placements[result.buffer], Overwrites)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_chunked_cross_entropy_has_eagers_bits(
    rows: int, weighted: bool, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignored targets and class weights included; the last chunk is smaller than the others."""
    monkeypatch.setattr(chunk_loss_module, "CHUNK_BYTES", rows * 50 * 4)
    torch.manual_seed(0)
    models = [nn.Linear(16, 50), nn.Linear(16, 50)]
    models[1].load_state_dict(models[0].state_dict())
    weight = torch.rand(50) if weighted else None

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(x), y, weight=weight, ignore_index=3, reduction=reduction).sum()

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    step = tb.compile_step(models[0], loss_fn, optimizers[0], poison=True)
    for i in range(4):
        x, y = torch.randn(100, 16), torch.randint(0, 50, (100,))
        y[::9] = 3
        assert torch.equal(step(x, y), eager_step(models[1], loss_fn, optimizers[1], (x, y))), i
    ops = step._plans[0].executor.program.ops
    chunks = [op for op in ops if op.target is aten._log_softmax_backward_data.out]
    assert len(chunks) == -(-100 // rows)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_chunk_loss_leaves_a_gradient_alone_that_a_hook_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is empty while the plan is compared with eager, and acts later: nobody would notice afterwards."""
    monkeypatch.setattr(chunk_loss_module, "CHUNK_BYTES", 10 * 50 * 4)
    torch.manual_seed(0)
    models = [nn.Linear(16, 50), nn.Linear(16, 50)]
    models[1].load_state_dict(models[0].state_dict())

    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logp = F.log_softmax(m(x), 1)
        logp.register_hook(lambda grad: grad.masked_fill_(mask, 0.0))
        return F.nll_loss(logp, y)

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    step = tb.compile_step(models[0], loss_fn, optimizers[0])
    for i in range(6):
        batch = (torch.randn(100, 16), torch.randint(0, 50, (100,)), torch.rand(100, 50) < (0.5 if i > 3 else -1.0))
        assert torch.equal(step(*batch), eager_step(models[1], loss_fn, optimizers[1], batch)), i
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_chunk_loss_refuses_log_probabilities_that_are_read_again() -> None:
    def loss_fn(m: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = F.log_softmax(m(x), 1)
        return F.nll_loss(logp, y), logp

    program = recorded(nn.Linear(4, 50), loss_fn, torch.randn(100, 4), torch.zeros(100, dtype=torch.long))
    draft = chunk_loss(Draft(program))
    assert [r.reason for r in draft.refusals] == ["the log-probabilities are read again later"]


def _draft() -> Draft:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    program = recorded(model, lambda m, x: m(x).square().mean(), torch.randn(5, 8))
    return run_passes(program)


def test_sabotaged_overwriting_of_a_value_that_is_read_again_is_caught_by_the_borrow_check() -> None:
    draft = _draft()
    program = draft.program
    caught = tried = 0
    for position, op in enumerate(program.ops):
        for result in op.outputs:
            for operand in op.inputs:
                mine, theirs = program.buffers[result.buffer], program.buffers[operand.buffer]
                later = any(operand.buffer in {r.buffer for r in o.inputs} for o in program.ops[position + 1 :])
                if mine.role.borrowed or theirs.role.borrowed or mine.size_bytes != theirs.size_bytes or not later:
                    continue
                if result.buffer == operand.buffer or isinstance(draft.placements[result.buffer], Overwrites):
                    continue
                tried += 1
                broken = {**draft.placements, result.buffer: Overwrites(operand.buffer, position)}
                with pytest.raises((BorrowError, PlanError)):
                    lay_out(replace(draft, placements=broken))
                caught += 1
    assert caught == tried > 0


def test_sabotaged_offset_is_caught_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = _draft()
    honest = layout_module.solve

    def all_at_zero(problem: Any, *known: object) -> Any:
        solution = honest(problem)
        return replace(solution, offsets=dict.fromkeys(solution.offsets, 0))

    monkeypatch.setattr(layout_module, "solve", all_at_zero)
    with pytest.raises(PlanError, match="overlap"):
        lay_out(draft)
    monkeypatch.setattr(layout_module, "validate", lambda *_: None)
    with pytest.raises(BorrowError, match="onto its operand"):
        lay_out(draft)


class TestGraphText(expecttest.TestCase):
    """The recorded program of a small step, as text."""

    def test_program_of_a_small_step(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        program = recorded(
            model, lambda m, x, y: F.cross_entropy(m(x), y), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
        )
        self.assertExpectedInline(
            str(program),
            """\
   0  %6:f32[5,4] = addmm(0.bias:f32[4], batch0:f32[5,3], 0.weight:f32[3,4])
   1  %7:f32[5,4] = relu(%6:f32[5,4])
   2  %8:f32[5,2] = addmm(2.bias:f32[2], %7:f32[5,4], 2.weight:f32[4,2])
   3  %9:f32[5,2] = _log_softmax(%8:f32[5,2], 1, False)
   4  %10:f32[], %11:f32[] = nll_loss_forward(%9:f32[5,2], batch1:i64[5], None, 1, -100)
   5  %12:f32[] = ones_like(%10:f32[], pin_memory=False, memory_format=torch.preserve_format)
   6  %13:f32[5,2] = nll_loss_backward(%12:f32[], %9:f32[5,2], batch1:i64[5], None, 1, -100, %11:f32[])
   7  %14:f32[5,2] = _log_softmax_backward_data(%13:f32[5,2], %9:f32[5,2], 1, torch.float32)
   8  %15:f32[5,4] = mm(%14:f32[5,2], 2.weight:f32[2,4])
   9  %16:f32[2,4] = mm(%14:f32[2,5], %7:f32[5,4])
  10  %17:f32[1,2] = sum.dim_IntList(%14:f32[5,2], [0], True)
  11  %18:f32[5,4] = threshold_backward(%15:f32[5,4], %7:f32[5,4], 0)
  12  %19:f32[4,3] = mm(%18:f32[4,5], batch0:f32[5,3])
  13  %20:f32[1,4] = sum.dim_IntList(%18:f32[5,4], [0], True)
  14  0.weight:f32[4,3] = add_.Tensor(0.weight:f32[4,3], %19:f32[4,3], alpha=<-lr>)  writes 0.weight
  15  0.bias:f32[4] = add_.Tensor(0.bias:f32[4], %20:f32[4], alpha=<-lr>)  writes 0.bias
  16  2.weight:f32[2,4] = add_.Tensor(2.weight:f32[2,4], %16:f32[2,4], alpha=<-lr>)  writes 2.weight
  17  2.bias:f32[2] = add_.Tensor(2.bias:f32[2], %17:f32[2], alpha=<-lr>)  writes 2.bias""",
        )
