"""Every fact in ownership/facts.py, proved: an op written onto its operand gives the bits it gives elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from operators import COMPLEX, FLOATS, WHOLE, calls, copied, operators, same_numbers
from takeback.compiler.ownership.facts import (
    _ROWWISE,
    COPY,
    FILL,
    Refused,
    bits_refusal,
    geometry_refusal,
    inplace_overload,
    out_overload,
    overwritable_operands,
)
from takeback.compiler.program import Buffer, BufferId, Op, Region, Role
from takeback.compiler.run.allocator import Cell, load
from takeback.compiler.run.bindings import fastest

aten = torch.ops.aten
Named = dict[str, object]

SHAPES = [(5, 7), (64, 1000), (3, 50, 129), (2, 3, 8, 512)]


def _rows(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
def test_softmax_may_be_written_onto_its_input(op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    target = getattr(aten, op)
    x = _rows(shape).to(dtype)
    expected = target.default(x, -1, False)
    target.out(x, -1, False, out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
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


#: Of the rows and of the weight.
NORM_DTYPES = [
    *((t, t) for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
    *((t, torch.float32) for t in (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize("dtypes", NORM_DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (64, 1000), (3, 50, 129), (2, 30, 512)])
def test_layer_norm_may_be_written_onto_its_input(
    shape: tuple[int, ...], affine: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x = _rows(shape).to(dtypes[0])
    w, b = (torch.randn(shape[-1], dtype=dtypes[1]) for _ in range(2)) if affine else (None, None)
    expected = aten.native_layer_norm.default(x.clone(), [shape[-1]], w, b, 1e-5)
    got = _placed(lambda: aten.native_layer_norm.default(x, [shape[-1]], w, b, 1e-5), x)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtypes", NORM_DTYPES, ids=str)
@pytest.mark.parametrize("onto", ["grad", "x"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (64, 1000), (3, 50, 129), (2, 30, 512)])
def test_layer_norm_backward_may_be_written_onto_gradient_or_input(
    shape: tuple[int, ...], affine: bool, onto: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x, grad = _rows(shape).to(dtypes[0]), _rows(shape).flip(0).contiguous().to(dtypes[0])
    w, b = (torch.randn(shape[-1], dtype=dtypes[1]) for _ in range(2)) if affine else (None, None)
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


# -- pointwise ops, all of them ----------------------------------------------------------------------------------------


def _is_pointwise(op: torch._ops.OpOverload) -> bool:
    """For the facts."""
    if torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return out_overload(op) is not None or inplace_overload(op) is not None


def _run(overload: torch._ops.OpOverload, args: list[object], named: Named, onto: list[torch.Tensor]) -> None:
    outs = [a.name for a in overload._schema.arguments if a.is_out]
    fastest(overload)(*args, **named, **dict(zip(outs, onto, strict=True)))


def _as_op(op: torch._ops.OpOverload, args: list[object], named: Named, result: torch.Tensor) -> Op:
    ids: dict[int, int] = {}

    def region(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        buffer = BufferId(ids.setdefault(id(value), len(ids)))
        return Region(buffer, value.dtype, tuple(value.shape), tuple(value.stride()), 0)

    return Op(op, tuple(map(region, args)), dict(named), (region(result),))


def _differing(op: torch._ops.OpOverload, dtype: torch.dtype) -> tuple[int, set[str]]:
    """How often the op was written onto an operand, as the facts allow, and where the bits were other ones. Where they
    allow it for none, the `out=` kernel is still to give the functional bits."""
    out, inplace = out_overload(op), inplace_overload(op)
    tried, wrong = 0, set()
    for args, named in calls(op, dtype):
        try:
            made = op(*args, **named)
        except (RuntimeError, IndexError):
            continue  # not for this dtype
        results = list(made) if isinstance(made, tuple) else [made]
        if out is not None:
            fresh = [torch.empty_like(r) for r in results]
            _run(out, args, named, fresh)
            if not all(map(same_numbers, fresh, results)):
                wrong.add(f"{op} of {dtype}: its out= kernel")
        for index in overwritable_operands(_as_op(op, args, named, results[0])):
            operand = args[index]
            if not isinstance(operand, torch.Tensor) or operand.dtype != results[0].dtype:
                continue
            if operand.shape != results[0].shape or operand.stride() != results[0].stride():
                continue
            copy = copied(operand)
            given = [copy if a is operand else a for a in args]
            if out is not None:
                _run(out, given, named, [copy, *map(torch.empty_like, results[1:])])
            else:
                assert inplace is not None
                fastest(inplace)(*given, **named)
            tried += 1
            if not same_numbers(copy, results[0]):
                layouts = [tuple(a.stride()) for a in args if isinstance(a, torch.Tensor)]
                wrong.add(f"{op} of {dtype} onto operand {index}: {tuple(copy.shape)}, strides {layouts}, {named}")
    return tried, wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *WHOLE], ids=str)
def test_every_pointwise_op_may_be_written_onto_its_operands_as_the_facts_say(dtype: torch.dtype) -> None:
    tried, wrong = 0, set()
    for op in filter(_is_pointwise, operators()):
        times, found = _differing(op, dtype)
        tried += times
        wrong |= found
    assert not wrong, sorted(wrong)[:20]
    assert tried > (20 if dtype is torch.complex32 else 500)


@pytest.mark.parametrize("name", ["mul.Tensor", "div.Tensor", "add.Tensor", "reciprocal"])
def test_products_of_complex_numbers_overwrite_nothing(name: str) -> None:
    packet, _, overload = name.partition(".")
    target = getattr(getattr(aten, packet), overload or "default")
    count = 1 if packet == "reciprocal" else 2
    for dtype, harmless in ((torch.float32, True), (torch.complex64, packet == "add")):
        x = torch.randn(4, dtype=dtype)
        op = _as_op(target, [x, x + 1][:count], {}, x + 2)
        assert bool(overwritable_operands(op)) is harmless
        assert bits_refusal(op) is (None if harmless else Refused.COMPLEX)
    scaled = _as_op(aten.add.Tensor, [x, x + 1], {"alpha": 0.5}, x + 2)
    assert overwritable_operands(scaled) == ()


def test_number_that_a_product_in_place_rounds_before_it_multiplies_is_refused_in_half_precision() -> None:
    """torch hands mul_.Scalar on with the operands exchanged (2.13)."""
    for dtype, reason in ((torch.float32, None), (torch.bfloat16, Refused.ROUNDED), (torch.float16, Refused.ROUNDED)):
        x = torch.randn(4).to(dtype)
        op = _as_op(aten.mul.Scalar, [x, 0.7], {}, x + 1)
        assert bits_refusal(op) is reason
        assert overwritable_operands(op) == (() if reason else (0,))


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
