"""Regions are mapped in one way: no part of an op and no field of a program can be forgotten."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.functionalize import functionalize
from takeback.compiler.passes.rename import rename
from takeback.compiler.program import Buffer, BufferId, Op, Program, Region, Role, Scratch, renaming, same

aten = torch.ops.aten
A, B, C, D = (BufferId(i) for i in range(4))


def region(buffer: BufferId, offset: int = 0, numel: int = 4) -> Region:
    return Region(buffer, torch.float32, (numel,), (1,), offset)


def buffers(*roles: Role) -> dict[BufferId, Buffer]:
    return {BufferId(i): Buffer(BufferId(i), 16, role) for i, role in enumerate(roles)}


# -- ops -----------------------------------------------------------------------------------------------------------


def test_every_part_of_an_op_is_mapped() -> None:
    op = Op(
        aten._foreach_add_.List,
        ((region(A), region(B)), (region(C),)),
        {"alpha": 1, "more": region(A)},
        (region(A),),
        mutates=(A, B),
        scratch=(Scratch(16, 0, None, A), Scratch(8, 1, 2)),
    )
    change = renaming({A: D})
    moved = op.map(reads=change, writes=change)
    assert moved.args == ((region(D), region(B)), (region(C),))
    assert moved.kwargs == {"alpha": 1, "more": region(D)}
    assert moved.results == (region(D),)
    assert moved.mutates == (D, B)
    assert moved.scratch == (Scratch(16, 0, None, D), Scratch(8, 1, 2))


def test_reads_and_writes_are_mapped_apart() -> None:
    op = Op(aten.add.Tensor, (region(A), region(B)), {}, (region(C),), scratch=(Scratch(16, 0, None, C),))
    read = op.map(reads=renaming({A: D, C: A}))
    assert (read.args, read.results, read.scratch) == ((region(D), region(B)), op.results, op.scratch)
    written = op.map(writes=renaming({A: D, C: A}))
    assert (written.args, written.results) == (op.args, (region(A),))
    assert written.scratch == (Scratch(16, 0, None, A),)


def test_op_without_a_changed_region_is_the_same_op() -> None:
    op = Op(aten.add.Tensor, (region(A), region(B)), {}, (region(C),))
    assert op.map(reads=renaming({D: A}), writes=same) is op


def test_two_parts_of_one_mutated_buffer_may_go_to_two_buffers() -> None:
    op = Op(aten._foreach_mul_.Scalar, ((region(A, 0, 2), region(A, 2, 2)), 2.0), {}, (), mutates=(A,))

    def split(r: Region) -> Region:
        return dataclasses.replace(r, buffer=C if r.offset == 0 else D, offset=0)

    assert op.map(reads=split, writes=split).mutates == (C, D)


def test_op_that_writes_in_place_cannot_be_given_another_operand_alone() -> None:
    op = Op(aten.add_.Tensor, (region(A), region(B)), {}, (region(A),), mutates=(A,))
    with pytest.raises(AssertionError, match=r"add_\.Tensor would write another buffer than it reads"):
        op.map(reads=renaming({A: D}))


# -- programs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wider(Program):
    """A program of the future: fields that no pass has heard of."""

    one: Region | None = None
    some: tuple[Region, ...] = ()
    table: Mapping[str, Region] = field(default_factory=dict)


def sample(hint: object, of: Region) -> object:
    """A value of a field's type that names a region; what is not listed here `Program.map_named` does not know."""
    known: dict[object, object] = {
        Region: of,
        Region | None: of,
        tuple[Region, ...]: (of,),
        Mapping[int, Region]: {0: of},
        Mapping[str, Region]: {"x": of},
    }
    return known[hint]


def in_place(kind: type[Program]) -> tuple[Program, set[str]]:
    """relu_ over a buffer that every field names which can name one; and these fields."""
    ops = (
        Op(aten.mul.Tensor, (region(A), region(A)), {}, (region(B),)),
        Op(aten.relu_.default, (region(B),), {}, (region(B),), mutates=(B,)),
    )
    hints = typing.get_type_hints(kind)
    naming = {f.name for f in dataclasses.fields(kind) if "Region" in str(hints[f.name])}
    given = {name: sample(hints[name], region(B)) for name in naming}
    return kind(ops, buffers(Role.BATCH, Role.INTERNAL, Role.INTERNAL), {}, {A: 0}, **given), naming  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Program, Wider])
def test_every_field_that_names_a_region_is_found(kind: type[Program]) -> None:
    program, naming = in_place(kind)
    assert {name for name, _ in program.named_regions()} == naming
    assert {"loss", "aux", "grads", "grad_norm", "found_inf", "slices", "flags"} <= naming


@pytest.mark.parametrize("kind", [Program, Wider])
def test_rename_and_functionalize_forget_no_field(kind: type[Program]) -> None:
    program, naming = in_place(kind)
    renamed = rename(program, {B: C})
    assert list(renamed.named_regions()) == [(name, region(C)) for name, _ in program.named_regions()]
    assert [r.buffer for op in renamed.ops for r in (*op.inputs, *op.outputs)] == [A, A, C, C, C]
    assert renamed.ops[1].mutates == (C,)
    own = functionalize(Draft(program, kept=frozenset({B})))
    assert [op.name for op in own.program.ops] == ["mul.Tensor", "relu"]
    [value] = own.program.ops[1].outputs
    assert value.buffer not in program.buffers
    assert {r.buffer for _, r in own.program.named_regions()} == own.kept == {value.buffer}
    assert len(list(own.program.named_regions())) == len(naming)


def test_what_is_named_by_buffer_stays() -> None:
    program, _ = in_place(Program)
    program = dataclasses.replace(program, eager_death={B: 1})
    renamed = rename(program, {B: C})
    assert renamed.eager_death == {B: 1}
    assert renamed.leaves == {A: 0}
    assert renamed.buffers == program.buffers


def test_borrowed_buffer_keeps_its_name() -> None:
    program, _ = in_place(Program)
    with pytest.raises(AssertionError, match="a borrowed buffer cannot be given another name"):
        rename(program, {A: C})
