"""The kernels along rows beside float64 autograd: right to rounding, in place or not, the same bits again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.nn.kernels import row_steps_cpu
from takeback.nn.kernels.row_steps import Rows, backward_, rms_norm_, swiglu_, swiglu_backward_

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (37, 96), (9, 7), (70, 769), (3, 5000)]
EPS = 1e-5
FEW = 8  # roundings of the arithmetic


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).clamp(-3, 3)


def f64(t: Tensor) -> Tensor:
    return t.double().cpu()


def assert_near(name: str, got: Tensor, wanted: Tensor, terms: Tensor, wide: torch.dtype) -> None:
    bound = torch.finfo(got.dtype).eps * wanted.abs() + FEW * torch.finfo(wide).eps * terms
    bound = bound + torch.finfo(got.dtype).tiny
    off = (f64(got) - wanted).abs()
    assert bool((off <= bound).all()), f"{name}: off by {(off / bound).max():.3g} times what rounding explains"


class Norm:
    """One norm: x, dy, parameters, statistics as wide as the arithmetic, and y as it is stored."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        centred: bool,
        from_output: bool,
        device: str = "cpu",
        weight: torch.dtype | None = torch.float32,
        bias: torch.dtype | None = torch.float32,
    ) -> None:
        self.dtype, self.wide, self.centred, self.from_output = dtype, wide_of(dtype), centred, from_output
        self.x, self.dy = ((normal(*shape, seed=seed) + 0.5).to(dtype).to(device) for seed in (0, 1))
        w = None if weight is None else (normal(shape[1], seed=2) / 8 + 1).to(weight)
        b = None if bias is None or not centred else (normal(shape[1], seed=3) / 4).to(bias)
        if w is not None and shape[1] > 3:
            w[1::4] *= -1
        self.norm = Rows(*shape, *(None if t is None else t.to(device) for t in (w, b)), centred, from_output)
        self.weight = torch.ones(shape[1]).double() if w is None else w.to(self.wide).double()
        self.bias = torch.zeros(shape[1]).double() if b is None else b.to(self.wide).double()
        rows = f64(self.x)
        mean = rows.mean(1) if centred else torch.zeros(shape[0]).double()
        rstd = torch.rsqrt((rows - mean[:, None]).square().mean(1) + EPS)
        self.mean, self.rstd = (t.to(self.wide).to(device) for t in (mean, rstd))
        self.y = ((rows - mean[:, None]) * rstd[:, None] * self.weight + self.bias).to(dtype).to(device)

    @property
    def saved(self) -> Tensor:
        return self.y if self.from_output else self.x

    def xhat(self) -> tuple[Tensor, Tensor]:
        """xhat of the saved tensor, and the sizes of what is subtracted and divided for it."""
        if self.from_output:
            divided = torch.where(self.weight == 0, 1.0, self.weight)
            away, size = f64(self.y) - self.bias, f64(self.y).abs() + self.bias.abs()
            return torch.where(self.weight == 0, 0.0, away / divided), size / divided.abs()
        mean, rstd = f64(self.mean)[:, None], f64(self.rstd)[:, None]
        return (f64(self.x) - mean) * rstd, (f64(self.x).abs() + mean.abs()) * rstd

    def check(self) -> None:
        xhat, away = self.xhat()
        dy, rstd = f64(self.dy), f64(self.rstd)[:, None]
        g, size = dy * self.weight, (dy * self.weight).abs()
        mean_g = g.mean(1, keepdim=True) * self.centred
        dx = rstd * (g - xhat * (g * xhat).mean(1, keepdim=True) - mean_g)
        terms = rstd * (size + (away + 1) * (size * (away + 1)).mean(1, keepdim=True) + mean_g.abs())
        sums, sums_terms = torch.stack([dy.sum(0), (dy * xhat).sum(0)]), torch.stack([dy.abs().sum(0)] * 2)
        sums_terms[1] = (dy.abs() * (away + 1)).sum(0)

        before = [t.clone() for t in (self.x, self.y, self.dy)]
        out = torch.full_like(self.x, float("nan"))
        mean = self.mean if self.centred else None
        got = backward_(self.dy, self.saved, out, self.norm, mean, self.rstd)
        assert (got.dtype, got.shape) == (self.wide, sums.shape)
        assert_near("sums", got, sums, sums_terms, self.wide)
        assert_near("dx", out, dx, terms, self.wide)
        only = backward_(self.dy, self.saved, None, self.norm, mean, self.rstd)
        assert_near("sums alone", only, sums, sums_terms, self.wide)
        for then, now in zip(before, (self.x, self.y, self.dy), strict=True):
            assert torch.equal(then, now), "an input was written"
        for _ in range(2):
            saved = self.saved.clone()
            again = backward_(self.dy, saved, saved, self.norm, mean, self.rstd)
            assert torch.equal(again, got)
            assert torch.equal(saved, out)


KINDS = pytest.mark.parametrize(("centred", "from_output"), [(c, f) for c in (False, True) for f in (False, True)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_float64s_to_rounding_in_place_or_not(
    shape: tuple[int, int], centred: bool, from_output: bool, dtype: torch.dtype, device: str
) -> None:
    Norm(shape, dtype, centred, from_output, device).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("bias", [*DTYPES, None], ids=str)
@KINDS
def test_parameters_have_dtypes_of_their_own(
    centred: bool, from_output: bool, bias: torch.dtype | None, weight: torch.dtype | None, device: str
) -> None:
    Norm((9, 37), torch.bfloat16, centred, from_output, device, weight, bias).check()


@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_a_weight_of_zero_has_no_xhat(centred: bool, from_output: bool, device: str) -> None:
    norm = Norm((9, 37), torch.float32, centred, from_output, device)
    assert norm.norm.weight is not None
    norm.norm.weight[::3] = 0
    norm.weight[::3] = 0
    norm.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("from_output", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_backward_is_autograds(centred: bool, from_output: bool, device: str) -> None:
    norm = Norm((33, 70), torch.float64, centred, from_output, device)
    x, weight, bias = (f64(t).requires_grad_() for t in (norm.x, norm.weight, norm.bias))
    y = F.layer_norm(x, (70,), weight, bias, EPS) if centred else F.rms_norm(x, (70,), weight, EPS) + bias
    wanted = torch.autograd.grad(y, [x, bias, weight], f64(norm.dy))
    out = torch.empty_like(norm.x)
    got = backward_(norm.dy, norm.saved, out, norm.norm, norm.mean if centred else None, norm.rstd)
    for name, ours, theirs in zip(("dx", "bias", "weight"), (out, *got), wanted, strict=True):
        torch.testing.assert_close(f64(ours), theirs, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_float64s_to_rounding_in_place_or_not(
    shape: tuple[int, int], dtype: torch.dtype, weight: torch.dtype | None, device: str
) -> None:
    norm = Norm(shape, dtype, False, True, device, weight)
    x, out = norm.x.clone(), torch.full_like(norm.x, float("nan"))
    rstd = rms_norm_(x, out, norm.norm, EPS)
    wanted = F.rms_norm(f64(x), shape[1:], norm.weight, EPS)
    assert (rstd.dtype, rstd.shape) == (norm.wide, shape[:1])
    of_rows = torch.rsqrt(f64(x).square().mean(1) + EPS)
    assert_near("rstd", rstd, of_rows, of_rows, norm.wide)
    assert_near("y", out, wanted, wanted.abs(), norm.wide)
    assert torch.equal(x, norm.x)
    assert torch.equal(rms_norm_(x, x, norm.norm, EPS), rstd)
    assert torch.equal(x, out)


# ------------------------------------------------------------------------------------------------ SwiGLU


def matrices(count: int, shape: tuple[int, int], dtype: torch.dtype, apart: bool, device: str) -> list[Tensor]:
    """Dense ones, or columns of one that is wider."""
    rows, columns = shape
    if not apart:
        return [(normal(*shape, seed=seed) * 3).to(dtype).to(device) for seed in range(count)]
    whole = (normal(rows, columns * count + 5) * 3).to(dtype).to(device)
    return [whole[:, i * columns : (i + 1) * columns] for i in range(count)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (4, 0)])
def test_swiglu_and_its_backward_are_autograds_in_place_or_not(
    shape: tuple[int, int], dtype: torch.dtype, apart: bool, device: str
) -> None:
    wide = wide_of(dtype)
    dy, gate, up = matrices(3, shape, dtype, apart, device)
    z, u = (f64(t).requires_grad_() for t in (gate, up))
    y = F.silu(z) * u
    dz, du = torch.autograd.grad(y, [z, u], f64(dy))
    before = [t.clone() for t in (dy, gate, up)]
    out, dgate, dup = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(3))
    swiglu_(gate, up, out)
    swiglu_backward_(dy, gate, up, dgate, dup)
    terms = f64(dy).abs() * (1 + z.abs().detach())
    assert_near("y", out, y.detach(), (z * u).abs().detach(), wide)
    assert_near("dgate", dgate, dz, terms * u.abs().detach(), wide)
    assert_near("dup", dup, du, terms, wide)
    for then, now in zip(before, (dy, gate, up), strict=True):
        assert torch.equal(then, now), "an input was written"
    for target in (0, 1):
        pair = [gate.clone(), up.clone()]
        swiglu_(pair[0], pair[1], pair[target])
        assert torch.equal(pair[target], out)
    swiglu_backward_(dy, gate, up, gate, up)
    assert torch.equal(gate, dgate)
    assert torch.equal(up, dup)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_silu_is_right_to_few_roundings_from_end_to_end(dtype: torch.dtype) -> None:
    gate = torch.linspace(-80, 80, 20001, dtype=torch.float64).to(dtype).view(1, -1)
    out = torch.empty_like(gate)
    swiglu_(gate, torch.ones_like(gate), out)
    exact = f64(gate) / (1 + torch.exp(-f64(gate)))
    off = (f64(out) - exact).abs() / exact.abs().clamp(min=torch.finfo(dtype).tiny)
    assert float(off.max()) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("device", DEVICES)
def test_silu_of_what_has_no_size(device: str) -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[1e30, -1e30, inf, nan, 200.0, -200.0, 0.0]], device=device)
    ones, dgate, dup = torch.ones_like(gate), torch.empty_like(gate), torch.empty_like(gate)
    swiglu_backward_(ones, gate, ones, dgate, dup)
    wanted = torch.tensor([[1e30, 0.0, inf, nan, 200.0, 0.0, 0.0]], device=device)
    torch.testing.assert_close(dup, wanted, rtol=1e-6, atol=1e-30, equal_nan=True)
    assert bool(dgate[0, 3].isnan())
    torch.testing.assert_close(dgate[0, [0, 1, 4, 5, 6]], torch.tensor([1, 0, 1, 0, 0.5], device=device))


# ------------------------------------------------------------------------------------------------ everywhere


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("from_output", [False, True])
def test_no_rows_give_zero_sums(from_output: bool, device: str) -> None:
    x, rstd = torch.empty(0, 24, device=device), torch.empty(0, device=device)
    sums = backward_(x, x, x, Rows(0, 24, None, None, True, from_output), rstd, rstd)
    assert bool((sums == 0).all())
    assert rms_norm_(x, x, Rows(0, 24, None, None, False), EPS).shape == (0,)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_any_number_of_threads_will_do(threads: int) -> None:
    torch.set_num_threads(threads)
    Norm((700, 130), torch.float32, True, True).check()
    Norm((700, 130), torch.float32, False, False).check()


def test_without_a_compiler_plain_operators_do_it_and_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-takeback")
    monkeypatch.setenv("TAKEBACK_CACHE", str(tmp_path))
    row_steps_cpu._library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no compiler named 'no-such-compiler-takeback'"):
            Norm((37, 96), torch.float64, True, True).check()
        Norm((37, 96), torch.float64, False, False).check()
        test_rms_norm_is_float64s_to_rounding_in_place_or_not((37, 96), torch.float64, torch.float32, "cpu")
        test_swiglu_and_its_backward_are_autograds_in_place_or_not((9, 7), torch.float32, False, "cpu")
    finally:
        row_steps_cpu._library.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_narrower_vectors_are_as_right(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no other vectors")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    row_steps_cpu._library.cache_clear()
    try:
        for dtype in DTYPES:
            Norm((9, 37), dtype, True, True).check()
            Norm((9, 37), dtype, False, False).check()
            test_swiglu_and_its_backward_are_autograds_in_place_or_not((9, 37), dtype, True, "cpu")
        test_silu_is_right_to_few_roundings_from_end_to_end(torch.float32)
    finally:
        row_steps_cpu._library.cache_clear()
