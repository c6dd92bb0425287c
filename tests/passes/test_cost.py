"""The cost model: operations counted by hand, dtypes at their own rates, and bytes for everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import takeback as tb
from takeback.compiler.passes.cost import Rates, operations, seconds
from takeback.compiler.program import Op, Program, Region, Special

aten = torch.ops.aten
RATES = Rates(bytes_per_s=1e9, maths_per_s=1e8, op_s=1e-6, flops_per_s={"float32": 1e10, "bfloat16": 4e10})


def region(*shape: int, dtype: torch.dtype = torch.float32, buffer: int = 0) -> Region:
    return Region(buffer, dtype, shape, torch.empty(shape, device="meta").stride(), 0)  # type: ignore[arg-type]


def op(target: Any, *args: Any, results: tuple[Any, ...]) -> Op:
    return Op(target, args, {}, results)


def recorded(fn: Any, *shapes: tuple[int, ...]) -> Program:
    """The program of a step whose forward is `fn` of parameters of these shapes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.ParameterList(torch.randn(s) for s in shapes)

        def forward(self) -> Tensor:
            return fn(*self.p).square().mean()

    model = Model()
    step = tb.compile_step(model, lambda m: m(), torch.optim.SGD(model.parameters(), lr=0.1), memory="keep")
    step()
    return step._plans[0].original


def counted(program: Program, name: str) -> list[int]:
    return [operations(o) for o in program.ops if o.name.split(".")[0] == name]


def test_matrix_product_is_two_operations_a_term() -> None:
    x = op(aten.mm.default, region(3, 5), region(5, 7), results=(region(3, 7),))
    assert operations(x) == 2 * 3 * 5 * 7
    x = op(aten.addmm.default, region(7), region(3, 5), region(5, 7), results=(region(3, 7),))
    assert operations(x) == 2 * 3 * 5 * 7
    x = op(aten.bmm.default, region(4, 3, 5), region(4, 5, 7), results=(region(4, 3, 7),))
    assert operations(x) == 4 * 2 * 3 * 5 * 7


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (2, 1), (1, 2)])
def test_convolution_and_its_backward(groups: int, stride: int) -> None:
    program = recorded(
        lambda x, w: F.conv2d(x, w, padding=1, groups=groups, stride=stride), (2, 4, 8, 8), (6, 4 // groups, 3, 3)
    )
    side = 8 // stride
    forward = 2 * (2 * 6 * side * side) * (4 // groups) * 9
    assert counted(program, "convolution") == [forward]
    [backward] = counted(program, "convolution_backward")
    assert backward == 2 * forward  # one for the input, one for the weight


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_is_two_products_and_five_in_the_backward(causal: bool) -> None:
    program = recorded(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        (2, 3, 16, 8),
        (2, 3, 16, 8),
        (2, 3, 16, 8),
    )
    product = 2 * 2 * 3 * 16 * 16 * 8
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert counted(program, name) == [2 * product // (2 if causal else 1)]
    assert counted(program, name + "_backward") == [5 * product // (2 if causal else 1)]


def test_attention_that_keeps_its_log_sums_is_not_taken_for_a_causal_one() -> None:
    q = region(2, 3, 16, 8)
    full = op(
        *(aten._scaled_dot_product_efficient_attention.default, q, q, q, None, True, 0.0, False), results=(q, q, q, q)
    )
    assert operations(full) == 2 * 2 * 2 * 3 * 16 * 16 * 8


def test_everything_else_costs_its_bytes() -> None:
    x = op(aten.add.Tensor, region(1000), region(1000, buffer=1), results=(region(1000, buffer=2),))
    assert operations(x) == 0
    assert seconds(x, RATES) == pytest.approx(1e-6 + 3 * 4000 / 1e9)
    twice = op(aten.mul.Tensor, region(1000), region(1000), results=(region(1000, buffer=2),))
    assert seconds(twice, RATES) == pytest.approx(1e-6 + 2 * 4000 / 1e9), "an operand read twice is moved once"


def test_unknown_op_costs_its_bytes() -> None:
    @torch.library.custom_op("takeback_tests::unknown_cost", mutates_args=())
    def unknown(x: Tensor) -> Tensor:
        return x.clone()

    target = torch.ops.takeback_tests.unknown_cost.default
    x = op(target, region(1000), results=(region(1000, buffer=2),))
    assert operations(x) == 0
    assert seconds(x, RATES) == pytest.approx(1e-6 + 2 * 4000 / 1e9)


def test_exponentials_are_bound_by_arithmetic() -> None:
    x = op(aten.gelu.default, region(1000), results=(region(1000, buffer=2),))
    assert seconds(x, RATES) == pytest.approx(1e-6 + 1000 / 1e8)
    slow = dataclasses.replace(RATES, bytes_per_s=1e6)
    assert seconds(x, slow) == pytest.approx(1e-6 + 8000 / 1e6)


def test_product_runs_at_the_rate_of_its_dtype_and_at_float32s_where_that_is_unknown() -> None:
    def product(dtype: torch.dtype) -> float:
        a, b, c = (region(256, 256, dtype=dtype, buffer=i) for i in range(3))
        return seconds(op(aten.mm.default, a, b, results=(c,)), dataclasses.replace(RATES, bytes_per_s=1e15))

    flops = 2 * 256**3
    assert product(torch.float32) == pytest.approx(1e-6 + flops / 1e10)
    assert product(torch.bfloat16) == pytest.approx(1e-6 + flops / 4e10)
    assert product(torch.float64) == pytest.approx(1e-6 + flops / 1e10)


def test_convolutions_and_attention_have_efficiencies_of_their_own() -> None:
    rates = dataclasses.replace(RATES, bytes_per_s=1e15, convolution=0.5, attention=0.25)
    conv = recorded(lambda x, w: F.conv2d(x, w), (2, 4, 8, 8), (6, 4, 3, 3))
    [forward] = [o for o in conv.ops if o.name == "convolution"]
    assert seconds(forward, rates) == pytest.approx(1e-6 + operations(forward) / (1e10 * 0.5))
    attention = recorded(lambda q: F.scaled_dot_product_attention(q, q, q), (2, 3, 16, 8))
    [forward] = [o for o in attention.ops if o.name == "_scaled_dot_product_flash_attention_for_cpu"]
    assert seconds(forward, rates) == pytest.approx(1e-6 + operations(forward) / (1e10 * 0.25))


@pytest.mark.parametrize(("channels", "times"), [((3, 64), 8 / 3), ((64, 64), 1), ((12, 20), 16 / 12 * 24 / 20)])
def test_convolution_in_half_precision_computes_channels_eight_by_eight(
    channels: tuple[int, int], times: float
) -> None:
    rates = dataclasses.replace(RATES, bytes_per_s=1e18)
    into, out = channels
    x, w, y = (
        region(*shape, dtype=torch.bfloat16, buffer=i)
        for i, shape in enumerate(((2, into, 8, 8), (out, into, 3, 3), (2, out, 6, 6)))
    )
    pairs = ((1, 1), (0, 0), (1, 1))
    forward = op(aten.convolution.default, x, w, None, *pairs, False, (0, 0), 1, results=(y,))
    took = seconds(forward, rates) - 1e-6
    assert took == pytest.approx(times * operations(forward) / (4e10 * 0.4))
    masked = (True, True, False)
    backward = op(
        aten.convolution_backward.default, y, x, w, None, *pairs, False, (0, 0), 1, masked, results=(x, w, None)
    )
    assert seconds(backward, rates) - 1e-6 == pytest.approx(times * operations(backward) / (4e10 * 0.4))
    apart = op(aten.convolution.default, x, w, None, *pairs, False, (0, 0), 2, results=(y,))
    assert seconds(apart, rates) - 1e-6 == pytest.approx(operations(apart) / (4e10 * 0.4))


def test_formula_that_asks_tensors_gets_some() -> None:
    """As that of attention over texts in one row, where each may be the longest."""
    import torch.nn.attention.varlen

    q, out, logsumexp, rng = (region(12, 2, 8, buffer=i) for i in range(4))
    ends = region(4, dtype=torch.int32, buffer=5)
    varlen = op(
        torch.ops.torch_attn._varlen_attn.default, q, q, q, ends, ends, 6, 6, True, results=(out, logsumexp, rng)
    )
    assert operations(varlen) == 3 * 2 * (
        2 * 2 * 6 * 6 * 8
    )  # texts, products, and of each: heads, rows, columns, width


def test_what_runs_no_kernel_costs_nothing() -> None:
    assert seconds(Op(Special.SAVE_RANDOM, (), {}, ()), RATES) == 0.0
    assert seconds(op(aten.empty_like.default, region(8), results=(region(8),)), RATES) == 0.0


def test_every_op_of_the_zoo_has_a_finite_positive_cost() -> None:
    from takeback import zoo

    for name in ("gpt", "resnet"):
        case = zoo.case(name, batch=2)
        step = tb.compile_step(case.model, case.loss_fn, case.optimizer, memory="keep")
        step(*case.batch)
        for o in step._plans[0].original.ops:
            assert 0 <= seconds(o, RATES) < 1, o.name
