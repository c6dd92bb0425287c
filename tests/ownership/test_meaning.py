"""The planned program must mean what was recorded: passes that keep the meaning are accepted, and every way to lose it
is named. tests/mutation tries many more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.ownership.meaning import MeaningError, check_meaning
from takeback.compiler.passes import Draft, PassSettings, chunk_loss, run_passes
from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.draft import Choice, Rebuild
from takeback.compiler.passes.partial import rebuilt_layer_norm
from takeback.compiler.passes.pipeline import PIPELINE, Stage
from takeback.compiler.passes.recompute import recompute
from takeback.compiler.passes.reduce import Sharing, Slice
from takeback.compiler.program import BufferId, Op, Program, Region, Special, renaming
from takeback.flat import cut
from takeback.flat import lay_out as lay_out_flat


def recorded(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Tensor, **settings: Any) -> Program:
    torch.manual_seed(0)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory="keep", **settings)
    step(*batch)
    return step._plans[0].original


def rows() -> Program:
    return recorded(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), square, torch.randn(5, 8))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def with_op(program: Program, position: int, op: Op) -> Program:
    return replace(program, ops=(*program.ops[:position], op, *program.ops[position + 1 :]))


def position_of(program: Program, name: str, number: int = 0) -> int:
    return [i for i, op in enumerate(program.ops) if op.name == name][number]


def test_program_means_what_it_means_and_passes_keep_that() -> None:
    program = rows()
    check_meaning(program, program)
    check_meaning(program, run_passes(program).program)
    check_meaning(program, run_passes(program, settings=PassSettings(early=True)).program)


def test_pass_that_changes_the_meaning_is_found_after_the_last_one() -> None:
    def spoil(draft: Draft) -> Draft:
        at = position_of(draft.program, "mm")
        op = draft.program.ops[at]
        other = next(r for o in draft.program.ops[:at] for r in o.outputs if r.buffer != op.inputs[0].buffer)
        wrong = replace(op, args=(replace(op.inputs[0], buffer=other.buffer), *op.args[1:]))
        return replace(draft, program=with_op(draft.program, at, wrong))

    with pytest.raises(MeaningError, match="the planned step leaves something else"):
        run_passes(rows(), stages=(*PIPELINE, Stage(spoil)))


def test_op_that_reads_another_operand_is_named() -> None:
    program = rows()
    at = position_of(program, "mm")
    op = program.ops[at]
    other = next(r for o in program.ops[:at] for r in o.outputs if r.buffer != op.inputs[0].buffer)
    wrong = replace(op, args=(replace(op.inputs[0], buffer=other.buffer), *op.args[1:]))
    with pytest.raises(MeaningError, match=r"leaves something else in parameter 0.weight.*mm\(.* is the first op"):
        check_meaning(program, with_op(program, at, wrong))


def test_op_that_reads_another_part_of_its_operand_is_found() -> None:
    program = recorded(nn.Linear(8, 8), lambda m, x: m(x)[:, 2:5].exp().sum(), torch.randn(5, 8))
    at = position_of(program, "exp")
    [operand] = program.ops[at].inputs
    wrong = replace(program.ops[at], args=(replace(operand, offset=operand.offset + 1),))
    with pytest.raises(MeaningError):
        check_meaning(program, with_op(program, at, wrong))


def test_every_two_neighbours_of_which_one_needs_the_other_may_not_change_places() -> None:
    program = run_passes(rows()).program
    found = 0
    for at in range(len(program.ops) - 1):
        one, other = program.ops[at], program.ops[at + 1]
        ops = (*program.ops[:at], other, one, *program.ops[at + 2 :])
        writes = {r.buffer for r in one.outputs} | set(one.mutates)
        later = {r.buffer for r in other.outputs} | set(other.mutates)
        if writes & {r.buffer for r in other.inputs} or later & {r.buffer for r in one.inputs}:
            found += 1
            with pytest.raises(MeaningError):
                check_meaning(program, replace(program, ops=ops))
        else:
            check_meaning(program, replace(program, ops=ops))
    assert found > 5


def test_loss_from_another_buffer_is_found() -> None:
    program = rows()
    other = next(r for op in program.ops for r in op.outputs if not r.shape and r != program.loss)
    with pytest.raises(MeaningError, match="gives another loss"):
        check_meaning(program, replace(program, loss=other))


def test_gradient_that_is_not_kept_any_more_is_named() -> None:
    program = rows()
    kept = frozenset(r.buffer for r in program.grads.values())
    check_meaning(program, program, kept, kept)
    with pytest.raises(MeaningError, match="the gradient of parameter 1 is not kept"):
        check_meaning(program, program, kept, kept - {program.grads[1].buffer})


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.second(x * torch.rand_like(x))


def before_rebuilding() -> tuple[Program, Draft]:
    program = recorded(Noisy(), square, torch.randn(5, 8))
    return program, run_passes(program, before=recompute)


def readers_of(program: Program, at: int) -> list[int]:
    mine = {program.ops[at].outputs[0].buffer}
    return [i for i, op in enumerate(program.ops) if i > at and mine & {r.buffer for r in op.inputs}]


@pytest.mark.parametrize("name", ["tanh", "native_batch_norm"])
def test_what_may_be_rebuilt_keeps_the_meaning(name: str) -> None:
    program, draft = before_rebuilding()
    at = position_of(draft.program, name)
    again = apply(draft, Choice((Rebuild(readers_of(draft.program, at)[-1], at),))).program
    assert len(again.ops) > len(draft.program.ops)
    check_meaning(program, again)


def test_random_op_that_is_rebuilt_is_found() -> None:
    program, draft = before_rebuilding()
    at = position_of(draft.program, "rand_like")
    again = apply(draft, Choice((Rebuild(readers_of(draft.program, at)[-1], at),))).program
    with pytest.raises(MeaningError, match=r"leaves something else|other random numbers"):
        check_meaning(program, again)


def test_norm_that_is_rebuilt_from_other_statistics_is_found() -> None:
    program, draft = before_rebuilding()
    at = position_of(draft.program, "native_batch_norm")
    again = apply(draft, Choice((Rebuild(readers_of(draft.program, at)[-1], at),))).program
    second = position_of(again, "native_batch_norm", 1)
    op = again.ops[second]
    wrong = replace(op, args=(*op.args[:3], op.args[4], op.args[3], *op.args[5:]))
    with pytest.raises(MeaningError):
        check_meaning(program, with_op(again, second, wrong))


def with_layer_norm(affine: bool = True) -> tuple[Program, Program, list[int]]:
    """A step with two layer norms; the same with the first one made again for its last reader, from its statistics;
    and where the steps of that are."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=affine), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)
    )
    program = recorded(model, lambda m, x: m(x).square().mean() + m[1](m[0](x)).sin().mean(), torch.randn(5, 8))
    at = position_of(program, "native_layer_norm")
    norm, reader = program.ops[at], readers_of(program, at)[-1]
    buffers = dict(program.buffers)
    out, *statistics = norm.outputs
    made = BufferId(max(buffers) + 1)
    buffers[made] = replace(buffers[out.buffer], id=made)
    again = replace(norm, results=(replace(out, buffer=made), *statistics))
    ops = rebuilt_layer_norm(again, {r.buffer for r in statistics}, buffers)
    assert ops is not None
    changed = program.ops[reader].map(reads=renaming({out.buffer: made}))
    whole = (*program.ops[:reader], *ops, changed, *program.ops[reader + 1 :])
    return program, replace(program, ops=whole, buffers=buffers), list(range(reader, reader + len(ops)))


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_that_is_made_again_of_its_statistics_keeps_the_meaning(affine: bool) -> None:
    program, again, steps = with_layer_norm(affine)
    assert len(steps) == (4 if affine else 2)
    check_meaning(program, again)


@pytest.mark.parametrize("step", range(4))
def test_layer_norm_that_is_made_again_otherwise_is_found(step: int) -> None:
    """Without a step, with the other norm's operand, and with another step's."""
    program, again, steps = with_layer_norm()
    at, ops = steps[step], again.ops
    value, _ = ops[at].args
    shorter = replace(ops[at + 1], args=(value, *ops[at + 1].args[1:]))
    without = replace(again, ops=(*ops[:at], shorter, *ops[at + 2 :]))
    other = position_of(program, "native_layer_norm", 1)
    foreign = (*program.ops[other].outputs[1:], *program.ops[other].args[2:4])[step]
    swapped = ops[steps[step - 1]].args[1]
    broken = [without, *(with_op(again, at, replace(ops[at], args=(value, one))) for one in (foreign, swapped))]
    for one in broken:
        with pytest.raises(MeaningError):
            check_meaning(program, one)


def test_loss_in_chunks_keeps_the_meaning_and_a_chunk_of_other_rows_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_loss, "CHUNK_BYTES", 4 * 10 * 4)
    program = recorded(
        nn.Linear(8, 10), lambda m, x, y: F.cross_entropy(m(x), y), torch.randn(19, 8), torch.randint(10, (19,))
    )
    chunked = run_passes(program).program
    parts = [i for i, op in enumerate(chunked.ops) if "log_softmax_backward" in op.name]
    assert len(parts) == 5
    check_meaning(program, chunked)
    without = replace(chunked, ops=tuple(op for i, op in enumerate(chunked.ops) if i != parts[2]))
    with pytest.raises(MeaningError):
        check_meaning(program, without)
    one, other = chunked.ops[parts[0] - 1], chunked.ops[parts[1] - 1]
    target = one.args[2]
    assert isinstance(target, Region)
    with pytest.raises(MeaningError):  # the rows of one chunk with the classes of another
        check_meaning(
            program, with_op(chunked, parts[1] - 1, replace(other, args=(*other.args[:2], target, *other.args[3:])))
        )


# With a group.


def shared() -> tuple[Program, Program]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    program = recorded(model, square, torch.randn(5, 8))
    parameters = list(model.parameters())
    layout = lay_out_flat([(len(parameters), torch.float32), *((p.numel(), p.dtype) for p in parameters)])
    slices = tuple(Slice(i, p.dtype, tuple(p.shape), p.stride()) for i, p in enumerate(parameters))
    return program, run_passes(program, settings=PassSettings(sharing=Sharing(slices, cut(layout, 200)))).program


def places(program: Program, target: Special) -> list[int]:
    return [i for i, op in enumerate(program.ops) if op.target is target]


def test_averaged_gradients_are_used_and_no_others() -> None:
    program, planned = shared()
    check_meaning(program, planned)
    [wait] = places(planned, Special.WAIT)
    ops = list(planned.ops)
    ops.insert(wait, ops.pop(wait + 1))  # an op of the update before the group is done
    with pytest.raises(MeaningError):
        check_meaning(program, replace(planned, ops=tuple(ops)))


def test_bucket_that_leaves_before_a_slice_is_complete_is_found() -> None:
    program, planned = shared()
    send = places(planned, Special.REDUCE)[0]
    ops = list(planned.ops)
    ops.insert(send - 1, ops.pop(send))
    with pytest.raises(MeaningError):
        check_meaning(program, replace(planned, ops=tuple(ops)))


@pytest.mark.parametrize("target", [Special.REDUCE, Special.WAIT])
def test_slice_that_is_forgotten_is_found(target: Special) -> None:
    program, planned = shared()
    at = places(planned, target)[0]
    op = planned.ops[at]
    left = op.inputs[:-1]
    less = replace(op, args=(*op.args[:-1], left), mutates=tuple(r.buffer for r in left))
    with pytest.raises(MeaningError, match=r"awaited|waited for"):
        check_meaning(program, with_op(planned, at, less))
