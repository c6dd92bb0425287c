"""Every fact in ownership/facts.py, proved: an op written onto its operand gives the bits it gives elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from takeback.compiler.ownership.facts import (
    _ROWWISE,
    COPY,
    FILL,
    Refused,
    geometry_refusal,
    inplace_overload,
    out_overload,
    overwritable_operands,
)
from takeback.compiler.program import Buffer, BufferId, Op, Region, Role
from takeback.compiler.run.allocator import Cell, load

aten = torch.ops.aten
SHAPES = [(5, 7), (64, 1000), (3, 50, 129), (2, 3, 8, 512)]


def _rows(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
def test_softmax_may_be_written_onto_its_input(op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    target = getattr(aten, op)
    x = _rows(shape).to(dtype)
    expected = target.default(x, -1, False)
    target.out(x, -1, False, out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("onto", [0, 1])
@pytest.mark.parametrize("op", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_softmax_backward_may_be_written_onto_either_operand(
    op: str, onto: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    target = getattr(aten, op)
    grad, out = _rows(shape).to(dtype), torch.log_softmax(_rows(shape), -1).to(dtype)
    expected = target.default(grad, out, len(shape) - 1, dtype)
    given = (grad, out)
    overload = out_overload(target.default)
    assert overload is not None
    name = next(a.name for a in overload._schema.arguments if a.is_out)
    overload(grad, out, len(shape) - 1, dtype, **{name: given[onto]})
    assert torch.equal(given[onto], expected)


def _placed(call: Callable[[], tuple[torch.Tensor, ...]], onto: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs an op whose first request of the size of `onto` is answered with the bytes of `onto`."""
    native = load()
    if native is None:
        pytest.skip("needs the native allocator")
    cell = Cell()
    with native.record(cell) as recording:
        cell.view[0] = 0
        first = call()
        cell.view[0] = -1
    address = first[0].untyped_storage().data_ptr()
    sizes = [int(e["size_bytes"]) for e in recording.events if e["kind"] == 0]
    place = [int(e["address"]) == address for e in recording.events if e["kind"] == 0]
    del first
    arena = native.arena(onto.numel() * onto.element_size())
    home = torch.empty(0, dtype=onto.dtype).set_(arena.tensor.untyped_storage(), 0, onto.shape, onto.stride())
    home.copy_(onto)
    onto.set_(arena.tensor.untyped_storage(), 0, onto.shape, onto.stride())
    script = native.script([0, len(sizes)], sizes, [0 if p else -1 for p in place], arena, cell)
    with script.replay():
        cell.view[0] = 0
        second = call()
        cell.view[0] = -1
    assert second[0].data_ptr() == onto.data_ptr(), "the result was not written onto the operand"
    return second


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (64, 1000), (3, 50, 129), (2, 30, 512)])
def test_layer_norm_may_be_written_onto_its_input(shape: tuple[int, ...], affine: bool) -> None:
    x = _rows(shape)
    w, b = (torch.randn(shape[-1]), torch.randn(shape[-1])) if affine else (None, None)
    expected = aten.native_layer_norm.default(x.clone(), [shape[-1]], w, b, 1e-5)
    got = _placed(lambda: aten.native_layer_norm.default(x, [shape[-1]], w, b, 1e-5), x)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("onto", ["grad", "x"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (64, 1000), (3, 50, 129), (2, 30, 512)])
def test_layer_norm_backward_may_be_written_onto_gradient_or_input(
    shape: tuple[int, ...], affine: bool, onto: str
) -> None:
    x, grad = _rows(shape), _rows(shape).flip(0).contiguous()
    w, b = (torch.randn(shape[-1]), torch.randn(shape[-1])) if affine else (None, None)
    _, mean, rstd = aten.native_layer_norm.default(x, [shape[-1]], w, b, 1e-5)
    mask = [True, affine, affine]

    def call() -> tuple[torch.Tensor, ...]:
        return tuple(aten.native_layer_norm_backward.default(grad, x, [shape[-1]], mean, rstd, w, b, mask))

    expected = tuple(t.clone() if t is not None else None for t in call())
    got = _placed(call, grad if onto == "grad" else x)
    assert all(g is None or torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_every_rowwise_fact_is_proved_above() -> None:
    assert set(_ROWWISE) == {
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
    }


def test_masked_fill_in_place_gives_the_functional_bits() -> None:
    x, mask = _rows((9, 33)), _rows((9, 33)) > 0
    expected = aten.masked_fill.Scalar(x, mask, 0.5)
    inplace = inplace_overload(aten.masked_fill.Scalar)
    assert inplace is not None
    inplace(x, mask, 0.5)
    assert torch.equal(x, expected)


def test_relu_in_place_gives_the_functional_bits() -> None:
    x = _rows((9, 33))
    x[0, :3] = torch.tensor([float("nan"), -0.0, float("-inf")])
    expected = aten.relu.default(x)
    inplace = inplace_overload(aten.relu.default)
    assert inplace is not None
    inplace(x)
    assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert inplace_overload(aten.add.Tensor) is None, "has a true out= kernel"


UNARY = ["gelu", "silu", "tanh", "sigmoid", "exp", "log1p", "sqrt", "rsqrt", "neg", "abs", "sin", "erf"]
BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "pow.Tensor_Tensor", "atan2"]
BACKWARD = ["gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "threshold_backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UNARY)
def test_pointwise_op_may_be_written_onto_its_operand(name: str, dtype: torch.dtype) -> None:
    target = getattr(aten, name).default
    overload = out_overload(target)
    assert overload is not None
    x = (_rows((37, 1001)).abs() + 0.1).to(dtype)
    expected = target(x)
    overload(x, out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("onto", [0, 1])
@pytest.mark.parametrize("name", [*BINARY, *BACKWARD])
def test_binary_pointwise_op_may_be_written_onto_either_operand(name: str, onto: int) -> None:
    packet, _, overload_name = name.partition(".")
    target = getattr(getattr(aten, packet), overload_name or "default")
    overload = out_overload(target)
    assert overload is not None
    assert torch.Tag.pointwise in target.tags
    given = [_rows((37, 1001)).abs() + 0.1, _rows((1001, 37)).t().contiguous().abs() + 0.1]
    extra = (0.3,) if name == "threshold_backward" else ()
    expected = target(*given, *extra)
    out_name = next(a.name for a in overload._schema.arguments if a.is_out)
    overload(*given, *extra, **{out_name: given[onto]})
    assert torch.equal(given[onto], expected)


@pytest.mark.parametrize(
    "name", ["convolution", "native_layer_norm", "embedding", "native_dropout", "index_put", "clone"]
)
def test_out_overloads_that_allocate_and_copy_are_not_taken_for_true_ones(name: str) -> None:
    assert out_overload(getattr(aten, name).default) is None


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "_softmax", "cat", "gelu_backward", "nll_loss_forward"])
def test_true_out_overloads_allocate_nothing_of_the_results_size(name: str) -> None:
    native = load()
    if native is None:
        pytest.skip("needs the native allocator")
    x = _rows((64, 64))
    cases: dict[str, tuple[object, ...]] = {
        "mm": (x, x),
        "bmm": (x[None], x[None]),
        "addmm": (x, x, x),
        "_softmax": (x, -1, False),
        "cat": ([x, x],),
        "gelu_backward": (x, x),
        "nll_loss_forward": (x, torch.zeros(64, dtype=torch.long), None, 0, -100),
    }
    target = getattr(aten, name).default
    results = target(*cases[name])
    outs = [torch.empty_like(r) for r in (results if isinstance(results, tuple) else (results,))]
    overload = out_overload(target)
    assert overload is not None
    names = [a.name for a in overload._schema.arguments if a.is_out]
    cell = Cell()
    with native.record(cell) as recording:
        cell.view[0] = 0
        overload(*cases[name], **dict(zip(names, outs, strict=True)))
        cell.view[0] = -1
    asked = [int(e["size_bytes"]) for e in recording.events if e["kind"] == 0]
    assert all(size < outs[0].numel() * 4 for size in asked)


def test_fills_and_copies_give_the_bits_of_the_ops_they_replace() -> None:
    x = _rows((4, 5))
    for target, (place, number) in FILL.items():
        args = {
            aten.full.default: ([4, 5], 2.5),
            aten.full_like.default: (x, 2.5),
            aten.new_full.default: (x, [4, 5], 2.5),
            aten.scalar_tensor.default: (2.5,),
            aten.zeros.default: ([4, 5],),
            aten.ones.default: ([4, 5],),
            aten.new_zeros.default: (x, [4, 5]),
            aten.new_ones.default: (x, [4, 5]),
        }.get(target, (x,))
        expected = target(*args)
        value = number if place is None else args[place]
        assert torch.equal(torch.empty_like(expected).fill_(value), expected), str(target)
    assert torch.equal(torch.empty(4, 5).copy_(x.t().contiguous().t()), aten.clone.default(x))
    half = aten._to_copy.default(x, dtype=torch.bfloat16)
    assert torch.equal(torch.empty_like(half).copy_(x), half)
    assert {aten.clone.default, aten._to_copy.default} == set(COPY)


def _region(buffer: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Region:
    return Region(BufferId(buffer), torch.float32, shape, stride, offset)


def _buffers(*sizes: int) -> dict[BufferId, Buffer]:
    return {BufferId(i): Buffer(BufferId(i), size, Role.INTERNAL) for i, size in enumerate(sizes)}


def test_overwriting_is_refused_for_another_geometry_a_part_of_a_buffer_and_a_second_look_at_it() -> None:
    x, y = _region(0, (4, 4), (4, 1)), _region(1, (4, 4), (4, 1))
    op = Op(aten.add.Tensor, (x, x), {}, (y,))
    assert geometry_refusal(op, y, x, _buffers(64, 64)) is None
    turned = _region(0, (4, 4), (1, 4))
    assert geometry_refusal(Op(aten.add.Tensor, (turned, x), {}, (y,)), y, turned, _buffers(64, 64)) is Refused.GEOMETRY
    assert geometry_refusal(op, y, x, _buffers(128, 64)) is Refused.PART
    both = Op(aten.add.Tensor, (x, turned), {}, (y,))
    assert geometry_refusal(both, y, x, _buffers(64, 64)) is Refused.OVERLAP


def test_softmax_over_another_than_the_last_dimension_overwrites_nothing() -> None:
    x, y = _region(0, (4, 4), (4, 1)), _region(1, (4, 4), (4, 1))
    assert overwritable_operands(Op(aten._softmax.default, (x, 0, False), {}, (y,))) == ()
    assert overwritable_operands(Op(aten._softmax.default, (x, -1, False), {}, (y,))) == (0,)
    assert overwritable_operands(Op(aten.mm.default, (x, x), {}, (y,))) == ()
