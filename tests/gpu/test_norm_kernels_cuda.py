"""The norms' backward into slices on a GPU: right to rounding, nothing else touched, the same bits again."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1] / "nn"))  # the cases are shared with the CPU's tests

from norm_cases import EPS, OLD, Case, check, draw, flat_of, reference, rms_error, run_

from takeback.nn.kernels.norms import Done, Into, NotMine, rms_norm_backward_

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
KINDS = {
    "layer": Case("layer", (4, 133, 96), device="cuda"),
    "rms": Case("rms", (4, 133, 96), device="cuda"),
    "batch, rows": Case("batch", (137, 96), device="cuda"),
    "batch, NCL": Case("batch", (5, 6, 141), device="cuda"),
    "batch, NCHW": Case("batch", (9, 6, 19, 11), device="cuda"),
    "batch, NCHW, large": Case("batch", (3, 5, 40, 41), device="cuda"),
    "batch, channels_last": Case("batch", (4, 6, 19, 11), layout=LAST, device="cuda"),
    "batch, channels_last, wide": Case("batch", (4, 80, 5, 7), layout=LAST, device="cuda"),
    "batch, channels_last_3d": Case("batch", (2, 16, 3, 5, 4), layout=LAST_3D, device="cuda"),
    "eval, rows": Case("eval", (137, 96), device="cuda"),
    "eval, NCHW": Case("eval", (4, 6, 19, 11), device="cuda"),
    "eval, channels_last": Case("eval", (4, 6, 19, 11), layout=LAST, device="cuda"),
    "group": Case("group", (3, 12, 37, 39), groups=4, device="cuda"),
    "group, rows": Case("group", (9, 12), groups=3, device="cuda"),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_float64s_to_rounding_and_neighbours_stay(
    kind: str, dtype: torch.dtype, accumulate: bool
) -> None:
    check(replace(KINDS[kind], dtype=dtype, accumulate=accumulate))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_parameters(kind: str, dtype: torch.dtype) -> None:
    check(replace(KINDS[kind], dtype=dtype, parameters=dtype, accumulate=True))


@pytest.mark.parametrize(("weight_grad", "bias_grad", "dx"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("kind", KINDS)
def test_each_destination_is_optional(kind: str, weight_grad: bool, bias_grad: bool, dx: bool) -> None:
    check(replace(KINDS[kind], weight_grad=weight_grad, bias_grad=bias_grad, dx=dx))


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_without_weight_has_dx(kind: str) -> None:
    check(replace(KINDS[kind], weight=False, weight_grad=False, bias_grad=False))


@pytest.mark.parametrize("rows", [1, 65, 3000])
@pytest.mark.parametrize("columns", [1, 7, 769])
@pytest.mark.parametrize("norm", ["layer", "rms", "batch"])
def test_odd_rows(norm: str, rows: int, columns: int) -> None:
    check(Case(norm, (rows, columns), device="cuda"))
    check(Case(norm, (rows, columns), dx=False, device="cuda"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 7, 1, 5), (3, 1, 70, 70), (40, 3, 37, 37), (2, 769, 2, 3)])
def test_odd_images(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    check(Case("batch", shape, layout=layout, device="cuda"))
    check(Case("eval", shape, layout=layout, device="cuda"))
    if layout == torch.contiguous_format:
        check(Case("group", shape, groups=shape[1], device="cuda"))
        check(Case("group", shape, groups=1, device="cuda"))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dx", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_zeros_or_leaves_the_old(kind: str, dx: bool, accumulate: bool) -> None:
    case = KINDS[kind]
    check(replace(case, shape=(0, *case.shape[1:]), dx=dx, accumulate=accumulate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_longest_row_has_dx_and_a_longer_one_is_refused(norm: str, dtype: torch.dtype) -> None:
    case = Case(norm, (5, 1 << 14), dtype=dtype, device="cuda")
    check(case)
    longer = replace(case, shape=(5, (1 << 14) + 1))
    check(replace(longer, dx=False))
    drawn = draw(longer)
    _, weight, bias = flat_of(longer)
    result = run_(longer, drawn, Into(weight), Into(bias))
    assert isinstance(result, NotMine)
    assert "registers" in result.reason
    assert bool((weight == OLD).all())


@pytest.mark.parametrize(
    "case",
    [
        Case("layer", (100_000, 24), device="cuda"),
        Case("layer", (100_000, 24), device="cuda", dx=False),
        Case("rms", (100_000, 24), device="cuda"),
        Case("batch", (100_000, 24), device="cuda"),
        Case("batch", (25, 3, 200, 200), device="cuda"),
        Case("batch", (25, 3, 200, 200), layout=LAST, device="cuda"),
        Case("group", (25, 4, 200, 200), groups=2, device="cuda"),
    ],
    ids=str,
)
def test_error_of_a_large_reduction_is_at_most_four_times_torchs(case: Case) -> None:
    drawn = draw(case)
    _, weight, bias = flat_of(case)
    assert run_(case, drawn, Into(weight), Into(bias))
    _, wanted_weight, wanted_bias = reference(case, drawn)
    torch_weight, torch_bias = torchs(case)
    floor = torch.finfo(torch.float32).eps
    assert rms_error(weight, wanted_weight) <= 4 * rms_error(torch_weight, wanted_weight) + floor
    if torch_bias is not None:
        assert rms_error(bias, wanted_bias) <= 4 * rms_error(torch_bias, wanted_bias) + floor


def torchs(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias that torch's autograd computes on the GPU."""
    drawn = draw(case)
    assert drawn.weight is not None
    weight = drawn.weight.requires_grad_()
    bias = torch.zeros_like(weight).requires_grad_()
    if case.norm == "rms":
        y = F.rms_norm(drawn.x, case.shape[-1:], weight, EPS)
        return torch.autograd.grad(y, weight, drawn.dy)[0], None
    if case.norm == "layer":
        y = F.layer_norm(drawn.x, case.shape[-1:], weight, bias, EPS)
    elif case.norm == "batch":
        y = F.batch_norm(drawn.x, None, None, weight, bias, True, 0.1, EPS)
    else:
        y = F.group_norm(drawn.x, case.groups, weight, bias, EPS)
    first, second = torch.autograd.grad(y, [weight, bias], drawn.dy)
    return first, second


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_gives_the_same_bits(kind: str) -> None:
    case = KINDS[kind]
    case = replace(case, shape=(case.shape[0] * 40, *case.shape[1:]), dtype=torch.bfloat16)
    drawn = draw(case)
    seen = []
    for _ in range(3):
        flat, weight, bias = flat_of(case)
        done = run_(case, drawn, Into(weight), Into(bias))
        assert isinstance(done, Done)
        assert done.dx is not None
        seen.append((flat, done.dx))
    for flat, dx in seen[1:]:
        assert torch.equal(flat, seen[0][0])
        assert torch.equal(dx, seen[0][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norms_default_epsilon_is_torchs(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype).cuda().requires_grad_()
    dy = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    (wanted,) = torch.autograd.grad(F.rms_norm(x, (48,)), x, dy)
    done = rms_norm_backward_(dy, x.detach(), (48,), None, None)
    assert isinstance(done, Done)
    torch.testing.assert_close(done.dx, wanted, rtol=max(1e-5, 2 * torch.finfo(dtype).eps), atol=1e-3)


def test_tensors_on_two_devices_are_refused() -> None:
    x = torch.ones(4, 8, device="cuda")
    result = rms_norm_backward_(x, x, [8], None, EPS, weight_grad=Into(torch.zeros(8)))
    assert isinstance(result, NotMine)
    assert "the weight slice is on cpu, x on cuda:0" in result.reason
