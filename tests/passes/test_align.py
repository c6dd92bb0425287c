"""align: products of odd sizes give the same numbers in padded buffers; what is named or somebody else's stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from takeback.compiler.form import check_form
from takeback.compiler.passes import Draft, Home, PassSettings, run_passes
from takeback.compiler.passes import align as module
from takeback.compiler.passes.align import align
from takeback.compiler.program import Buffer, BufferId, Op, Phase, Program, Region, Role, map_regions

aten = torch.ops.aten
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _every_product_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_OPERATIONS", 0)


class Half:
    """Writes a program over bfloat16 values, and holds what the borrowed ones are."""

    def __init__(self) -> None:
        self.buffers: dict[BufferId, Buffer] = {}
        self.given: dict[BufferId, Tensor] = {}
        self.ops: list[Op] = []

    def value(self, *shape: int, role: Role = Role.INTERNAL) -> Region:
        ident = BufferId(len(self.buffers))
        tensor = torch.randn(shape).to(HALF)
        self.buffers[ident] = Buffer(ident, tensor.numel() * 2, role)
        if role.borrowed:
            self.given[ident] = tensor
        return Region(ident, HALF, shape, tuple(tensor.stride()), 0)

    def weight(self, *shape: int) -> Region:
        return self.value(*shape, role=Role.PARAMETER)

    def op(self, target: Any, *args: Any, shape: tuple[int, ...], phase: Phase = Phase.FORWARD) -> Region:
        result = self.value(*shape)
        self.ops.append(Op(target, args, {}, (result,), phase=phase))
        return result

    def mm(self, a: Region, b: Region) -> Region:
        return self.op(aten.mm.default, a, b, shape=(a.shape[0], b.shape[1]))

    def program(self, loss: Region) -> Program:
        return Program(tuple(self.ops), self.buffers, self.given, {}, loss)


def turned(r: Region) -> Region:
    return replace(r, shape=r.shape[::-1], stride=r.stride[::-1])


def outcome(program: Program) -> dict[BufferId, Tensor]:
    """What a program leaves, op by op, in buffers that are full of NaN at first."""
    bytes_of = {b: torch.full((buffer.size_bytes,), 255, dtype=torch.uint8) for b, buffer in program.buffers.items()}
    for b, tensor in program.externals.items():
        bytes_of[b].view(HALF).copy_(tensor.reshape(-1))

    def look(r: Region) -> Tensor:
        return bytes_of[r.buffer].view(r.dtype).as_strided(r.shape, r.stride, r.offset)

    for op in program.ops:
        args = [list(a) if isinstance(a, tuple) else a for a in map_regions(op.args, look)]
        assert callable(op.target)
        made = op.target(*args, **op.kwargs)
        [region] = op.outputs
        if region.buffer not in op.mutates:
            assert tuple(made.shape) == region.shape, op.name
            look(region).copy_(made)
    found = {BufferId(-1): look(program.loss).clone()}
    return {**found, **{b: bytes_of[b] for b in program.externals}}


def check(w: Half, loss: Region, *, changes: bool = True) -> Program:
    program = w.program(loss)
    draft = align(Draft(program, frozenset(), Home.ALLOCATOR))
    check_form(draft.program, draft.kept)
    assert (draft.program is not program) is changes
    ours, plain = outcome(draft.program), outcome(program)
    assert ours.keys() == plain.keys()
    for b in plain:
        torch.testing.assert_close(ours[b].view(HALF), plain[b].view(HALF))
    return draft.program


def products(program: Program) -> list[Op]:
    return [op for op in program.ops if op.target in (aten.mm.default, aten.addmm.default)]


def is_aligned(op: Op) -> bool:
    return all(n % 8 == 0 for r in (*op.inputs, *op.outputs) for n in r.shape)


SIZES = [(9, 16, 24), (16, 9, 24), (16, 16, 25), (9, 11, 13)]


@pytest.mark.parametrize("which", ["plain", "left turned", "right turned", "both turned"])
@pytest.mark.parametrize("sizes", SIZES)
def test_product_of_odd_sizes_has_the_same_numbers(sizes: tuple[int, int, int], which: str) -> None:
    torch.manual_seed(0)
    rows, inner, columns = sizes
    w = Half()
    a = turned(w.weight(inner, rows)) if which.startswith(("left", "both")) else w.weight(rows, inner)
    b = turned(w.weight(columns, inner)) if which.startswith(("right", "both")) else w.weight(inner, columns)
    loss = w.op(aten.mul.Tensor, w.mm(a, b), 2, shape=(rows, columns))
    [product] = products(check(w, loss))
    assert is_aligned(product)


@pytest.mark.parametrize(
    ("bias", "widens"),
    [((13,), True), ((1,), False), ((9, 13), False), ((9, 1), False), ((1, 13), False)],
)
def test_what_is_added_is_padded_only_where_it_is_one_number_for_each_column(
    bias: tuple[int, ...], widens: bool
) -> None:
    torch.manual_seed(0)
    w = Half()
    added, a, b = w.weight(*bias), w.weight(9, 16), w.weight(16, 13)
    y = w.op(aten.addmm.default, added, a, b, shape=(9, 13))
    loss = w.op(aten.mul.Tensor, y, 2, shape=(9, 13))
    program = check(w, loss, changes=widens)
    assert (products(program)[0].outputs[0].shape == (16, 16)) is widens


VIEWS: dict[str, Callable[[Region], Region]] = {
    "turned": turned,
    "some columns": lambda r: replace(r, shape=(9, 4), offset=3),
    "some rows": lambda r: replace(r, shape=(4, 12), offset=2 * 12),
    "by threes": lambda r: replace(r, shape=(9, 4, 3), stride=(12, 3, 1)),
    "every other row": lambda r: replace(r, shape=(5, 12), stride=(24, 1)),
    "stretched": lambda r: replace(r, shape=(2, 9, 12), stride=(0, 12, 1)),
    "flat": lambda r: replace(r, shape=(108,), stride=(1,)),
    "in other rows": lambda r: replace(r, shape=(27, 4), stride=(4, 1)),
    "across rows": lambda r: replace(r, shape=(6,), stride=(1,), offset=9),
    "a diagonal": lambda r: replace(r, shape=(9,), stride=(13,)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_padded_result_is_read_through_views(name: str) -> None:
    torch.manual_seed(0)
    w = Half()
    y = w.mm(w.weight(9, 16), w.weight(16, 12))
    look = VIEWS[name](y)
    loss = w.op(aten.mul.Tensor, look, 2, shape=look.shape)
    [product] = products(check(w, loss))
    columns = 12 if name in ("flat", "in other rows", "across rows", "a diagonal") else 16
    assert product.outputs[0].shape == (16, columns)


def test_look_of_another_dtype_keeps_the_columns_as_they_are() -> None:
    torch.manual_seed(0)
    w = Half()
    y = w.mm(w.weight(9, 16), w.weight(16, 12))
    pairs = replace(y, dtype=torch.float32, shape=(9, 6), stride=(6, 1))
    result = w.value(9, 12)
    w.ops.append(
        Op(aten.neg.default, (pairs,), {}, (replace(result, dtype=torch.float32, shape=(9, 6), stride=(6, 1)),))
    )
    program = w.program(result)
    draft = align(Draft(program, frozenset(), Home.ALLOCATOR))
    [product] = products(draft.program)
    assert product.outputs[0].shape[1] == 12


def test_result_that_is_named_kept_or_written_stays() -> None:
    torch.manual_seed(0)
    w = Half()
    y = w.mm(w.weight(9, 16), w.weight(16, 13))
    check(w, y, changes=False)
    loss = w.op(aten.mul.Tensor, y, 2, shape=(9, 13))
    program = w.program(loss)
    kept = align(Draft(program, frozenset((y.buffer,)), Home.ALLOCATOR))
    assert kept.program is program
    w.ops.insert(1, Op(aten.mul_.Tensor, (y, 3), {}, (y,), (y.buffer,)))
    check(w, loss, changes=False)


def test_named_result_of_an_odd_inner_size_has_padded_factors() -> None:
    torch.manual_seed(0)
    w = Half()
    y = w.mm(w.weight(16, 9), w.weight(9, 16))
    program = check(w, y)
    assert program.loss == y
    assert is_aligned(products(program)[0])


def test_padding_is_shared_until_the_factor_is_written() -> None:
    torch.manual_seed(0)
    w = Half()
    a, b = w.weight(16, 9), w.weight(9, 16)
    first = w.mm(a, b)
    second = w.mm(a, b)
    w.ops.append(Op(aten.mul_.Tensor, (a, 3), {}, (a,), (a.buffer,)))
    third = w.mm(a, b)
    total = w.op(aten.add.Tensor, first, second, shape=(16, 16))
    loss = w.op(aten.add.Tensor, total, third, shape=(16, 16))
    program = check(w, loss)
    pads = [op.inputs[0].buffer for op in program.ops if op.target is aten.constant_pad_nd.default]
    assert pads == [a.buffer, b.buffer, a.buffer]


def test_result_that_is_a_factor_again_and_update_products() -> None:
    torch.manual_seed(0)
    w = Half()
    y = w.mm(w.weight(9, 11), w.weight(11, 13))
    z = w.mm(turned(y), y)
    loss = w.op(aten.mul.Tensor, z, 2, shape=(13, 13))
    assert all(map(is_aligned, products(check(w, loss))))
    late = Half()
    y = late.op(aten.mm.default, late.weight(9, 11), late.weight(11, 13), shape=(9, 13), phase=Phase.UPDATE)
    check(late, late.op(aten.mul.Tensor, y, 2, shape=(9, 13)), changes=False)


def test_even_sizes_other_dtypes_and_small_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    w = Half()
    loss = w.op(aten.mul.Tensor, w.mm(w.weight(8, 16), w.weight(16, 24)), 2, shape=(8, 24))
    check(w, loss, changes=False)
    odd = Half()
    loss = odd.op(aten.mul.Tensor, odd.mm(odd.weight(9, 16), odd.weight(16, 13)), 2, shape=(9, 13))
    monkeypatch.setattr(module, "_LEAST_OPERATIONS", 1e9)
    check(odd, loss, changes=False)


def test_stage_is_for_fast_plans_on_a_gpu() -> None:
    torch.manual_seed(0)
    w = Half()
    program = w.program(w.op(aten.mul.Tensor, w.mm(w.weight(9, 16), w.weight(16, 13)), 2, shape=(9, 13)))
    for fast, home, there in ((True, Home.ALLOCATOR, True), (True, Home.ARENA, False), (False, Home.ALLOCATOR, False)):
        assert ("align" in run_passes(program, settings=PassSettings(fast=fast, home=home)).passes) is there
