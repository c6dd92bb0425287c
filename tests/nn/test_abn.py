"""ABN, InPlaceABN and inplace_abn: torch's batch norm and activation to rounding, or an error; and a reason for a copy.

Results are compared with formulas in float64. What a result may be off by is derived from its dtype: the rounding of
what is stored, a few roundings of the arithmetic, and, where backward starts from the stored output, what inverting it
makes of that output's rounding.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import takeback as tb
from takeback.nn import ABN, InPlaceABN, InPlaceABNSync, InPlaceLayerNorm, SwiGLU, functional, inplace_abn, owner
from takeback.nn.kernels.activated import reach

EPS = 1e-5
FEW = 8  # roundings of the arithmetic
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ACTIVATIONS = {"identity": 0.01, "leaky_relu": 0.01, "elu": 1.0, "relu": 0.01, "silu": 0.01}
EDGES = [("leaky_relu", 0.0), ("leaky_relu", -0.3), ("leaky_relu", 1.7), ("elu", 0.0), ("elu", -0.7), ("elu", 0.4)]
EVERY = [*ACTIVATIONS.items(), *EDGES]
LAYOUTS: dict[str, tuple[tuple[int, ...], torch.memory_format]] = {
    "N × C": ((29, 5), torch.contiguous_format),
    "N × C × S": ((7, 5, 9), torch.contiguous_format),
    "4-d": ((4, 5, 3, 7), torch.contiguous_format),
    "4-d, channels_last": ((4, 5, 3, 7), torch.channels_last),
    "5-d": ((3, 5, 2, 3, 4), torch.contiguous_format),
    "5-d, channels_last_3d": ((3, 5, 2, 3, 4), torch.channels_last_3d),
    "6-d": ((3, 5, 2, 3, 1, 2), torch.contiguous_format),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: waking worker threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def trained_(module: nn.Module, seed: int = 5) -> Any:
    """Signed weights, biases, and running statistics as after some training."""
    for i, (name, value) in enumerate(module.state_dict().items()):
        if name == "running_var":
            value.copy_(normal(*value.shape, seed=seed + i).abs() + 0.5)
        elif name == "weight":
            drawn = normal(*value.shape, seed=seed + i)
            value.copy_(drawn.sign() * (drawn.abs() + 0.3))
        elif name != "num_batches_tracked":
            value.copy_(normal(*value.shape, seed=seed + i) / 2)
    return module


def of_channels(table: Tensor, x: Tensor) -> Tensor:
    return table.reshape(1, -1, *[1] * (x.dim() - 2))


def act(z: Tensor, name: str, param: float) -> Tensor:
    below = {
        "identity": z,
        "leaky_relu": z * param,
        "elu": torch.expm1(z.clamp(max=0)) * param,
        "relu": z * 0,
        "silu": z * torch.sigmoid(z),
    }[name]
    return below if name == "silu" else torch.where(z > 0, z, below)


def plain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    name: str,
    param: float,
    running: tuple[Tensor, Tensor] | None = None,
    absolute: bool = False,
) -> Tensor:
    """act(gamma * xhat + beta) in plain operators; gamma = |weight| + eps where `absolute`, as in inplace_abn."""
    dims = [d for d in range(x.dim()) if d != 1]
    mean, var = (x.mean(dims), x.var(dims, correction=0)) if running is None else running
    xhat = (x - of_channels(mean, x)) / of_channels(var + EPS, x).sqrt()
    if weight is not None:
        xhat = xhat * of_channels(weight.abs() + EPS if absolute else weight, x)
    return act(xhat if bias is None else xhat + of_channels(bias, x), name, param)


def away(module: InPlaceABN, leaf: Tensor, dy: Tensor) -> Tensor:
    """Forward and backward of x = leaf * 1, of which nobody keeps anything; returns the output's values."""
    y = module(leaf * 1)
    out = y.detach().clone()
    loss = (y * dy).sum()
    del y
    loss.backward()
    return out


# -- against float64 ---------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """Results in float64, each with what it may be off by."""

    y: tuple[Tensor, Tensor]
    dx: tuple[Tensor, Tensor]
    weight: tuple[Tensor, Tensor]
    bias: tuple[Tensor, Tensor]


def truth(x: Tensor, dy: Tensor, module: InPlaceABN, from_output: bool, training: bool = True) -> Truth:
    dtype, name, param = x.dtype, module.activation, module.activation_param
    store = torch.finfo(dtype).eps
    arithmetic = FEW * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    x, dy = x.double(), dy.double()
    dims = [d for d in range(x.dim()) if d != 1]
    n = x.numel() // x.shape[1]
    assert module.running_mean is not None
    assert module.running_var is not None
    mean = x.mean(dims) if training else module.running_mean.double()
    var = x.var(dims, correction=0) if training else module.running_var.double()
    mean, invstd, gamma, beta = (
        of_channels(t.detach().double(), x) for t in (mean, (var + EPS).rsqrt(), module.weight, module.bias)
    )
    flips = torch.where(gamma < 0, -1.0, 1.0) if module.scale is functional.Scale.ABSOLUTE else torch.ones_like(gamma)
    if module.scale is functional.Scale.ABSOLUTE:
        gamma = gamma.abs() + EPS

    xhat = (x - mean) * invstd
    z = (gamma * xhat + beta).requires_grad_()
    y = act(z, name, param)
    (slope,) = torch.autograd.grad(y.sum(), z)
    z, y = z.detach(), y.detach()
    curve = {"elu": abs(param) * torch.exp(z.clamp(max=0)), "silu": torch.full_like(z, 0.5)}.get(
        name, torch.zeros_like(z)
    )
    dz = dy * slope
    of_bias, of_weight = dz.sum(dims, keepdim=True), (dz * xhat).sum(dims, keepdim=True)
    dx = dz - (of_bias / n + xhat * of_weight / n if training else 0)

    cancels = (x.abs() + mean.abs()) * invstd
    z_terms = gamma.abs() * cancels + beta.abs()
    y_off = store * (y.abs() + torch.finfo(dtype).tiny) + arithmetic * (slope.abs() * z_terms + y.abs())
    if from_output:
        z_off = y_off / slope.abs()
        xhat_off = (z_off + arithmetic * (z.abs() + beta.abs())) / gamma.abs()
    else:
        z_off, xhat_off = arithmetic * z_terms, arithmetic * cancels
    dz_off = dy.abs() * (curve * z_off + arithmetic * slope.abs())
    bias_off = (dz_off + arithmetic * dz.abs()).sum(dims, keepdim=True)
    weight_off = (dz.abs() * xhat_off + xhat.abs() * dz_off + arithmetic * (dz * xhat).abs()).sum(dims, keepdim=True)
    dx_off = dz_off + arithmetic * dz.abs()
    if training:
        dx_off = dx_off + (bias_off + xhat_off * of_weight.abs() + xhat.abs() * weight_off) / n
    scaled = gamma * invstd
    of_weight = of_weight * flips
    stored = torch.finfo(module.weight.dtype).eps
    return Truth(
        (y, y_off),
        (scaled * dx, store * (scaled * dx).abs() + scaled.abs() * dx_off),
        (of_weight.flatten(), (stored * of_weight.abs() + weight_off).flatten()),
        (of_bias.flatten(), (stored * of_bias.abs() + bias_off).flatten()),
    )


def assert_near(what: str, got: Tensor | None, wanted: tuple[Tensor, Tensor]) -> None:
    assert got is not None, f"{what} is missing"
    value, off_by = wanted
    assert got.shape == value.shape, what
    worst = ((got.double() - value).abs() / off_by.clamp(min=1e-300)).max()
    assert worst <= 1, f"{what}: off by {worst:.3g} times what rounding explains"


def assert_true(module: InPlaceABN, leaf: Tensor, dy: Tensor, out: Tensor, expected: Truth) -> None:
    assert_near("y", out, expected.y)
    assert_near("dx", leaf.grad, expected.dx)
    assert_near("weight", module.weight.grad, expected.weight)
    assert_near("bias", module.bias.grad, expected.bias)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_dtype_and_layout_is_float64s_to_rounding_and_overwrites(
    activation: str, dtype: torch.dtype, layout: str
) -> None:
    shape, memory_format = LAYOUTS[layout]
    module = trained_(InPlaceABN(5, activation=activation, activation_param=ACTIVATIONS[activation]).to(dtype))
    leaf = (normal(*shape, seed=1) + 0.5).to(dtype).contiguous(memory_format=memory_format).requires_grad_()
    dy = normal(*shape, seed=2, dtype=dtype).contiguous(memory_format=memory_format)
    from_output = functional.inverse_of(activation, ACTIVATIONS[activation], dtype) is None
    expected = truth(leaf.detach(), dy, module, from_output)
    out = away(module, leaf, dy)
    assert_true(module, leaf, dy, out, expected)
    assert out.dtype == dtype
    assert leaf.grad is not None
    assert out.stride() == leaf.stride() == leaf.grad.stride(), "the memory format is kept"
    assert module.copies == {}, "nothing but the input's own buffer was needed"


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("scale", ["weight", "absolute"])
@pytest.mark.parametrize(("activation", "param"), EDGES)
def test_edge_slopes_are_float64s_to_rounding_when_overwritten(
    activation: str, param: float, scale: Any, training: bool
) -> None:
    module = trained_(InPlaceABN(5, activation=activation, activation_param=param, scale=scale)).train(training)
    leaf, dy = normal(6, 5, 7, seed=1, dtype=torch.float32).requires_grad_(), normal(6, 5, 7, dtype=torch.float32)
    expected = truth(
        leaf.detach(), dy, module, functional.inverse_of(activation, param, torch.float32) is None, training
    )
    assert_true(module, leaf, dy, away(module, leaf, dy), expected)
    assert module.copies == {}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_with_float32_parameters_is_float64s_to_rounding(
    activation: str, dtype: torch.dtype, training: bool
) -> None:
    module = trained_(InPlaceABN(5, activation=activation, activation_param=ACTIVATIONS[activation])).train(training)
    leaf = normal(4, 5, 3, 7, seed=1, dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = normal(4, 5, 3, 7, dtype=dtype)
    from_output = functional.inverse_of(activation, ACTIVATIONS[activation], dtype) is None
    expected = truth(leaf.detach(), dy, module, from_output, training)
    assert_true(module, leaf, dy, away(module, leaf, dy), expected)
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("ratio", [1e-3, 0.3, 0.9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_weights_that_are_still_inverted_lose_no_more_than_the_outputs_rounding(
    dtype: torch.dtype, ratio: float
) -> None:
    """As near to the limit as `reach` allows."""
    module = trained_(InPlaceABN(4).to(dtype))
    most = reach(dtype).ratio
    with torch.no_grad():
        module.bias.copy_(torch.tensor([1.0, -1.0, 2.0, 0.0]))
        module.weight.copy_(2 / (most * ratio) * torch.tensor([1.0, -1.0, 1.0, -1.0]))
    leaf, dy = normal(40, 4, seed=1, dtype=dtype).requires_grad_(), normal(40, 4, dtype=dtype)
    expected = truth(leaf.detach(), dy, module, from_output=True)
    assert_true(module, leaf, dy, away(module, leaf, dy), expected)
    assert module.copies == {}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("absolute", [False, True], ids=["weight", "absolute"])
@pytest.mark.parametrize(("activation", "param"), EVERY)
def test_gradcheck(activation: str, param: float, absolute: bool, training: bool) -> None:
    running = normal(3, seed=8) / 4, normal(3, seed=9).abs() + 0.5

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return inplace_abn(
            *(x * 1, weight, bias, *(t.clone() for t in running)),
            training=training,
            activation=activation,
            activation_param=param,
            scale="absolute" if absolute else "weight",
        )

    weight = torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64)
    inputs = tuple(t.requires_grad_() for t in (normal(4, 3, 2, seed=3), weight, normal(3, seed=4) / 3))
    assert torch.autograd.gradcheck(layer, inputs)
    assert torch.allclose(
        layer(*inputs),
        plain(*inputs, activation, param, None if training else running, absolute),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("activation", "param"), [("identity", 0.0), ("leaky_relu", 0.01), ("elu", 1.0)])
def test_scale_absolute_is_the_originals_formula(activation: str, param: float, training: bool) -> None:
    module = InPlaceABN(4, activation=activation, activation_param=param, scale="absolute").double().train(training)
    with torch.no_grad():
        trained_(module).weight[2] = 0  # gamma is eps, and the original takes the sign of 0 as +
    weight = module.weight.detach().clone()
    leaf, dy = normal(6, 4, 5, seed=1).requires_grad_(), normal(6, 4, 5, seed=2)
    x, gamma, beta = (t.detach().clone().requires_grad_() for t in (leaf, weight.abs() + EPS, module.bias))
    running = None if training else (module.running_mean.clone(), module.running_var.clone())
    expected = plain(x, gamma, beta, activation, param, running)
    dx, dgamma, dbeta = torch.autograd.grad((expected * dy).sum(), (x, gamma, beta))
    out = away(module, leaf, dy)
    assert torch.allclose(out, expected, rtol=1e-10, atol=1e-10)
    gradients = dx, torch.where(weight < 0, -dgamma, dgamma), dbeta
    for got, wanted in zip((leaf.grad, module.weight.grad, module.bias.grad), gradients, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-8, atol=1e-8)
    assert module.copies == {}


# -- the interface of inplace_abn and of BatchNorm ---------------------------------------------------------------------


def test_constructors_are_the_originals() -> None:
    expected = [
        ("num_features", inspect.Parameter.empty),
        ("eps", 1e-5),
        ("momentum", 0.1),
        ("affine", True),
        ("track_running_stats", True),
        ("activation", "leaky_relu"),
        ("activation_param", 0.01),
    ]
    for made in (ABN, InPlaceABN, InPlaceABNSync):
        parameters = [p for p in inspect.signature(made).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        also = [("group", None)] if made is InPlaceABNSync else []
        assert [(p.name, p.default) for p in parameters] == expected + also


def test_functions_are_the_originals() -> None:
    expected = ["x", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"]
    expected += ["activation", "activation_param"]
    defaults = (True, 0.1, 1e-5, "leaky_relu", 0.01)
    for function, also in ((inplace_abn, []), (tb.nn.inplace_abn_sync, ["group"])):
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in parameters] == expected + also
        assert tuple(p.default for p in parameters[5:10]) == defaults


@pytest.mark.parametrize("made", [ABN, InPlaceABN, InPlaceABNSync])
def test_state_dict_has_the_originals_keys_values_and_version(made: type[ABN]) -> None:
    state = made(3).state_dict()
    assert list(state) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert [t.tolist() for t in state.values()] == [[1] * 3, [0] * 3, [0] * 3, [1] * 3, 0]
    assert state["num_batches_tracked"].dtype == torch.long
    assert state._metadata[""]["version"] == 2
    assert list(made(3, affine=False).state_dict()) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(made(3, track_running_stats=False).state_dict()) == ["weight", "bias"]
    assert [name for name, _ in made(3).named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("with_metadata", [True, False])
def test_checkpoint_of_version_1_loads_and_counts_from_zero(with_metadata: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), trained_(InPlaceABN(3)))
    state = model.state_dict()
    del state["1.num_batches_tracked"]
    if with_metadata:
        state._metadata["1"]["version"] = 1
    fresh = nn.Sequential(nn.Conv2d(2, 3, 1), InPlaceABN(3))
    result = fresh.load_state_dict(state if with_metadata else dict(state), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert int(fresh[1].num_batches_tracked) == 0
    assert torch.equal(fresh[1].weight, model[1].weight)


def test_a_missing_counter_of_version_2_is_an_error() -> None:
    state = InPlaceABN(3).state_dict()
    del state["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        InPlaceABN(3).load_state_dict(state)


@pytest.mark.parametrize("made", [ABN, InPlaceABN])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS.items())
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d, (9, 4)),
        (nn.BatchNorm1d, (3, 4, 5)),
        (nn.BatchNorm2d, (3, 4, 2, 3)),
        (nn.BatchNorm3d, (2, 4, 2, 1, 3)),
    ],
    ids=["1d", "1d, spots", "2d", "3d"],
)
def test_batch_norms_signed_weights_load_both_ways_and_do_the_same(
    norm: Any, shape: tuple[int, ...], activation: str, param: float, made: Any
) -> None:
    bn, module = trained_(norm(4).double()), made(4, activation=activation, activation_param=param).double()
    assert (bn.weight < 0).any()
    module.load_state_dict(bn.state_dict(), strict=True)
    for training in (True, False, True):
        bn.train(training)
        module.train(training)
        a, b = (normal(*shape, seed=1).requires_grad_() for _ in range(2))
        dy = normal(*shape, seed=2)
        out = away(module, a, dy)
        expected = act(bn(b), activation, param)
        (expected * dy).sum().backward()
        assert torch.allclose(out, expected, rtol=1e-11, atol=1e-11)
        for got, wanted in ((a, b), (module.weight, bn.weight), (module.bias, bn.bias)):
            assert torch.allclose(got.grad, wanted.grad, rtol=1e-9, atol=1e-10)
            wanted.grad = got.grad = None
    back = norm(4).double()
    back.load_state_dict(module.state_dict(), strict=True)
    for (name, got), wanted in zip(back.state_dict().items(), bn.state_dict().values(), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12), name
    assert int(back.num_batches_tracked) == 2


# -- settings ----------------------------------------------------------------------------------------------------------


def test_momentum_none_averages_all_batches() -> None:
    module, bn = InPlaceABN(3, momentum=None).double(), nn.BatchNorm1d(3, momentum=None).double()
    for seed in range(4):
        x = normal(7 + seed, 3, seed=seed) + seed
        module(x * 1)
        bn(x)
    assert torch.allclose(module.running_mean, bn.running_mean, rtol=1e-12)
    assert torch.allclose(module.running_var, bn.running_var, rtol=1e-12)
    assert int(module.num_batches_tracked) == 4


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("track", [True, False], ids=["tracked", "untracked"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("activation", ["leaky_relu", "silu"])
def test_affine_and_tracking_may_be_off(activation: str, affine: bool, track: bool, training: bool) -> None:
    settings = {"affine": affine, "track_running_stats": track}
    module = trained_(InPlaceABN(4, activation=activation, **settings).double()).train(training)
    bn = nn.BatchNorm1d(4, **settings).double().train(training)
    bn.load_state_dict(module.state_dict())
    a, b = (normal(6, 4, seed=1).requires_grad_() for _ in range(2))
    dy = normal(6, 4, seed=2)
    out = away(module, a, dy)
    expected = act(bn(b), activation, 0.01)
    (expected * dy).sum().backward()
    assert torch.allclose(out, expected, rtol=1e-11, atol=1e-11)
    assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-11)
    for name, value in bn.state_dict().items():
        assert torch.allclose(module.state_dict()[name], value, rtol=1e-12), name
    assert module.copies == {}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
@pytest.mark.parametrize(
    "wanted", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1) if x + w + b], ids=lambda w: str(w)
)
def test_only_what_needs_a_gradient_gets_one(wanted: tuple[int, int, int], activation: str, training: bool) -> None:
    module = trained_(InPlaceABN(4, activation=activation).double()).train(training)
    module.weight.requires_grad_(bool(wanted[1]))
    module.bias.requires_grad_(bool(wanted[2]))
    leaf, dy = normal(6, 4, 3, seed=1).requires_grad_(bool(wanted[0])), normal(6, 4, 3, seed=2)
    before = leaf.detach().clone()
    leaves = [leaf, *(p.detach().clone() for p in (module.weight, module.bias))]
    running = None if training else (module.running_mean, module.running_var)
    needing = [t.detach().clone().requires_grad_(bool(w)) for t, w in zip(leaves, wanted, strict=True)]
    (plain(*needing, activation, 0.01, running) * dy).sum().backward()
    if wanted[0]:
        away(module, leaf, dy)
    else:
        (module(leaf) * dy).sum().backward()
    for got, expected in zip((leaf, module.weight, module.bias), needing, strict=True):
        assert (got.grad is None) == (expected.grad is None)
        assert got.grad is None or torch.allclose(got.grad, expected.grad, rtol=1e-9, atol=1e-11)
    assert torch.equal(leaf, before), "the caller's own tensor is never written"


@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, True), (False, False)])
def test_functional_form_needs_neither_weight_nor_bias(weight: bool, bias: bool) -> None:
    leaf, dy = normal(6, 4, seed=1).requires_grad_(), normal(6, 4, seed=2)
    other = leaf.detach().clone().requires_grad_()
    w = normal(4, seed=3).requires_grad_() if weight else None
    b = normal(4, seed=4).requires_grad_() if bias else None
    got, expected = inplace_abn(leaf * 1, w, b, None, None), plain(other, w, b, "leaky_relu", 0.01)
    inputs = [t for t in (w, b) if t is not None]
    first = torch.autograd.grad((got * dy).sum(), [leaf, *inputs])
    second = torch.autograd.grad((expected * dy).sum(), [other, *inputs])
    assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11)
    for a, b_ in zip(first, second, strict=True):
        assert torch.allclose(a, b_, rtol=1e-9, atol=1e-11)


def test_parameters_and_statistics_may_be_strided() -> None:
    tables = [normal(8, seed=i).abs() + 0.1 for i in range(4)]
    strided = [t.repeat_interleave(2)[::2] for t in tables]
    assert not strided[0].is_contiguous()
    dy = normal(6, 8, seed=2)
    results = []
    for weight, bias, mean, var in (tables, strided):
        leaf = normal(6, 8, seed=1).requires_grad_()
        w, b = (t.detach().requires_grad_() for t in (weight, bias))
        y = inplace_abn(leaf * 1, w, b, mean, var)
        results.append([y.detach(), *torch.autograd.grad((y * dy).sum(), (leaf, w, b)), mean, var])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# -- inputs ------------------------------------------------------------------------------------------------------------


def sliced(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def transposed(t: Tensor) -> Tensor:
    return t.transpose(2, 3).contiguous().transpose(2, 3)


def batch_last(t: Tensor) -> Tensor:
    return t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
@pytest.mark.parametrize("strided", [sliced, transposed, batch_last])
@pytest.mark.parametrize("where", ["x", "dy", "both"])
def test_inputs_and_gradients_may_have_any_strides(strided: Any, where: str, activation: str) -> None:
    x, dy = normal(3, 4, 5, 6, seed=1), normal(3, 4, 5, 6, seed=2)
    module = trained_(InPlaceABN(4, activation=activation).double())
    other = x.clone().requires_grad_()
    expected = plain(other, module.weight.detach(), module.bias.detach(), activation, 0.01)
    (expected * dy).sum().backward()
    leaf = x.clone().requires_grad_()
    y = module((strided(leaf) if where != "dy" else leaf) * 1 if strided is not sliced else strided(leaf))
    y.backward(dy if where == "x" else strided(dy))
    assert torch.allclose(y, expected, rtol=1e-11, atol=1e-11)
    assert torch.allclose(leaf.grad, other.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
@pytest.mark.parametrize("last", [False, True])
def test_an_expanded_gradient_stays_as_it_is(activation: str, last: bool) -> None:
    shape = (3, 4, 5, 6)
    one = torch.ones((), dtype=torch.float64)
    x = normal(*shape, seed=1)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    module, other = InPlaceABN(4, activation=activation).double(), x.clone().requires_grad_()
    plain(other, module.weight.detach(), module.bias.detach(), activation, 0.01).backward(one.expand(shape))
    leaf = x.clone().requires_grad_()
    module(leaf * 1).backward(one.expand(shape))
    assert one == 1
    assert torch.allclose(leaf.grad, other.grad, rtol=1e-9, atol=1e-11)
    leaf.grad = None
    module(leaf * 1).sum().backward()
    assert torch.allclose(leaf.grad, other.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((3, 1, 4, 5), torch.channels_last), ((3, 4, 1, 1), torch.channels_last), ((1, 4, 2, 3), torch.channels_last)],
    ids=["one channel", "one spot", "one sample"],
)
@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
def test_strides_of_dimensions_of_one_element_do_not_matter(
    shape: tuple[int, ...], memory_format: Any, activation: str
) -> None:
    module, dy = trained_(InPlaceABN(shape[1], activation=activation).double()), normal(*shape, seed=2)
    other = normal(*shape, seed=1).requires_grad_()
    expected = plain(other, module.weight.detach(), module.bias.detach(), activation, 0.01)
    (expected * dy).sum().backward()
    for of_x, of_dy in ((memory_format, torch.contiguous_format), (torch.contiguous_format, memory_format)):
        leaf = normal(*shape, seed=1).to(memory_format=of_x).requires_grad_()
        out = away(module, leaf, dy.to(memory_format=of_dy))
        assert torch.allclose(out, expected, rtol=1e-11, atol=1e-11)
        assert torch.allclose(leaf.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_overwriting_writes_onto_the_very_input() -> None:
    """No layout copy: what comes out lies where x lay, in its memory format."""
    for shape, memory_format in LAYOUTS.values():
        x = normal(*shape, seed=1).contiguous(memory_format=memory_format).requires_grad_() * 1
        where, strides = x.data_ptr(), x.stride()
        y = InPlaceABN(5).double()(x)
        assert (y.data_ptr(), y.stride()) == (where, strides)
        assert y is x


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0, 5), (0, 3, 2, 2, 2)], ids=str)
def test_an_empty_batch_changes_nothing_and_has_zero_gradients(
    shape: tuple[int, ...], activation: str, training: bool
) -> None:
    module = trained_(InPlaceABN(3, activation=activation)).train(training)
    before = copy.deepcopy(module.state_dict())
    leaf = torch.zeros(shape, requires_grad=True)
    y = module(leaf * 1)
    assert y.shape == shape
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == shape
    assert module.weight.grad.tolist() == module.bias.grad.tolist() == [0, 0, 0]
    for name in ("running_mean", "running_var"):
        assert torch.equal(module.state_dict()[name], before[name]), name


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (1, 3, 1, 1)], ids=str)
def test_one_sample_per_channel_raises_in_training_only(shape: tuple[int, ...]) -> None:
    module = InPlaceABN(3)
    with pytest.raises(ValueError, match="single sample per channel"):
        module(torch.randn(shape))
    with pytest.raises(ValueError, match="single sample per channel"):
        inplace_abn(torch.randn(shape), None, None, None, None)
    assert module.running_mean.tolist() == [0, 0, 0]
    assert module.eval()(torch.randn(shape)).shape == shape
    with pytest.raises(ValueError, match="single sample per channel"):
        InPlaceABN(3, track_running_stats=False).eval()(torch.randn(shape))


@pytest.mark.parametrize("made", [ABN, InPlaceABN])
def test_wrong_shapes_and_dtypes_raise_and_are_quoted(made: Any) -> None:
    with pytest.raises(ValueError, match=r"3.*\(2, 4\)"):
        made(3)(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"N × 3.*\(3,\)"):
        made(3)(torch.randn(3))
    with pytest.raises((TypeError, RuntimeError), match=r"int64|Long"):
        made(3)(torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "lengths",
    [(3, 4, 4, 4), (4, 3, 4, 4), (4, 4, 3, 4), (4, 4, 4, 3), (3, 3, 4, 4), (5, 5, 4, 4), (3, None, 4, 4)],
    ids=str,
)
def test_functional_form_refuses_tables_of_another_length(lengths: tuple[int | None, ...], training: bool) -> None:
    """The kernels read as many elements as x has channels."""
    tables = [None if length is None else torch.ones(length) for length in lengths]
    with pytest.raises((ValueError, RuntimeError)):
        inplace_abn(torch.randn(5, 4), *tables, training=training)


def test_unknown_names_raise_with_those_there_are() -> None:
    for made in (ABN, InPlaceABN):
        with pytest.raises(ValueError, match=r"'relux'.*identity, leaky_relu, elu, relu, silu"):
            made(3, activation="relux")
        with pytest.raises(ValueError, match="None"):
            made(3, activation=None)
    with pytest.raises(ValueError, match="softmax"):
        inplace_abn(torch.randn(4, 3), None, None, None, None, activation="softmax")
    with pytest.raises(ValueError, match=r"(?s)'abs'.*weight.*absolute"):
        InPlaceABN(3, scale="abs")
    with pytest.raises(ValueError, match=r"(?s)'abs'.*weight.*absolute"):
        inplace_abn(torch.randn(4, 3), None, None, None, None, scale="abs")


def test_eval_without_statistics_raises() -> None:
    with pytest.raises(ValueError, match="running_mean"):
        inplace_abn(torch.randn(4, 3), None, None, None, None, training=False)


@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
def test_inference_mode_and_no_grad_leave_the_input_alone(activation: str) -> None:
    module, bn = InPlaceABN(3, activation=activation), nn.BatchNorm1d(3)
    x = normal(5, 3, dtype=torch.float32)
    before = x.clone()
    for training in (True, False):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                got, expected = module.train(training)(x), act(bn.train(training)(x), activation, 0.01)
                assert torch.allclose(got, expected, atol=1e-6)
                assert torch.equal(x, before)
    assert int(module.num_batches_tracked) == 2


def test_autocast_gives_what_batch_norm_gives() -> None:
    torch.manual_seed(0)
    plainly = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.LeakyReLU(0.01), nn.Conv2d(6, 2, 3))
    ours = nn.Sequential(copy.deepcopy(plainly[0]), InPlaceABN(6), nn.Identity(), copy.deepcopy(plainly[3]))
    x = normal(4, 3, 9, 9, dtype=torch.float32)
    results = []
    for model in (plainly, ours):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            loss = y.float().square().mean()
        assert y.dtype == torch.bfloat16
        del y
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters()), model[1].running_var])
    assert ours[1].copies == {}
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.allclose(a, b, rtol=0.05, atol=0.02 * float(b.abs().max()))  # bf16 has 8 bits


# -- weights that cannot be inverted -----------------------------------------------------------------------------------


def as_batch_norm(module: InPlaceABN, seed: int = 1) -> None:
    """One forward and backward beside torch, which must agree; float32."""
    bn = nn.BatchNorm1d(module.num_features).double()
    bn.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in module.state_dict().items()})
    module.zero_grad()
    a = normal(12, module.num_features, seed=seed, dtype=torch.float32).requires_grad_()
    b = a.detach().double().requires_grad_()
    dy = normal(12, module.num_features, seed=2, dtype=torch.float32)
    out = away(module, a, dy)
    expected = act(bn(b), module.activation, module.activation_param)
    (expected * dy.double()).sum().backward()
    assert torch.allclose(out.double(), expected, atol=1e-5)
    for name, got, wanted in (
        ("x", a.grad, b.grad),
        ("weight", module.weight.grad, bn.weight.grad),
        ("bias", module.bias.grad, bn.bias.grad),
    ):
        assert torch.allclose(got.double(), wanted, rtol=1e-3, atol=1e-4), f"{name}: {got} is not {wanted}"


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-40, 1e-9])
@pytest.mark.parametrize(("activation", "param"), [("identity", 0.01), ("leaky_relu", 0.01), ("elu", 1.0)])
def test_a_weight_next_to_zero_keeps_the_input_says_so_and_recovers(activation: str, param: float, tiny: float) -> None:
    module = trained_(InPlaceABN(3, activation=activation, activation_param=param))
    as_batch_norm(module)
    assert module.copies == {}
    with torch.no_grad():
        module.weight[1] = tiny
    as_batch_norm(module)
    assert list(module.copies.values()) == [1]
    assert "backward from the input" in str(module.copies)
    assert "too small to invert" in str(module.copies)
    with torch.no_grad():
        module.weight[1] = -0.6
    as_batch_norm(module)
    assert sum(module.copies.values()) == 1, "with larger weights it starts from the output again"


def test_a_too_small_weight_does_not_overwrite_the_input() -> None:
    module = InPlaceABN(3)
    nn.init.zeros_(module.weight)
    x = normal(6, 3, dtype=torch.float32).requires_grad_() * 1
    before = x.detach().clone()
    y = module(x)
    assert y is not x
    assert torch.equal(x, before)


def test_loaded_weights_are_looked_at() -> None:
    module = trained_(InPlaceABN(3))
    as_batch_norm(module)
    state = module.state_dict()
    module.load_state_dict({**state, "weight": torch.tensor([0.5, 0.0, 0.5])})
    as_batch_norm(module)
    module.weight = nn.Parameter(torch.tensor([0.5, 0.5, 0.0]))
    as_batch_norm(module)
    assert sum(module.copies.values()) == 2


def test_weights_changed_through_data_are_seen() -> None:
    """`.data` moves no version; older optimizers and pruning write through it."""
    module = trained_(InPlaceABN(3))
    as_batch_norm(module)
    module.weight.data[1] = 0
    as_batch_norm(module)
    module.weight.data[1] = 0.5
    as_batch_norm(module)
    assert sum(module.copies.values()) == 1


def test_reasons_do_not_multiply_while_weights_move() -> None:
    """A counter with one entry a step would grow for as long as training runs."""
    module = trained_(InPlaceABN(3))
    for step in range(6):
        with torch.no_grad():
            module.weight[1] = 1e-9 * (step + 1)
        away(module, torch.randn(4, 3, requires_grad=True), torch.ones(4, 3))
    assert list(module.copies.values()) == [6]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
def test_weights_that_are_no_numbers_spoil_their_channel_alone(value: float, activation: str) -> None:
    module, bn = (trained_(m, 3) for m in (InPlaceABN(3, activation=activation), nn.BatchNorm1d(3)))
    with torch.no_grad():
        module.weight[1] = bn.weight[1] = value
    a, b = (normal(6, 3, dtype=torch.float32).requires_grad_() for _ in range(2))
    dy = torch.ones(6, 3)
    out = away(module, a, dy)
    expected = act(bn(b), activation, 0.01)
    expected.backward(dy)
    assert not torch.isfinite(out[:, 1]).all()
    assert not torch.isfinite(a.grad[:, 1]).any()
    for got, wanted in (
        (out, expected),
        *((p.grad, q.grad) for p, q in zip((a, *module.parameters()), (b, *bn.parameters()), strict=True)),
    ):
        assert torch.allclose(got[..., [0, 2]], wanted[..., [0, 2]], atol=1e-4)


@pytest.mark.parametrize(
    ("activation", "weight", "bias"),
    [
        *(("leaky_relu", weight, 1.0) for weight in (1e-2, 1e-4, 2e-6, 1e-7)),
        *(("elu", weight, 0.0) for weight in (2.0, 5.0, 20.0)),
        ("elu", 1.0, -16.0),
    ],
)
def test_float32_gradients_have_eight_good_bits_whatever_the_weights_are(
    activation: str, weight: float, bias: float
) -> None:
    """Where inverting would lose more, the input is kept. (Eager has 22.)"""
    param = ACTIVATIONS[activation]
    module = InPlaceABN(4, activation=activation, activation_param=param)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([weight, -weight, 1.0, 1.0]))
        module.bias[:2] = bias
    leaf, dy = normal(256, 4, seed=1, dtype=torch.float32).requires_grad_(), normal(256, 4, dtype=torch.float32)
    doubles = [t.detach().double().requires_grad_() for t in (leaf, module.weight, module.bias)]
    expected = torch.autograd.grad((plain(*doubles, activation, param) * dy.double()).sum(), doubles)
    away(module, leaf, dy)
    for channel in range(4):
        for got, wanted in zip((leaf.grad, module.weight.grad, module.bias.grad), expected, strict=True):
            off = (got[..., channel] - wanted[..., channel]).abs().max() / wanted[..., channel].abs().max()
            assert off < 2**-8, f"channel {channel}: off by {off:.2g}"


# -- in place after forward --------------------------------------------------------------------------------------------

MODIFIED = "modified by an inplace operation"


@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_changed_between_forward_and_backward_raise(name: str, activation: str) -> None:
    module = InPlaceABN(3, activation=activation)
    loss = module(torch.randn(5, 3, requires_grad=True) * 1).sum()
    with torch.no_grad():
        getattr(module, name).add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


@pytest.mark.parametrize("activation", ["identity", "leaky_relu", "elu"])
def test_output_changed_in_place_raises_at_backward(activation: str) -> None:
    module = InPlaceABN(3, activation=activation)
    y = module(torch.randn(5, 3, requires_grad=True) * 1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_output_changed_in_place_is_right_where_the_input_is_kept(activation: str) -> None:
    leaf, other = (normal(5, 3).requires_grad_() for _ in range(2))
    InPlaceABN(3, activation=activation).double()(leaf * 1).mul_(2).square().sum().backward()
    (plain(other, None, None, activation, 0) * 2).square().sum().backward()
    assert torch.allclose(leaf.grad, other.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_input_changed_in_place_raises_or_is_right(activation: str) -> None:
    param = ACTIVATIONS[activation]
    module = InPlaceABN(3, activation=activation, activation_param=param).double()
    leaf = normal(5, 3).requires_grad_()
    x = leaf * 1
    alias = x.detach()
    loss = (module(x) * torch.arange(15.0, dtype=torch.float64).reshape(5, 3)).sum()
    alias.zero_()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def test_a_view_of_the_input_from_before_sees_the_output_and_raises_if_it_was_saved() -> None:
    x = normal(5, 3).requires_grad_() * 1
    product = (x[0] * x[1]).sum()  # saved views of x
    y = InPlaceABN(3).double()(x)
    with pytest.raises(RuntimeError, match=MODIFIED):
        (product + y.sum()).backward()


# -- the reason for a copy ---------------------------------------------------------------------------------------------


def chain(module: InPlaceABN) -> Tensor:
    return module(normal(5, 3, dtype=torch.float32).requires_grad_() * 1)


def held_output(module: InPlaceABN) -> Tensor:
    held.append(y := chain(module))
    return y.sum()


def held_view(module: InPlaceABN) -> Tensor:
    held.append((y := chain(module)).detach()[0])
    return y.sum()


held: list[Tensor] = []


def kept_graph(module: InPlaceABN) -> Tensor:
    (loss := chain(module).sum()).backward(retain_graph=True)
    module.zero_grad()
    return loss


def created_graph(module: InPlaceABN) -> Tensor:
    loss = chain(module).square().sum()
    torch.autograd.grad(loss, module.weight, create_graph=True)
    return torch.zeros((), requires_grad=True) * 1


def checkpointed(module: InPlaceABN) -> Tensor:
    return checkpoint(lambda x: module(x * 1), torch.randn(5, 3, requires_grad=True), use_reentrant=False).sum()


def checkpointed_reentrant(module: InPlaceABN) -> Tensor:
    return checkpoint(lambda x: module(x * 1), torch.randn(5, 3, requires_grad=True), use_reentrant=True).sum()


def offloaded(module: InPlaceABN) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return chain(module).sum()


def leaf(module: InPlaceABN) -> Tensor:
    return module(torch.randn(5, 3, requires_grad=True)).sum()


def view(module: InPlaceABN) -> Tensor:
    return module((torch.randn(15, requires_grad=True) * 1).view(5, 3)).sum()


def not_dense(module: InPlaceABN) -> Tensor:
    return module(torch.randn(3, 5, requires_grad=True).t() * 1).sum()


def from_exp(module: InPlaceABN) -> Tensor:
    return module(torch.randn(5, 3, requires_grad=True).exp()).sum()


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(y := x.sin())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy * ctx.saved_tensors[0]


def from_function(module: InPlaceABN) -> Tensor:
    return module(Saves.apply(torch.randn(5, 3, requires_grad=True))).sum()


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (held_output, owner.HELD),
        (held_view, owner.HELD),
        (kept_graph, owner.KEPT),
        (created_graph, owner.KEPT),
        (checkpointed, owner.HOOKED),
        (checkpointed_reentrant, owner.HELD),  # torch holds the outputs of what it ran again
        (offloaded, owner.HOOKED),
        (leaf, "the input is not overwritten: it is a leaf"),
        (view, "the input is not overwritten: it is a view"),
        (not_dense, "the input is not overwritten: it is not dense"),
        (from_exp, "the input is not overwritten: ExpBackward0, which made it, may have saved it"),
        (from_function, "the input is not overwritten: SavesBackward, which made it, may have saved it"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_copies_says_why(run: Callable[[InPlaceABN], Tensor], reason: str) -> None:
    module = InPlaceABN(3)
    run(module).backward()
    held.clear()
    assert [each for each in module.copies if each.startswith(reason)], dict(module.copies)
    assert len(module.copies) == 1 or reason == owner.HOOKED


def test_copies_is_empty_and_says_none_where_all_is_overwritten() -> None:
    module = InPlaceABN(3)
    chain(module).sum().backward()
    assert module.copies == {}
    assert str(module.copies) == "none"


def test_frozen_and_grad_free_use_records_no_copy() -> None:
    module = InPlaceABN(3).requires_grad_(False)
    module(torch.randn(5, 3))
    with torch.no_grad():
        module(torch.randn(5, 3))
    assert module.copies == {}


PRODUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(1),
    "pow": lambda x: x.abs().pow(1.5),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "cumprod": lambda x: x.cumprod(0),
    "relu_": lambda x: (x * 1).relu_(),
    "leaky_relu_": lambda x: F.leaky_relu_(x * 1, 0.2),
    "elu_": lambda x: F.elu_(x * 1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "dropout": lambda x: F.dropout(x, 0.0),
    "cat": lambda x: torch.cat([x, x]),
    "mul": lambda x: x * x,
    "linalg.inv": lambda x: torch.linalg.inv(x[:4] + 4 * torch.eye(4, dtype=x.dtype)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "another InPlaceABN": lambda x: inplace_abn(x * 1, None, None, None, None),
    "contiguous": lambda x: x.contiguous(),
    "max_pool": lambda x: F.max_pool1d(x[None], 1)[0] * 1,
    "where": lambda x: torch.where(x > 0, x, 2 * x),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "expand": lambda x: x.mean(0, keepdim=True).expand(3, 4) + x[:3],
}


@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
@pytest.mark.parametrize("name", PRODUCERS)
def test_whoever_made_the_input_has_its_own_gradient_right(name: str, activation: str) -> None:
    a, b = (normal(6, 4, seed=3).requires_grad_() for _ in range(2))
    made = PRODUCERS[name](a)
    dy = normal(*made.shape, seed=4)
    out = inplace_abn(made, None, None, None, None, activation=activation)
    del made
    (out * dy).sum().backward()
    (plain(PRODUCERS[name](b), None, None, activation, 0.01) * dy).sum().backward()
    assert torch.allclose(a.grad, b.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("activation", "param"), EVERY)
def test_plain_abn_is_the_formula(activation: str, param: float, training: bool) -> None:
    module = trained_(ABN(4, activation=activation, activation_param=param).double()).train(training)
    running = None if training else (module.running_mean.clone(), module.running_var.clone())
    a, b = (normal(6, 4, 3, seed=1).requires_grad_() for _ in range(2))
    dy = normal(6, 4, 3, seed=2)
    got, expected = module(a), plain(b, module.weight, module.bias, activation, param, running)
    first = torch.autograd.grad((got * dy).sum(), (a, module.weight, module.bias))
    second = torch.autograd.grad((expected * dy).sum(), (b, module.weight, module.bias))
    assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11)
    for x, y in zip(first, second, strict=True):
        assert torch.allclose(x, y, rtol=1e-9, atol=1e-11)


def test_backward_may_run_in_another_thread() -> None:
    module, results = InPlaceABN(3), []
    for run in (lambda loss: loss.backward(), lambda loss: in_thread(loss.backward)):
        leaf = normal(5, 3, dtype=torch.float32).requires_grad_()
        run((module(leaf * 1) * torch.arange(3)).sum())
        results.append(leaf.grad)
    assert torch.equal(*results)
    assert module.copies == {}


def in_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_after_a_backward_that_failed_half_way_another_raises() -> None:
    module = InPlaceABN(3)
    x = torch.randn(5, 3, requires_grad=True) * 1
    loss = module(x * 2).sum()

    def fail(_: Tensor) -> None:
        raise KeyError("a hook of the user's")

    x.register_hook(fail)
    with pytest.raises(KeyError):
        loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradient_buffer_gets_the_same_gradients() -> None:
    models = small_model(0), small_model(0)
    tb.GradBuffer(models[0])
    x = normal(6, 3, 8, 8, dtype=torch.float32)
    for model in models:
        model(x).square().mean().backward()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name


def test_one_module_used_twice_sums_its_gradients() -> None:
    module, bn = (trained_(m.double()) for m in (InPlaceABN(4), nn.BatchNorm1d(4)))
    x, y = normal(6, 4, seed=1), normal(9, 4, seed=2)
    (module(x.requires_grad_() * 1).square().sum() + module(y.requires_grad_() * 1).sum()).backward()
    got = [x.grad, y.grad, module.weight.grad, module.bias.grad]
    x.grad = y.grad = None
    (F.leaky_relu(bn(x)).square().sum() + F.leaky_relu(bn(y)).sum()).backward()
    for a, b in zip(got, [x.grad, y.grad, bn.weight.grad, bn.bias.grad], strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
    assert torch.allclose(module.running_var, bn.running_var)


# -- as modules --------------------------------------------------------------------------------------------------------


def by_pickle(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module: nn.Module) -> Any:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_state(module: nn.Module) -> Any:
    torch.save(module.state_dict(), file := io.BytesIO())
    file.seek(0)
    fresh = InPlaceABN(3, activation="elu", activation_param=1.0)
    fresh.load_state_dict(torch.load(file))
    return fresh


@pytest.mark.parametrize("clone", [copy.deepcopy, by_pickle, by_torch_save, by_state])
def test_a_copy_of_a_trained_module_trains_on_alike_and_apart(clone: Callable[[nn.Module], Any]) -> None:
    module = trained_(InPlaceABN(3, activation="elu", activation_param=1.0))
    as_batch_norm(module)
    module.zero_grad(set_to_none=True)
    other = clone(module)
    assert other.copies == {}
    as_batch_norm(other)
    assert not torch.equal(other.running_mean, module.running_mean)
    as_batch_norm(module)
    for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(module.weight.grad, other.weight.grad)
    with torch.no_grad():
        other.weight[0] = 0
    as_batch_norm(other)
    assert sum(other.copies.values()) == 1
    assert module.copies == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_module_moves_between_dtypes(dtype: torch.dtype) -> None:
    module = trained_(InPlaceABN(3))
    as_batch_norm(module)
    module.to(dtype)
    y = module(normal(6, 3, dtype=dtype).requires_grad_() * 1)
    y.sum().backward()
    assert {t.dtype for t in (y, module.weight.grad, module.running_var)} == {dtype}
    assert module.num_batches_tracked.dtype == torch.long
    as_batch_norm(module.float())


def test_a_weight_that_only_float64_inverts_is_not_inverted_in_float16() -> None:
    module = trained_(InPlaceABN(3))
    with torch.no_grad():
        module.weight.fill_(1e-4)
    module(normal(6, 3, dtype=torch.float64).requires_grad_() * 1).sum().backward()
    assert module.copies == {}
    module(normal(6, 3, dtype=torch.float16).requires_grad_() * 1).sum().backward()
    assert "too small to invert" in str(module.copies)


def test_module_is_built_on_its_device_and_in_its_dtype() -> None:
    module = InPlaceABN(3, dtype=torch.float64)
    assert {t.dtype for t in (module.weight, module.bias, module.running_mean, module.running_var)} == {torch.float64}
    assert InPlaceABN(3, device="meta").weight.is_meta


def test_repr_says_what_it_does() -> None:
    assert repr(ABN(3)) == (
        "ABN(3, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True, activation=leaky_relu[0.01])"
    )
    assert "activation=leaky_relu[0.01], backward from output" in repr(InPlaceABN(3))
    assert "activation=relu, backward from input" in repr(InPlaceABN(3, activation="relu"))
    assert "scale=absolute" in repr(InPlaceABNSync(3, scale="absolute"))


@pytest.mark.parametrize(("activation", "param"), EVERY)
def test_backward_from_says_what_is_kept(activation: str, param: float) -> None:
    module = InPlaceABN(3, activation=activation, activation_param=param)
    x = normal(6, 3, dtype=torch.float32).requires_grad_() * 1
    assert (module(x) is x) == (module.backward_from == "output")


def test_same_input_gives_the_same_bits() -> None:
    torch.set_num_threads(2)
    for activation, param in ACTIVATIONS.items():
        bits = []
        for _ in range(3):
            module = trained_(InPlaceABN(32, activation=activation, activation_param=param))
            leaf = normal(8, 32, 24, 24, seed=1, dtype=torch.float32).requires_grad_()
            out = away(module, leaf, normal(8, 32, 24, 24, seed=2, dtype=torch.float32))
            bits.append([out, leaf.grad, module.weight.grad, module.bias.grad, module.running_var])
        for again in bits[1:]:
            assert all(torch.equal(a, b) for a, b in zip(bits[0], again, strict=True))


def small_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), InPlaceABN(8), nn.Conv2d(8, 8, 3), InPlaceABN(8, activation="silu")),
        *(nn.Flatten(), nn.Linear(8 * 16, 16), InPlaceLayerNorm(16), nn.Linear(16, 8), SwiGLU(), nn.Linear(4, 2)),
    )


def train_(model: nn.Sequential, meet: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = normal(6, 3, 8, 8, dtype=torch.float32)
    for _ in range(8):
        meet()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_two_threads_train_two_models_as_one_would() -> None:
    models, twins = ([small_model(seed) for seed in (0, 1)] for _ in range(2))
    together = threading.Barrier(2)

    def work(model: nn.Sequential) -> None:
        torch.set_num_threads(1)
        train_(model, together.wait)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, twin in zip(models, twins, strict=True):
        train_(twin)
        for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
        assert all(m.copies == {} for m in model if hasattr(m, "copies"))


# -- compilers and tracers ---------------------------------------------------------------------------------------------


JIT = pytest.mark.filterwarnings(  # torch's own, about itself
    "ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_beside_eager(
    module: Any, shapes: list[tuple[int, ...]], dynamic: bool | None = None, fullgraph: bool = True
) -> None:
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=fullgraph, backend="aot_eager", dynamic=dynamic)
    for i, shape in enumerate(shapes):
        a, b = (normal(*shape, seed=i, dtype=torch.float32).requires_grad_() for _ in range(2))
        dy = normal(*shape, seed=9, dtype=torch.float32)
        before = a.detach().clone()
        y = compiled(a)
        y.backward(dy)
        expected = away(twin, b, dy)
        assert torch.equal(a, before)
        assert torch.allclose(y, expected, atol=1e-5)
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5)
    for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-4), name
    for (name, a), b in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name


@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(
    ("settings", "training"),
    [
        ({}, True),
        ({"activation": "relu"}, True),
        ({"activation": "elu", "activation_param": 1.0}, False),
        ({"affine": False}, True),
        ({"track_running_stats": False, "scale": "absolute"}, True),
    ],
    ids=["leaky_relu", "relu", "elu, eval", "no affine", "no tracking, absolute"],
)
def test_module_compiles_into_one_graph(settings: dict[str, Any], training: bool) -> None:
    module = trained_(InPlaceABN(4, **settings)).train(training)
    compiled_beside_eager(module, [(5, 4, 3)] * 2)


@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
def test_module_compiles_with_frozen_parameters() -> None:
    module = trained_(InPlaceABN(4))
    module.weight.requires_grad_(False)
    compiled_beside_eager(module, [(5, 4, 3)])


@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
def test_module_compiles_with_dynamic_shapes() -> None:
    compiled_beside_eager(trained_(InPlaceABN(4)), [(5, 4, 3, 2), (7, 4, 2, 6), (3, 4, 9, 9)], dynamic=True)


@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
def test_module_compiles_with_a_plain_average_where_torchs_does() -> None:
    """momentum None reads the counter: neither is one graph."""
    compiled_beside_eager(trained_(InPlaceABN(4, momentum=None)), [(5, 4, 3)] * 2, fullgraph=False)


@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
def test_module_keeps_memory_formats_when_compiled() -> None:
    x = normal(2, 4, 3, 5, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    assert torch.compile(InPlaceABN(4), fullgraph=True, backend="aot_eager")(x).stride() == x.stride()


@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
def test_module_exports() -> None:
    module, x = trained_(InPlaceABN(4)).eval(), normal(5, 4, 3, dtype=torch.float32)
    program = torch.export.export(module, (x,))
    assert torch.allclose(program.module()(x), module(x), atol=1e-6)


@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
def test_weights_that_shrink_after_compiling_are_right() -> None:
    module = trained_(InPlaceABN(3))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    dy = normal(12, 3, seed=2, dtype=torch.float32)
    for weight in (0.5, 0.0):
        with torch.no_grad():
            module.weight[1] = weight
        module.zero_grad()
        (compiled(normal(12, 3, seed=1, dtype=torch.float32)) * dy).sum().backward()
        got, module.weight.grad = module.weight.grad, None
        as_batch_norm(module)
        assert torch.allclose(got, module.weight.grad, atol=1e-5)


@pytest.mark.slow
@JIT
@pytest.mark.usefixtures("_fresh_dynamo")
def test_module_compiles_with_inductor() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), trained_(InPlaceABN(4)), nn.Sigmoid())
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    for i in range(2):
        x = normal(5, 4, 6, 6, seed=i, dtype=torch.float32)
        for each in (compiled, twin):
            each(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.allclose(p.grad, q[1].grad, rtol=1e-3, atol=1e-4), name
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


def operators() -> set[str]:
    """Those of takeback.nn: the compiler's own are made by a recording, and seen by nobody else."""
    names = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix("takeback::") for name in names if name.startswith("takeback::")}
    return found - {"classes", "drawn", "sum_of_indexed", "sum_of_masked", "sum_of_gathered"}


def operator_cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every operator with several inputs: layouts, dtypes, missing parameters, nothing at all."""
    images = (
        (normal(4, 3, 5, dtype=torch.float32), True),
        (normal(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (normal(6, 3, dtype=torch.bfloat16), False),
        (torch.zeros(0, 3, 2), True),
    )
    for x, affine in images:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight, bias = (torch.tensor([0.5, -1.0, 2.0]) if affine else None for _ in range(2))
        norm = weight, bias, EPS, 1, 0.1, affine
        for training in (True, False):
            running = torch.zeros(3), torch.ones(3)
            yield "abn", (x, *norm, *running, training, 0.1)
            yield "abn_", (x.clone(), *norm, *running, training, 0.1)
            tables = torch.zeros(3, dtype=wide), torch.ones(3, dtype=wide)
            for name in ("abn_backward", "abn_backward_", "abn_sums"):
                yield name, (x.clone(), x.clone(), *norm, *tables, training, True)
    yield "abn", (normal(4, 5, 3).transpose(1, 2), None, None, EPS, 3, 0.0, False, None, None, True, 0.1)
    strided = normal(4, 5, 3).transpose(1, 2)
    for name in ("abn_backward", "abn_sums"):
        ones = torch.ones(3, dtype=torch.float64)
        yield name, (strided, strided, None, None, EPS, 3, 0.0, False, 0 * ones, ones, True, False)

    for x in (normal(4, 6, dtype=torch.float32), normal(2, 3, 6, dtype=torch.bfloat16), normal(6, 4).t()):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = x.numel() // x.shape[-1]
        for weight in (torch.ones(x.shape[-1]), None):
            yield "rms_norm", (x, weight, x.shape[-1], EPS)
            tables = torch.zeros(rows, dtype=wide), torch.ones(rows, dtype=wide)
            for centred in (True, False):
                arguments = x.shape[-1], centred, tables[0] if centred else None, tables[1], weight, weight, True
                yield "row_norm_backward", (x, x.clone(), *arguments)
                yield "row_norm_sums", (x, x.clone(), *arguments)
                if x.is_contiguous():
                    yield "row_norm_backward_", (x.clone(), x.clone(), *arguments)
        yield "swiglu", (x, x.clone())
        yield "swiglu_backward", (x, x.clone(), x.clone())
        if x.is_contiguous():
            yield "swiglu_backward_", (x.clone(), x.clone(), x.clone())
    halves = normal(4, 6).chunk(2, -1)
    yield "swiglu", halves
    yield "swiglu_backward", (normal(4, 3), *halves)
    yield "swiglu_backward_", (normal(4, 3), *normal(4, 6).chunk(2, -1))


@JIT
def test_every_operator_tells_tracers_the_truth() -> None:
    quick, slow = ("test_schema", "test_faketensor"), ("test_autograd_registration", "test_aot_dispatch_dynamic")
    seen: set[str] = set()
    for name, arguments in operator_cases():
        tests = quick if name in seen else quick + slow
        seen.add(name)
        torch.library.opcheck(getattr(torch.ops.takeback, name).default, arguments, test_utils=tests)
    assert operators() - seen == set(), "an operator without a case"


def gradients(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, ...]:
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    y = inplace_abn(x * 1, weight, bias, None, None, activation=activation)
    return torch.autograd.grad((y * x.detach()).sum(), (x, weight, bias))


@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
@pytest.mark.parametrize("activation", ["leaky_relu", "relu"])
def test_make_fx_traces_forward_and_backward_for_any_weights_or_says_what_it_cannot(mode: Any, activation: str) -> None:
    step = functools.partial(gradients, activation=activation)
    inputs = normal(6, 3, seed=1), normal(3, seed=2).abs() + 0.5, normal(3, seed=3)
    if mode == "real" and activation == "leaky_relu":
        with pytest.raises(RuntimeError, match="data-dependent control flow"):
            make_fx(step, tracing_mode=mode)(*inputs)
        return
    graph = make_fx(step, tracing_mode=mode)(*inputs)
    assert [str(node.target) for node in graph.graph.nodes if "takeback" in str(node.target)]
    for weight in (inputs[1], inputs[1] * torch.tensor([1.0, 0.0, -1.0])):
        for a, b in zip(graph(inputs[0], weight, inputs[2]), step(inputs[0], weight, inputs[2]), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


@JIT
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "forward_ad", "jacrev"])
def test_torch_func_is_right_or_says_that_there_is_no_rule(transform: str) -> None:
    weight, bias = normal(3, seed=2).abs() + 0.5, normal(3, seed=3)

    def ours(x: Tensor) -> Tensor:
        return inplace_abn(x * 1, weight, bias, None, None).square().sum()

    def torchs(x: Tensor) -> Tensor:
        return F.leaky_relu(F.batch_norm(x, None, None, weight, bias, True)).square().sum()

    def run(function: Callable[[Tensor], Tensor]) -> Any:
        x = normal(6, 3, seed=1)
        if transform == "forward_ad":
            with torch.autograd.forward_ad.dual_level():
                dual = function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
                return torch.autograd.forward_ad.unpack_dual(dual).tangent
        if transform == "vmap":
            return torch.func.vmap(function)(torch.stack([x, x + 1]))
        if transform == "jvp":
            return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
        return getattr(torch.func, transform)(function)(x)

    expected = run(torchs)
    try:
        got = run(ours)
    except (RuntimeError, NotImplementedError) as error:
        assert re.search("functorch|vmap|forward|jvp", str(error)), error  # noqa: PT017
        return
    assert torch.allclose(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*new plan.*")
def test_compiled_step_has_the_bits_of_eager() -> None:
    x, target = normal(6, 3, 8, 8, dtype=torch.float32), normal(6, 2, seed=1, dtype=torch.float32)
    models = small_model(0), small_model(0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    step = tb.compile_step(models[0], lambda m, x, y: F.mse_loss(m(x), y), optimizers[0])
    for i in range(5):
        if i == 3:  # a weight that cannot be inverted
            for model in models:
                nn.init.zeros_(model[1].weight)
        compiled = step(x + i, target)
        optimizers[1].zero_grad()
        loss = F.mse_loss(models[1](x + i), target)
        loss.backward()
        optimizers[1].step()
        assert torch.equal(compiled, loss)
        for (name, a), b in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
            assert torch.equal(a, b), (i, name)
