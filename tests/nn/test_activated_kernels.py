"""The activated norm's kernels beside float64: right to rounding for every activation, dtype, layout and saved tensor.

A result may be off by its own dtype's rounding, and by a few roundings of the arithmetic of what was added up in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairwise import pairwise
from takeback.nn.kernels import activated_cpu, activated_plain
from takeback.nn.kernels.activated import Activation, Layer, gather_sums, normalise_, put_, sizes, statistics

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PARAMS = {Activation.LEAKY_RELU: 0.07, Activation.ELU: 0.8}
SAVED = [(activation, from_output) for activation in Activation for from_output in (True, False)]
SAVED = [
    (activation, from_output) for activation, from_output in SAVED if activation <= Activation.ELU or not from_output
]
EPS = 1e-5
FEW = 8  # roundings of the arithmetic


@dataclass(frozen=True)
class Case:
    """`last` is channels_last or channels_last_3d. `weight` and `bias` are dtypes, None: no such parameter."""

    shape: tuple[int, ...] = (4, 6, 9, 11)
    dtype: torch.dtype = torch.float32
    last: bool = False
    activation: Activation = Activation.IDENTITY
    from_output: bool = False
    weight: torch.dtype | None = torch.float64
    bias: torch.dtype | None = torch.float64
    absolute_eps: float | None = None
    device: str = "cpu"

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


SHAPES = {
    "NCHW": Case(),
    "NCHW, channels_last": Case(last=True),
    "N × C": Case((37, 19)),
    "NCL": Case((5, 7, 41)),
    "NCDHW, channels_last_3d": Case((2, 16, 3, 5, 4), last=True),
    "two spots": Case((9, 33, 2, 1)),
    "many channels, channels_last": Case((2, 769, 2, 3), last=True),
    "one channel": Case((3, 1, 70)),
    "one channel, rows": Case((70, 1)),
    "two threads": Case((6, 40, 17, 13)),
    "two threads, channels_last": Case((6, 40, 17, 13), last=True),
    "few channels, large spots": Case((2, 3, 97, 101)),
    "few channels, channels_last": Case((2, 3, 97, 101), last=True),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@dataclass
class Drawn:
    """Inputs on the device, and in float64 on the CPU; y is the stored output, z what it or x stands for."""

    case: Case
    layer: Layer
    x: Tensor
    dy: Tensor
    y: Tensor
    mean: Tensor
    invstd: Tensor
    gamma: Tensor
    beta: Tensor

    @property
    def saved(self) -> Tensor:
        return self.y if self.case.from_output else self.x

    def f64(self, t: Tensor) -> Tensor:
        """Tables as they are broadcast over channels."""
        t = t.double().cpu()
        return t.reshape(1, -1, *[1] * (self.x.dim() - 2)) if t.dim() == 1 else t


def dense(t: Tensor, case: Case) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.dim()] if case.last else torch.contiguous_format)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance in float64, in two passes."""
    x = x.double().cpu().contiguous()
    dims = [d for d in range(x.dim()) if d != 1]
    mean = x.mean(dims, keepdim=True)
    return mean.flatten(), (x - mean).square().mean(dims)


def draw(case: Case, seed: int = 0, gamma: float | None = None) -> Drawn:
    """x and its own statistics. No z lies at zero, where the derivatives jump, or where ELU is flat."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels = case.shape[1]
    weight = None if case.weight is None else (normal(channels).clamp(-1, 1) / 4 + 0.75).to(case.weight)
    if weight is not None:
        weight[1::3] *= -1
        if gamma is not None:
            weight[::2] = gamma
    bias = None if case.bias is None else (normal(channels).clamp(-1, 1) / 4 + 0.5).to(case.bias)
    wide_gamma = torch.ones(channels, dtype=torch.float64) if weight is None else weight.to(case.wide).double()
    wide_gamma = wide_gamma if case.absolute_eps is None else wide_gamma.abs() + case.absolute_eps
    wide_beta = torch.zeros(channels, dtype=torch.float64) if bias is None else bias.to(case.wide).double()
    x, dy = ((normal(*case.shape).clamp(-3, 3) + offset).to(case.dtype) for offset in (0.5, 0.0))
    over = (1, -1, *[1] * (x.dim() - 2))
    for _ in range(20):
        mean, variance = moments(x)
        invstd = torch.rsqrt(variance + EPS)
        z = (x.double() - mean.view(over)) * (invstd * wide_gamma).view(over) + wide_beta.view(over)
        if not bool((near := z.abs() < 1e-3).any()):
            break
        x = torch.where(near, x + 0.25, x)
    x, dy = (dense(t, case).to(case.device) for t in (x, dy))
    layer = Layer(
        *sizes(x),
        *(None if t is None else t.to(case.device) for t in (weight, bias)),
        case.activation,
        PARAMS.get(case.activation, 0.0),
        case.absolute_eps,
        case.from_output,
    )
    tables = (t.to(case.wide).to(case.device) for t in (mean, invstd))
    drawn = Drawn(case, layer, x, dy, torch.empty(0), *tables, wide_gamma, wide_beta)
    drawn.y = dense(act(drawn, z).to(case.dtype), case).to(case.device)
    return drawn


def act(drawn: Drawn, z: Tensor) -> Tensor:
    param = drawn.layer.param
    return {
        Activation.IDENTITY: lambda: z,
        Activation.LEAKY_RELU: lambda: F.leaky_relu(z, param),
        Activation.ELU: lambda: F.elu(z, param),
        Activation.RELU: lambda: F.relu(z),
        Activation.SILU: lambda: F.silu(z),
    }[drawn.layer.activation]()


def inverse(drawn: Drawn, y: Tensor) -> Tensor:
    param = drawn.layer.param
    if drawn.layer.activation == Activation.LEAKY_RELU:
        return torch.where(y > 0, y, y / param)
    if drawn.layer.activation == Activation.ELU:
        least = torch.finfo(drawn.case.wide).eps - 1
        return torch.where(y > 0, y, (y / param).clamp(least, 0).log1p())
    return y


def z_of(drawn: Drawn) -> Tensor:
    """In float64, from the tables and the tensor that backward is given."""
    if drawn.case.from_output:
        return inverse(drawn, drawn.f64(drawn.y))
    mean, invstd, gamma, beta = map(drawn.f64, (drawn.mean, drawn.invstd, drawn.gamma, drawn.beta))
    return (drawn.f64(drawn.x) - mean) * invstd * gamma + beta


@dataclass
class Wanted:
    """float64 results of one backward, and beside each the sizes of what was added up in it."""

    sums: Tensor
    sums_terms: Tensor
    dx: Tensor
    dx_terms: Tensor


def wanted_backward(drawn: Drawn, training: bool = True) -> Wanted:
    z = z_of(drawn).requires_grad_()
    dy, dims = drawn.f64(drawn.dy), [d for d in range(drawn.x.dim()) if d != 1]
    mean, invstd, gamma, beta = map(drawn.f64, (drawn.mean, drawn.invstd, drawn.gamma, drawn.beta))
    (dz,) = torch.autograd.grad(act(drawn, z), z, dy)
    z = z.detach()
    if drawn.case.from_output:
        xhat = torch.where(gamma == 0, 0.0, (z - beta) / gamma)
        away = (z.abs() + beta.abs() + condition(drawn, z)) / torch.where(gamma == 0, 1.0, gamma.abs())
        of_dz = dy.abs()
    else:
        xhat = (drawn.f64(drawn.x) - mean) * invstd
        away = (drawn.f64(drawn.x).abs() + mean.abs()) * invstd
        of_dz = dy.abs() * (1 + away * gamma.abs() + beta.abs())  # no second derivative is above 1
    sums = torch.stack([dz.sum(dims), (dz * xhat).sum(dims)])
    count = drawn.layer.count if training else 1
    first, second = (drawn.f64(each) / count * training for each in sums)
    dx = gamma * invstd * (dz - first - xhat * second)
    terms = of_dz + first.abs() + away * second.abs()
    return Wanted(
        sums,
        torch.stack([of_dz.sum(dims), (of_dz * (away + 1)).sum(dims)]),
        dx,
        (gamma * invstd).abs() * terms,
    )


def condition(drawn: Drawn, z: Tensor) -> Tensor:
    """How much z moves with a rounding of y / param."""
    return 1 / z.clamp(max=0).exp() if drawn.layer.activation == Activation.ELU else torch.ones_like(z)


def assert_near(name: str, got: Tensor, wanted: Tensor, terms: Tensor, wide: torch.dtype) -> None:
    bound = torch.finfo(got.dtype).eps * wanted.abs() + FEW * torch.finfo(wide).eps * terms
    bound = bound + torch.finfo(got.dtype).tiny
    off = (got.double().cpu() - wanted).abs()
    assert bool((off <= bound).all()), f"{name}: off by {(off / bound).max():.3g} times what rounding explains"


def check(case: Case, gamma: float | None = None) -> None:
    """Every kernel, at the same inputs as float64; and nothing that is only read is written."""
    drawn = draw(case, gamma=gamma)
    layer, wide = drawn.layer, case.wide
    before = [t.clone() for t in (drawn.x, drawn.dy, drawn.y, drawn.mean, drawn.invstd)]

    got = statistics(drawn.x, layer)
    mean, variance = moments(drawn.x)
    assert (got.dtype, got.shape) == (wide, (2, layer.channels))
    assert_near("mean", got[0], mean, mean.abs() + variance.sqrt(), wide)
    assert_near("variance", got[1], variance, variance, wide)

    out = torch.full_like(drawn.x, float("nan"))
    normalise_(drawn.x, out, layer, drawn.mean, drawn.invstd)
    z = z_of(replace(drawn, case=replace(case, from_output=False)))
    tables = map(drawn.f64, (drawn.mean, drawn.invstd, drawn.gamma, drawn.beta))
    terms = (drawn.f64(drawn.x).abs() + (t := [each.abs() for each in tables])[0]) * t[1] * t[2] + t[3]
    assert_near("y", out, act(drawn, z), terms, wide)

    wanted = wanted_backward(drawn)
    sums = gather_sums(drawn.dy, drawn.saved, layer, drawn.mean, drawn.invstd)
    assert (sums.dtype, sums.shape) == (wide, (2, layer.channels))
    assert_near("sums", sums, wanted.sums, wanted.sums_terms, wide)

    for training in (True, False):
        wanted = wanted_backward(drawn, training)
        given = wanted.sums.to(wide).to(case.device) if training else None
        out = torch.full_like(drawn.x, float("nan"))
        put_(drawn.dy, drawn.saved, out, layer, drawn.mean, drawn.invstd, given, layer.count)
        assert_near(f"dx, training={training}", out, wanted.dx, wanted.dx_terms, wide)
    for then, now in zip(before, (drawn.x, drawn.dy, drawn.y, drawn.mean, drawn.invstd), strict=True):
        assert torch.equal(then, now), "an input was written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "saved", "dtype"), pairwise(list(SHAPES), SAVED, DTYPES), ids=str)
def test_each_kernel_is_float64s_to_rounding(
    shape: str, saved: tuple[Activation, bool], dtype: torch.dtype, device: str
) -> None:
    case = SHAPES[shape]
    check(replace(case, activation=saved[0], from_output=saved[1], dtype=dtype, device=device))


def eager(drawn: Drawn, training: bool) -> tuple[Tensor, Tensor]:
    """y and dx of torch's batch norm and activation, by autograd in float64."""
    x = drawn.x.double().cpu().requires_grad_()
    if training:
        z = F.batch_norm(x, None, None, drawn.gamma, drawn.beta, True, 0.0, EPS)
    else:
        mean, invstd = drawn.mean.double().cpu(), drawn.invstd.double().cpu()
        z = F.batch_norm(x, mean, invstd**-2, drawn.gamma, drawn.beta, False, 0.0, 0.0)
    y = act(drawn, z)
    (dx,) = torch.autograd.grad(y, x, drawn.dy.double().cpu())
    return y.detach(), dx


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("last", "how", "dtype", "training"), pairwise([False, True], SAVED, DTYPES, [True, False]), ids=str
)
def test_one_after_the_other_they_are_batch_norm_and_the_activation(
    last: bool, how: tuple[Activation, bool], dtype: torch.dtype, training: bool, device: str
) -> None:
    """All in place, each on what the one before it left: y on x, dx on y or x."""
    activation, from_output = how
    case = Case(last=last, activation=activation, from_output=from_output, dtype=dtype, device=device)
    drawn = draw(case)
    layer, x, mean, invstd = drawn.layer, drawn.x.clone(), drawn.mean, drawn.invstd
    wanted_y, wanted_dx = eager(drawn, training)
    if training:
        mean, variance = statistics(x, layer)
        invstd = torch.rsqrt(variance + EPS)
    saved = x if from_output else x.clone()
    normalise_(x, x, layer, mean, invstd)
    z = z_of(replace(drawn, case=replace(case, from_output=False)))
    terms = z.abs() + drawn.f64(drawn.beta).abs() + 1
    assert_near("y", x, wanted_y, 2 * terms, case.wide)
    sums = gather_sums(drawn.dy, saved, layer, mean, invstd) if training else None
    put_(drawn.dy, saved, saved, layer, mean, invstd, sums, layer.count)
    terms = wanted_backward(drawn, training).dx_terms
    stored = case.dtype if from_output else case.wide  # what z was rounded to
    most = drawn.f64(terms.amax([d for d in range(terms.dim()) if d != 1]))
    assert_near("dx", saved, wanted_dx, most * torch.finfo(stored).eps / torch.finfo(case.wide).eps, case.wide)


# ------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "last"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("weight", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("bias", [*DTYPES, None], ids=str)
def test_parameters_have_dtypes_of_their_own(
    bias: torch.dtype | None, weight: torch.dtype | None, dtype: torch.dtype, last: bool, device: str
) -> None:
    case = Case((3, 5, 4, 3), dtype, last, Activation.LEAKY_RELU, True, weight, bias, device=device)
    check(case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "from_output"), SAVED)
@pytest.mark.parametrize("last", [False, True])
def test_gamma_may_be_an_absolute_value(last: bool, activation: Activation, from_output: bool, device: str) -> None:
    check(Case(last=last, activation=activation, from_output=from_output, absolute_eps=0.125, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "from_output"), SAVED)
@pytest.mark.parametrize("last", [False, True])
def test_a_channel_whose_gamma_is_zero_has_no_xhat_and_no_dx(
    last: bool, activation: Activation, from_output: bool, device: str
) -> None:
    case = Case(last=last, activation=activation, from_output=from_output, device=device)
    check(case, gamma=0.0)
    drawn = draw(case, gamma=0.0)
    sums = gather_sums(drawn.dy, drawn.saved, drawn.layer, drawn.mean, drawn.invstd)
    assert not from_output or bool((sums[1, ::2] == 0).all())
    out = torch.empty_like(drawn.x)
    put_(drawn.dy, drawn.saved, out, drawn.layer, drawn.mean, drawn.invstd, sums, drawn.layer.count)
    assert bool((out[:, ::2] == 0).all())


# ------------------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "saved", "dtype"),
    pairwise(["N × C", "two threads", "two threads, channels_last", "two spots"], SAVED, DTYPES),
    ids=str,
)
def test_in_place_has_the_bits_of_out_of_place_and_of_itself(
    shape: str, saved: tuple[Activation, bool], dtype: torch.dtype, device: str
) -> None:
    case = replace(SHAPES[shape], activation=saved[0], from_output=saved[1], dtype=dtype, device=device)
    drawn = draw(case)
    layer, tables = drawn.layer, (drawn.mean, drawn.invstd)
    sums = gather_sums(drawn.dy, drawn.saved, layer, *tables)
    assert torch.equal(statistics(drawn.x, layer), statistics(drawn.x, layer))
    y, dx = torch.empty_like(drawn.x), torch.empty_like(drawn.x)
    normalise_(drawn.x, y, layer, *tables)
    put_(drawn.dy, drawn.saved, dx, layer, *tables, sums, layer.count)
    for _ in range(2):
        assert torch.equal(gather_sums(drawn.dy, drawn.saved, layer, *tables), sums)
        x, saved = drawn.x.clone(), drawn.saved.clone()
        normalise_(x, x, layer, *tables)
        put_(drawn.dy, saved, saved, layer, *tables, sums, layer.count)
        assert torch.equal(x, y)
        assert torch.equal(saved, dx)


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("shape", ["two threads", "two threads, channels_last", "few channels, large spots"])
def test_any_number_of_threads_will_do(shape: str, threads: int) -> None:
    torch.set_num_threads(threads)
    case = SHAPES[shape]
    check(replace(case, shape=(case.shape[0] * 5, *case.shape[1:]), activation=Activation.ELU, from_output=True))


# ------------------------------------------------------------------------------------------------ hard numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(16, 8, 40, 40), (300, 20, 2, 3), (5000, 33)])
@pytest.mark.parametrize("first", [None, 0.0, 3e4])
def test_variance_is_right_where_the_mean_is_far_away(
    first: float | None, shape: tuple[int, ...], last: bool, device: str
) -> None:
    """Also where the first element, or the first sample, is nowhere near the others."""
    case = Case(shape, last=last and len(shape) == 4, device=device)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e4
    if first is not None:
        x.select(1, 0).flatten()[:1] = first
        x.view(shape[0], shape[1], -1)[0, 0, 0] = first
        x[0, 1:3] = first
    x = dense(x.float(), case).to(device)
    got = statistics(x, draw(replace(case)).layer).double().cpu()
    mean, variance = moments(x)
    eps = torch.finfo(torch.float32).eps
    assert float(((got[0] - mean) / mean).abs().max()) <= eps
    assert float(((got[1] - variance) / variance).abs().max()) <= FEW * eps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
def test_a_constant_channel_has_no_variance(last: bool, device: str) -> None:
    case = Case((6, 40, 17, 13), last=last, device=device)
    x = dense(torch.full(case.shape, 0.1), case).to(device)
    mean, variance = statistics(x, draw(case).layer)
    assert torch.allclose(mean, torch.full_like(mean, 0.1), rtol=1e-6, atol=0)
    assert float(variance.max()) <= (torch.finfo(torch.float32).eps * 0.1) ** 2
    assert float(variance.min()) >= 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saturated_elu_stays_finite(dtype: torch.dtype, last: bool, device: str) -> None:
    case = Case(dtype=dtype, last=last, activation=Activation.ELU, from_output=True, device=device)
    drawn = draw(case)
    for value in (-PARAMS[Activation.ELU], -1.5 * PARAMS[Activation.ELU]):
        drawn.y.fill_(value)
        sums = gather_sums(drawn.dy, drawn.y, drawn.layer, drawn.mean, drawn.invstd)
        out = torch.empty_like(drawn.x)
        put_(drawn.dy, drawn.y, out, drawn.layer, drawn.mean, drawn.invstd, sums, drawn.layer.count)
        assert bool(sums.isfinite().all())
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "from_output"), SAVED)
@pytest.mark.parametrize("last", [False, True])
def test_nan_stays_nan(last: bool, activation: Activation, from_output: bool, device: str) -> None:
    drawn = draw(Case(last=last, activation=activation, from_output=from_output, device=device))
    layer, tables = drawn.layer, (drawn.mean, drawn.invstd)
    for which in (drawn.x, drawn.y):
        which[0, 2, 3, 4] = float("nan")
    assert bool(statistics(drawn.x, layer)[:, 2].isnan().all())
    sums = gather_sums(drawn.dy, drawn.saved, layer, *tables)
    assert bool(sums[1].isnan().sum() == 1)
    out, dx = torch.empty_like(drawn.x), torch.empty_like(drawn.x)
    normalise_(drawn.x, out, layer, *tables)
    put_(drawn.dy, drawn.saved, dx, layer, *tables, sums.nan_to_num(), layer.count)
    for got in (out, dx):
        assert int(got.isnan().sum()) == 1
        assert bool(got[0, 2, 3, 4].isnan())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "from_output"), SAVED)
@pytest.mark.parametrize("last", [False, True])
def test_the_derivative_at_zero_is_torchs(last: bool, activation: Activation, from_output: bool, device: str) -> None:
    """A channel with gamma and beta of zero has no other z."""
    case = Case(last=last, activation=activation, from_output=from_output, weight=None, bias=None, device=device)
    drawn = draw(case)
    drawn.x.zero_()
    drawn.y.zero_()
    drawn.mean.zero_()
    z = torch.zeros(case.shape, dtype=torch.float64, requires_grad=True)
    (dz,) = torch.autograd.grad(act(drawn, z), z, drawn.dy.double().cpu())
    sums = gather_sums(drawn.dy, drawn.saved, drawn.layer, drawn.mean, drawn.invstd)
    assert_near("sums", sums[0], dz.sum((0, 2, 3)), drawn.dy.double().cpu().abs().sum((0, 2, 3)), case.wide)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 6, 3, 5), (0, 24), (4, 6, 0, 5), (3, 0, 2, 2)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("from_output", [False, True])
def test_nothing_gives_zero_sums(shape: tuple[int, ...], last: bool, from_output: bool, device: str) -> None:
    case = Case(shape, last=last and len(shape) == 4)
    x = dense(torch.empty(shape), case).to(device)
    layer = Layer(*sizes(x), None, None, Activation.ELU, 1.0, from_output=from_output)
    tables = torch.ones(shape[1], device=device)
    sums = gather_sums(x, x, layer, tables, tables)
    assert sums.shape == (2, shape[1])
    assert bool((sums == 0).all())
    normalise_(x, x, layer, tables, tables)
    put_(x, x, x, layer, tables, tables, sums, 1)
    put_(x, x, x, layer, tables, tables, None, 1)


# ------------------------------------------------------------------------------------------------ only the CPU


@pytest.mark.parametrize("param", [1.0, 0.8])
def test_elu_and_its_inverse_are_right_to_few_roundings_near_zero_and_far_away(param: float) -> None:
    """z in float64 over seven orders of magnitude; with dy = 0 and sums of 0 and 1, dx is -z of what is given as y."""
    z = -torch.logspace(-7, 1.2, 5000, dtype=torch.float64).float().view(-1, 1)
    layer = Layer(*sizes(z), None, None, Activation.ELU, param)
    zero, one = torch.zeros(1), torch.ones(1)
    y, back = torch.empty_like(z), torch.empty_like(z)
    normalise_(z, y, layer, zero, one)
    eps = torch.finfo(torch.float32).eps
    wanted = param * z.double().expm1()
    assert float(((y.double() - wanted) / wanted).abs().max()) <= 3 * eps
    put_(torch.zeros_like(z), y, back, layer, zero, one, torch.tensor([[0.0], [1.0]]), 1)
    ratio = (y.double() / param).clamp(min=eps - 1)
    wanted = -ratio.log1p()
    bound = 3 * eps * wanted + (0 if param == 1.0 else eps * ratio.abs() / (1 + ratio))
    assert bool(((back.double() - wanted).abs() <= bound).all())


def test_without_a_compiler_plain_operators_do_it_and_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-takeback")
    monkeypatch.setenv("TAKEBACK_CACHE", str(tmp_path))
    activated_cpu._library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no compiler named 'no-such-compiler-takeback'"):
            check(Case())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for activation, from_output in SAVED:
                for shape in ("NCHW", "two spots", "NCDHW, channels_last_3d"):
                    case = replace(SHAPES[shape], activation=activation, from_output=from_output)
                    monkeypatch.setattr(activated_cpu, "_kernels", lambda: None)
                    check_plain(case)
    finally:
        activated_cpu._library.cache_clear()


def check_plain(case: Case) -> None:
    """In float64, where its sums need no care."""
    check(replace(case, dtype=torch.float64))
    drawn = draw(case)
    out = torch.empty_like(drawn.x)
    activated_plain.normalise_(drawn.x, out, drawn.layer, drawn.mean, drawn.invstd)
    native = torch.empty_like(drawn.x)
    normalise_(drawn.x, native, drawn.layer, drawn.mean, drawn.invstd)
    assert torch.allclose(out, native, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_narrower_vectors_are_as_right(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no other vectors")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    activated_cpu._library.cache_clear()
    try:
        for shape in ("NCHW", "two spots", "two threads, channels_last"):
            for activation, from_output in SAVED:
                for dtype in DTYPES:
                    check(replace(SHAPES[shape], activation=activation, from_output=from_output, dtype=dtype))
        test_elu_and_its_inverse_are_right_to_few_roundings_near_zero_and_far_away(0.8)
    finally:
        activated_cpu._library.cache_clear()
