"""The norms' backward into slices on the CPU: right to rounding, nothing else touched, the same bits again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from norm_cases import EPS, OLD, Case, check, draw, flat_of, reference, rms_error, run_

from pairwise import pairwise
from takeback.nn.kernels import library, norms_cpu
from takeback.nn.kernels.norms import (
    Done,
    Into,
    NotMine,
    batch_norm_backward_,
    group_norm_backward_,
    layer_norm_backward_,
    rms_norm_backward_,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ROWS, LAST, LAST_3D = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
KINDS = {
    "layer": Case("layer", (4, 33, 96)),
    "rms": Case("rms", (4, 33, 96)),
    "batch, rows": Case("batch", (37, 96)),
    "batch, NCL": Case("batch", (5, 6, 41)),
    "batch, NCHW": Case("batch", (4, 6, 9, 11)),
    "batch, channels_last": Case("batch", (4, 6, 9, 11), layout=LAST),
    "batch, channels_last, wide": Case("batch", (4, 80, 5, 7), layout=LAST),
    "batch, channels_last_3d": Case("batch", (2, 16, 3, 5, 4), layout=LAST_3D),
    "eval, rows": Case("eval", (37, 96)),
    "eval, NCHW": Case("eval", (4, 6, 9, 11)),
    "eval, channels_last": Case("eval", (4, 6, 9, 11), layout=LAST),
    "group": Case("group", (3, 12, 7, 9), groups=4),
    "group, rows": Case("group", (9, 12), groups=3),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "dtype", "accumulate"), pairwise(list(KINDS), DTYPES, [False, True]), ids=str)
def test_gradients_are_float64s_to_rounding_and_neighbours_stay(
    kind: str, dtype: torch.dtype, accumulate: bool
) -> None:
    check(replace(KINDS[kind], dtype=dtype, accumulate=accumulate))


@pytest.mark.parametrize(
    ("kind", "dtype", "accumulate"), pairwise(list(KINDS), [torch.bfloat16, torch.float16], [False, True]), ids=str
)
def test_half_precision_parameters(kind: str, dtype: torch.dtype, accumulate: bool) -> None:
    check(replace(KINDS[kind], dtype=dtype, parameters=dtype, accumulate=accumulate))


@pytest.mark.parametrize(("kind", "weight_grad", "bias_grad", "dx"), pairwise(list(KINDS), *[[False, True]] * 3))
def test_each_destination_is_optional(kind: str, weight_grad: bool, bias_grad: bool, dx: bool) -> None:
    check(replace(KINDS[kind], weight_grad=weight_grad, bias_grad=bias_grad, dx=dx))


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_without_weight_has_dx(kind: str) -> None:
    check(replace(KINDS[kind], weight=False, weight_grad=False, bias_grad=False))


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "dtype"),
    pairwise(
        ["layer", "rms", "batch"], [1, 2, 65, 300], [1, 7, 16, 769], [torch.float32, torch.bfloat16, torch.float16]
    ),
    ids=str,
)
def test_odd_rows(norm: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    check(Case(norm, (rows, columns), dtype=dtype))


@pytest.mark.parametrize("layout", [ROWS, LAST])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 7, 1, 5), (3, 1, 70, 70), (40, 3, 37, 37), (2, 769, 2, 3)])
def test_odd_images(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    check(Case("batch", shape, layout=layout))
    check(Case("eval", shape, layout=layout))
    if layout == ROWS:
        check(Case("group", shape, groups=shape[1]))
        check(Case("group", shape, groups=1))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case("layer", (0, 24)),
        Case("rms", (0, 24)),
        Case("batch", (0, 24)),
        Case("batch", (0, 6, 3, 3)),
        Case("batch", (0, 6, 3, 3), layout=LAST),
        Case("group", (0, 6, 3, 3), groups=2),
    ],
    ids=str,
)
def test_an_empty_batch_gives_zeros_or_leaves_the_old(case: Case, accumulate: bool) -> None:
    check(replace(case, accumulate=accumulate))


def torchs(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of weight and bias that torch's kernels compute."""
    drawn = draw(case)
    aten, (x, dy, weight) = torch.ops.aten, (drawn.x, drawn.dy, drawn.weight)
    assert weight is not None
    mask, n = [True, True, True], case.channels
    if case.norm == "layer":
        mean, rstd = drawn.mean[:, None], drawn.rstd[:, None]
        _, *grads = aten.native_layer_norm_backward(dy, x, [n], mean, rstd, weight, weight, mask)
    elif case.norm == "batch":
        _, *grads = aten.native_batch_norm_backward(dy, x, weight, None, None, drawn.mean, drawn.rstd, True, EPS, mask)
    else:
        mean, rstd = (t.reshape(case.shape[0], case.groups) for t in (drawn.mean, drawn.rstd))
        _, *grads = aten.native_group_norm_backward(
            dy, x, mean, rstd, weight, case.shape[0], n, case.shape[2] * case.shape[3], case.groups, mask
        )
    return grads[0], grads[1]


LARGE = pytest.mark.parametrize(
    "case",
    [
        Case("layer", (100_000, 24)),
        pytest.param(Case("batch", (100_000, 24)), marks=pytest.mark.slow),
        pytest.param(Case("batch", (25, 3, 200, 200)), marks=pytest.mark.slow),
        Case("batch", (25, 3, 200, 200), layout=LAST),
        Case("group", (25, 4, 200, 200), groups=2),
    ],
    ids=str,
)


@LARGE
def test_error_of_a_large_reduction_is_at_most_four_times_torchs(case: Case) -> None:
    drawn = draw(case)
    _, weight, bias = flat_of(case)
    assert run_(case, drawn, Into(weight), Into(bias))
    _, wanted_weight, wanted_bias = reference(case, drawn)
    torch_weight, torch_bias = torchs(case)
    floor = torch.finfo(torch.float32).eps
    assert rms_error(weight, wanted_weight) <= 4 * rms_error(torch_weight, wanted_weight) + floor
    assert rms_error(bias, wanted_bias) <= 4 * rms_error(torch_bias, wanted_bias) + floor


@LARGE
def test_equal_terms_do_not_drift(case: Case) -> None:
    """One float that adds up 0.1 again and again is off by 1e-4 after 100,000 terms; blocks are not."""
    drawn = draw(case)
    drawn.dy.fill_(0.1)
    _, weight, bias = flat_of(case)
    assert run_(case, drawn, Into(weight), Into(bias))
    wanted = float(drawn.dy.double().sum() / case.channels)
    assert float((bias.double() - wanted).abs().max()) < 1e-6 * wanted


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


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_will_do(kind: str, threads: int) -> None:
    torch.set_num_threads(threads)
    case = KINDS[kind]
    check(replace(case, shape=(case.shape[0] * 40, *case.shape[1:])))


@pytest.mark.parametrize(
    ("capability", "level"),
    [  # a compiler that optimises takes three times as long, over the same source
        ("AVX2", "-O0"),
        pytest.param("AVX2", "-O3", marks=pytest.mark.slow),
        pytest.param("DEFAULT", "-O3", marks=pytest.mark.slow),
    ],
)
def test_narrower_vectors_are_as_right(capability: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no other vectors")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    flags = [level if flag == "-O3" else flag for flag in library._flags()]
    monkeypatch.setattr(library, "_flags", lambda: flags)
    norms_cpu._library.cache_clear()
    try:
        for case, dtype in itertools.product(KINDS.values(), DTYPES):
            check(replace(case, dtype=dtype))
        half_precision_round_trip(torch.bfloat16)
        half_precision_round_trip(torch.float16)
    finally:
        norms_cpu._library.cache_clear()


def half_precision_round_trip(dtype: torch.dtype) -> None:
    """dx = scale * dy in eval mode, over every number there is."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale in (1.0, 1 / 3, 1e-5, 3e4):
        for shape in ((-1, 1), (1, -1)):  # scalars, and vectors
            dy = every.reshape(shape)
            n = dy.shape[1]
            done = batch_norm_backward_(dy, dy, None, torch.zeros(n), torch.full((n,), scale), training=False)
            assert isinstance(done, Done)
            assert done.dx is not None
            torch.testing.assert_close(done.dx, (dy.float() * scale).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_as_torch_does(dtype: torch.dtype) -> None:
    half_precision_round_trip(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norms_default_epsilon_is_torchs(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype).requires_grad_()
    dy = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    (wanted,) = torch.autograd.grad(F.rms_norm(x, (48,)), x, dy)
    done = rms_norm_backward_(dy, x.detach(), (48,), None, None)
    assert isinstance(done, Done)
    torch.testing.assert_close(done.dx, wanted, rtol=max(1e-5, 2 * torch.finfo(dtype).eps), atol=1e-4)


@pytest.mark.parametrize("kind", ["layer", "batch, NCHW", "batch, channels_last", "group"])
def test_dy_in_another_layout_is_taken_as_torch_takes_it(kind: str) -> None:
    case = KINDS[kind]
    drawn = draw(case)
    expanded = torch.full((), 0.25).expand(drawn.x.shape)
    other = torch.channels_last if drawn.x.is_contiguous() else torch.contiguous_format
    turned = drawn.dy.contiguous(memory_format=other) if drawn.dy.dim() == 4 else drawn.dy.mT.contiguous().mT
    for dy in (expanded, turned):
        seen = []
        for given in (dy, dy.clone(memory_format=case.layout)):
            flat, weight, bias = flat_of(case)
            done = run_(case, replace(drawn, dy=given), Into(weight), Into(bias))
            assert isinstance(done, Done)
            seen.append((flat, done.dx))
        assert torch.equal(seen[0][0], seen[1][0])
        torch.testing.assert_close(seen[0][1], seen[1][1], rtol=0, atol=0)


def test_normalized_shape_may_have_several_dimensions() -> None:
    case = Case("layer", (30, 24))
    drawn = draw(case)
    seen = []
    for shape in ((24,), (4, 6)):
        flat, weight, bias = flat_of(case)
        x, dy = (t.reshape(30, *shape) for t in (drawn.x, drawn.dy))
        assert layer_norm_backward_(
            dy, x, shape, drawn.mean, drawn.rstd, weight_grad=Into(weight), bias_grad=Into(bias)
        )
        seen.append(flat)
    assert torch.equal(*seen)


# ------------------------------------------------------------------------------------------------ not ours


X = torch.ones(6, 8)
STATISTICS = torch.ones(6)
SLICE = torch.full((8,), OLD)


class Other(torch.Tensor):
    pass


REFUSED = {
    "a dtype that is not summed": (
        lambda: rms_norm_backward_(X.to(torch.complex64), X.to(torch.complex64), [8], None, EPS),
        "dy is torch.complex64",
    ),
    "a dy of another dtype": (
        lambda: rms_norm_backward_(X.bfloat16(), X, [8], None, EPS),
        "dy is torch.bfloat16 .* x is torch.float32",
    ),
    "a dy of another shape": (lambda: rms_norm_backward_(X[:3], X, [8], None, EPS), r"dy is torch.float32 \(3, 8\)"),
    "float64 sums for a float32 slice": (
        lambda: layer_norm_backward_(
            X.double(), X.double(), [8], STATISTICS.double(), STATISTICS.double(), weight_grad=Into(SLICE)
        ),
        "the weight slice is torch.float32, x is torch.float64",
    ),
    "a slice of the wrong size": (
        lambda: layer_norm_backward_(X, X, [8], STATISTICS, STATISTICS, bias_grad=Into(SLICE[:7])),
        r"the bias slice has shape \(7,\).*8 dense elements",
    ),
    "a slice with gaps": (
        lambda: batch_norm_backward_(X[:, :4], X[:, :4], None, SLICE[:4], SLICE[:4], weight_grad=Into(SLICE[::2])),
        r"strides \(2,\)",
    ),
    "a shape that x does not end in": (
        lambda: layer_norm_backward_(X, X, [6], STATISTICS, STATISTICS, weight_grad=Into(SLICE)),
        "does not end in the normalized shape",
    ),
    "statistics of another size": (
        lambda: layer_norm_backward_(X, X, [8], SLICE, SLICE, weight_grad=Into(SLICE)),
        "6 of torch.float32",
    ),
    "another device": (
        lambda: rms_norm_backward_(X.to("meta"), X.to("meta"), [8], None, EPS),
        "dy is on meta",
    ),
    "a tensor of a class of its own": (
        lambda: rms_norm_backward_(X, X.as_subclass(Other), [8], None, EPS),
        "x is a Other",
    ),
    "a sparse tensor": (
        lambda: rms_norm_backward_(X.to_sparse(), X, [8], None, EPS),
        "dy is not an ordinary strided tensor",
    ),
    "batch_norm over rows that are not dense": (
        lambda: batch_norm_backward_(X[:, :4], X[:, :4], None, SLICE[:4], SLICE[:4], weight_grad=Into(SLICE[:4])),
        "neither contiguous nor channels_last",
    ),
    "group_norm in channels_last": (
        lambda: group_norm_backward_(
            *(2 * (torch.ones(2, 4, 3, 3).contiguous(memory_format=LAST),)),
            2,
            SLICE[:4],
            SLICE[:4],
            weight_grad=Into(SLICE[:4]),
        ),
        "is not contiguous",
    ),
    "groups that do not divide the channels": (
        lambda: group_norm_backward_(X, X, 3, STATISTICS, STATISTICS, weight_grad=Into(SLICE)),
        "3 equal groups",
    ),
    "one dimension": (lambda: batch_norm_backward_(SLICE, SLICE, None, SLICE, SLICE), "at least 2 dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_ours_is_refused_with_a_reason_and_nothing_written(name: str) -> None:
    call, reason = REFUSED[name]
    result = call()
    assert isinstance(result, NotMine)
    assert not result
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(result.reason)
    assert bool((SLICE == OLD).all())


def test_without_a_compiler_nothing_is_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-takeback")
    monkeypatch.setenv("TAKEBACK_CACHE", str(tmp_path))
    norms_cpu._library.cache_clear()
    try:
        result = rms_norm_backward_(X, X, [8], None, EPS)
        assert isinstance(result, NotMine)
        assert "no compiler named 'no-such-compiler-takeback'" in result.reason
    finally:
        norms_cpu._library.cache_clear()
