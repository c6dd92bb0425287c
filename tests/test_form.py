"""The check of a program's form: what is recorded has it, and each fault that a pass could plant is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from takeback import zoo
from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.batch import tensors_of
from takeback.compiler.capture.record_step import capture
from takeback.compiler.capture.update import write_update
from takeback.compiler.form import FormError, check_form
from takeback.compiler.passes import run_passes
from takeback.compiler.program import Buffer, BufferId, Op, Phase, Program, Region, Role, Scratch, Special

aten = torch.ops.aten
X, W, H, Y, LOSS, SPARE = (BufferId(i) for i in range(6))


def region(buffer: BufferId, numel: int = 4, offset: int = 0) -> Region:
    return Region(buffer, torch.float32, (numel,), (1,), offset)


def program() -> Program:
    """A step on four numbers: batch X, weight W, values H and Y, the loss."""
    roles = (Role.BATCH, Role.PARAMETER, *(Role.INTERNAL,) * 4)
    return Program(
        (
            Op(aten.mul.Tensor, (region(X), region(W)), {}, (region(H),), scratch=(Scratch(16, 0, None, H),)),
            Op(aten.empty_like.default, (region(H),), {}, (region(Y),)),
            Op(aten.relu_.default, (region(H),), {}, (region(H),), mutates=(H,)),
            Op(aten.add.out, (region(H), region(X)), {"out": region(Y)}, (region(Y),), mutates=(Y,)),
            Op(aten.sum.default, (region(Y),), {}, (region(LOSS, 1),)),
            Op(aten.sub_.Tensor, (region(W), region(Y)), {}, (region(W),), mutates=(W,), phase=Phase.UPDATE),
        ),
        {BufferId(i): Buffer(BufferId(i), 4 if i == LOSS else 16, role) for i, role in enumerate(roles)},
        {W: torch.zeros(4)},
        {X: 0},
        region(LOSS, 1),
        grads={0: region(Y)},
    )


def with_op(position: int, **changes: Any) -> Program:
    ops = list(program().ops)
    ops[position] = replace(ops[position], **changes)
    return replace(program(), ops=tuple(ops))


def without_op(position: int) -> Program:
    ops = program().ops
    return replace(program(), ops=ops[:position] + ops[position + 1 :])


def appended(op: Op) -> Program:
    return replace(program(), ops=(*program().ops, op))


def test_program_that_has_the_form_passes() -> None:
    check_form(program(), kept=frozenset({Y}))


def test_out_argument_is_written_and_not_read() -> None:
    check_form(without_op(1))


def test_batch_leaf_may_be_looked_at_beyond_its_own_elements() -> None:
    check_form(with_op(0, args=(region(X, offset=-2), region(W))))


FAULTS: dict[str, tuple[Callable[[], Program], str]] = {
    "reads what is written later": (
        lambda: without_op(0),
        r"op 0, .*empty_like.*: reads %2, which nothing has written before it",
    ),
    "reads what nobody writes": (
        lambda: with_op(4, args=(region(SPARE),)),
        r"op 4, .*sum.*: reads %5, which nothing has written before it",
    ),
    "changes in place what nobody has written": (
        lambda: with_op(2, args=(region(SPARE),), results=(region(SPARE),), mutates=(SPARE,)),
        r"op 2, .*relu_.*: reads %5, which nothing has written before it",
    ),
    "reads a keyword that nobody writes": (
        lambda: with_op(0, kwargs={"alpha": (1, (region(SPARE),))}),
        r"op 0, .*: reads %5, which nothing has written",
    ),
    "looks beyond an internal buffer": (
        lambda: with_op(4, args=(region(Y, offset=1),)),
        r"op 4, .*: looks at bytes \[4, 20\) of the 16 bytes of %3",
    ),
    "looks before a buffer": (
        lambda: with_op(4, args=(region(Y, offset=-1),)),
        r"op 4, .*: looks at bytes \[-4, 12\) of the 16 bytes of %3",
    ),
    "writes beyond a buffer": (
        lambda: with_op(0, results=(region(H, 5),)),
        r"op 0, .*: looks at bytes \[0, 20\) of the 16 bytes of %2",
    ),
    "looks beyond a parameter": (
        lambda: with_op(0, args=(region(X), region(W, 5))),
        r"op 0, .*: looks at bytes \[0, 20\) of the 16 bytes of %1",
    ),
    "does not declare what it changes in place": (
        lambda: with_op(2, mutates=()),
        r"op 2, .*relu_.*: writes %2 as self, and does not say that it mutates it",
    ),
    "does not declare what it writes by name": (
        lambda: with_op(3, mutates=()),
        r"op 3, .*add\.out.*: writes %3 as out, and does not say that it mutates it",
    ),
    "does not declare one of a list": (
        lambda: appended(
            Op(aten._foreach_mul_.Scalar, ((region(H), region(Y)), 2.0), {}, (), mutates=(H,), phase=Phase.UPDATE)
        ),
        r"op 6, .*_foreach_mul_.*: writes %3 as self, and does not say",
    ),
    "mutates what it does not touch": (
        lambda: with_op(2, mutates=(H, Y)),
        r"op 2, .*: mutates %3, which is none of its operands or results",
    ),
    "reads a buffer that is not there": (
        lambda: with_op(4, args=(region(BufferId(9)),)),
        r"op 4, sum: names %9, which is not in the table of buffers",
    ),
    "writes a buffer that is not there": (
        lambda: with_op(4, results=(region(BufferId(9)),)),
        r"op 4, sum: names %9, which is not in the table",
    ),
    "mutates a buffer that is not there": (
        lambda: with_op(2, mutates=(H, BufferId(9))),
        r"op 2, relu_: mutates %9, which is none of its operands",
    ),
    "takes another op's result as scratch": (
        lambda: with_op(0, scratch=(Scratch(16, 0, None, Y),)),
        r"op 0, .*: takes scratch as its result %3, which is none of its results",
    ),
    "reads a value after the update has begun": (
        lambda: appended(Op(aten._local_scalar_dense.default, (region(LOSS, 1),), {}, (), expected=1.0)),
        r"op 6, .*_local_scalar_dense.*: comes after the update has begun",
    ),
    "restores the random state after the update has begun": (
        lambda: appended(Op(Special.RESTORE_RANDOM, (0,), {}, ())),
        r"op 6, .*random\.restore.*: comes after the update has begun",
    ),
    "has a buffer under another id": (
        lambda: replace(program(), buffers={**program().buffers, Y: program().buffers[H]}),
        r"buffer %2 is in the table as %3",
    ),
    "has a gradient that nobody writes": (
        lambda: replace(program(), grads={0: region(SPARE)}),
        r"grads names %5, which nothing writes",
    ),
    "has a loss that is not there": (
        lambda: replace(program(), loss=region(BufferId(9), 1)),
        r"loss names %9, which is not in the table of buffers",
    ),
    "returns more than there is": (
        lambda: replace(program(), aux=(region(H, 5),)),
        r"aux looks at bytes \[0, 20\) of the 16 bytes of %2",
    ),
    "has a norm that nobody writes": (
        lambda: replace(program(), grad_norm=region(SPARE, 1)),
        r"grad_norm names %5, which nothing writes",
    ),
    "has found_inf that nobody writes": (
        lambda: replace(program(), found_inf=region(SPARE, 1)),
        r"found_inf names %5, which nothing writes",
    ),
    "has a slice that nobody writes": (
        lambda: replace(program(), slices={0: region(Y), 1: region(SPARE)}),
        r"slices names %5, which nothing writes",
    ),
    "has flags that nobody writes": (
        lambda: replace(program(), flags=region(SPARE)),
        r"flags names %5, which nothing writes",
    ),
    "borrows a tensor for a buffer that is not there": (
        lambda: replace(program(), externals={BufferId(9): torch.zeros(4)}),
        r"externals names %9, which is not in the table",
    ),
    "has a batch leaf that is not there": (
        lambda: replace(program(), leaves={BufferId(9): 0}),
        r"leaves names %9, which is not in the table",
    ),
    "buries a buffer that is not there": (
        lambda: replace(program(), eager_death={BufferId(9): 0}),
        r"eager_death names %9, which is not in the table",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_and_named(fault: str) -> None:
    broken, message = FAULTS[fault]
    with pytest.raises(FormError, match=message):
        check_form(broken())


@pytest.mark.parametrize(
    ("kept", "message"), [(BufferId(9), "kept names %9, which is not in"), (SPARE, "%5 is kept, and nothing writes it")]
)
def test_what_is_kept_must_be_there(kept: BufferId, message: str) -> None:
    with pytest.raises(FormError, match=message):
        check_form(program(), frozenset({kept}))


def test_error_names_the_line_of_the_user() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).tanh().sum()

    recorded = record(nn.Linear(3, 2), loss_fn, (torch.randn(4, 3),))
    place = next(i for i, op in enumerate(recorded.ops) if op.name == "tanh")
    ops = recorded.ops[:place] + recorded.ops[place + 1 :]
    with pytest.raises(FormError, match=r"test_form.py:\d+ in loss_fn: return model\(x\)\.tanh\(\)\.sum\(\): reads"):
        check_form(replace(recorded, ops=ops))


def record(model: nn.Module, loss_fn: Callable[..., Any], batch: tuple[torch.Tensor, ...], **settings: Any) -> Program:
    """The program of a step, its update included, as it is before any pass."""
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"accumulate": 1, "clip_norm": None, **settings}
    subject = subjects.build(model, loss_fn, optimizer, tensors_of(batch), **settings)
    got = capture(subject, batch, {})
    check_form(got.program)
    optimizer.step()
    done, _ = write_update(got.program, optimizer, subject.parameters, subject.names)
    return done


@pytest.mark.parametrize("name", zoo.CASES)
def test_every_small_case_of_the_zoo_has_the_form_before_any_pass_and_after_each(name: str) -> None:
    torch.manual_seed(0)
    case = zoo.case(name, size="small", batch=2)
    program = record(case.model, case.loss_fn, case.batch, optimizer=case.optimizer)
    check_form(program)
    run_passes(program)  # which checks it after each pass


def test_step_with_microbatches_clipping_and_statistics_has_the_form() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))

    def loss_fn(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        out = net(x)
        return out.square().mean(), {"out": out}

    done = record(model, loss_fn, (torch.randn(8, 3),), accumulate=2, clip_norm=1.0)
    assert done.grad_norm is not None
    check_form(done)
