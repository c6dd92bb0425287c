"""InPlaceLayerNorm, InPlaceRMSNorm, SwiGLU and GELU are torch's, forward and backward, and take their states.

Beside float64: what a result may be off by is its own dtype's rounding, a few of the arithmetic's, and, where backward
starts from the stored output, what dividing by the weight makes of that output's rounding. GELU has torch's bits.
"""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from takeback.nn import GELU, InPlaceLayerNorm, InPlaceRMSNorm, SwiGLU, gelu, owner, swiglu

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NORMS: dict[str, tuple[Any, Any]] = {
    "layer": (InPlaceLayerNorm, nn.LayerNorm),
    "rms": (InPlaceRMSNorm, nn.RMSNorm),
}
FEW = 8  # roundings of the arithmetic


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: waking worker threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def trained_(module: Any) -> Any:
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            drawn = normal(*p.shape, seed=30 + i)
            p.copy_(drawn.sign() * (drawn.abs() + 0.3) if i == 0 else drawn / 2)
    return module


def away(function: Callable[..., Tensor], dy: Tensor, *leaves: Tensor) -> Tensor:
    """Forward and backward of tensors of which nobody keeps anything; returns the output's values."""
    y = function(*(leaf * 1 for leaf in leaves))
    out = y.detach().clone()
    loss = (y * dy).sum()
    del y
    loss.backward()
    return out


def assert_near(what: str, got: Tensor | None, wanted: Tensor, off_by: Tensor) -> None:
    assert got is not None, f"{what} is missing"
    assert got.shape == wanted.shape, what
    worst = ((got.double() - wanted).abs() / off_by.clamp(min=1e-300)).max()
    assert worst <= 1, f"{what}: off by {worst:.3g} times what rounding explains"


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(6, 8), (3, 4, 33), (2, 3, 2, 16), (1, 5), (8,)], ids=str)
def test_norms_are_float64s_to_rounding_and_overwrite(norm: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    n, eps = shape[-1], 1e-5
    module = trained_(NORMS[norm][0](n, eps=eps, dtype=dtype))
    leaf, dy = (normal(*shape, seed=1) + 0.5).to(dtype).requires_grad_(), normal(*shape, seed=2, dtype=dtype)
    out = away(module, dy, leaf)
    assert module.copies == {}
    assert out.dtype == dtype

    store = torch.finfo(dtype).eps
    few = FEW * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    x, dy, weight = leaf.detach().double(), dy.double(), module.weight.detach().double()
    bias = module.bias.detach().double() if norm == "layer" else torch.zeros(n, dtype=torch.float64)
    mean = x.mean(-1, keepdim=True) if norm == "layer" else 0 * x[..., :1]
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    xhat, g = (x - mean) * rstd, dy * weight
    y = xhat * weight + bias
    along = (g * xhat).mean(-1, keepdim=True)
    dx = rstd * (g - xhat * along - (g.mean(-1, keepdim=True) if norm == "layer" else 0))

    cancels = (x.abs() + mean.abs()) * rstd
    y_off = store * y.abs() + few * (cancels * weight.abs() + bias.abs())
    xhat_off = (y_off + few * (y.abs() + bias.abs())) / weight.abs()
    along_off = (g.abs() * xhat_off + few * (g * xhat).abs()).mean(-1, keepdim=True)
    dx_off = xhat_off * along.abs() + xhat.abs() * along_off + few * (g.abs() + g.abs().mean(-1, keepdim=True))
    rows = tuple(range(x.dim() - 1))

    def over_rows(t: Tensor) -> Tensor:
        return t.sum(rows) if rows else t

    weight_off = over_rows(dy.abs() * xhat_off + few * (dy * xhat).abs())
    assert_near("y", out, y, y_off)
    assert_near("dx", leaf.grad, dx, store * dx.abs() + rstd * dx_off)
    wanted = over_rows(dy * xhat)
    assert_near("weight", module.weight.grad, wanted, store * wanted.abs() + weight_off)
    if norm == "layer":
        wanted = over_rows(dy)
        assert_near("bias", module.bias.grad, wanted, store * wanted.abs() + few * over_rows(dy.abs()))


@pytest.mark.parametrize(
    ("norm", "settings"),
    [
        ("layer", {}),
        ("layer", {"bias": False}),
        ("layer", {"elementwise_affine": False}),
        ("layer", {"eps": 0.1}),
        ("rms", {}),  # eps None
        ("rms", {"eps": 0.1}),
        ("rms", {"elementwise_affine": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("normalized", [6, (3, 4), (2, 3, 4)], ids=str)
def test_every_setting_of_torchs_norms_does_the_same(
    norm: str, settings: dict[str, Any], normalized: Any, dtype: torch.dtype
) -> None:
    ours, torchs = (trained_(made(normalized, **settings, dtype=dtype)) for made in NORMS[norm])
    shape = (5, *((normalized,) if isinstance(normalized, int) else normalized))
    a, b = (normal(*shape, seed=1, dtype=dtype).requires_grad_() for _ in range(2))
    dy = normal(*shape, seed=2, dtype=dtype)
    out, expected = away(ours, dy, a), away(torchs, dy, b)
    near = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert torch.allclose(out, expected, **near)
    assert torch.allclose(a.grad, b.grad, **near)
    for (name, p), q in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, **near), name
    assert ours.copies == {}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("affine", [True, False])
def test_gradcheck_of_norms(norm: str, affine: bool) -> None:
    module = trained_(NORMS[norm][0]((2, 3), elementwise_affine=affine, dtype=torch.float64))
    names = [name for name, _ in module.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x * 1,))

    inputs = normal(4, 2, 3).requires_grad_(), *(p.detach().clone().requires_grad_() for p in module.parameters())
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("norm", NORMS)
def test_states_load_both_ways(norm: str) -> None:
    ours, torchs = NORMS[norm]
    for settings in ({}, {"elementwise_affine": False}, *([{"bias": False}] if norm == "layer" else [])):
        a, b = trained_(ours((2, 3), **settings)), torchs((2, 3), **settings)
        assert list(a.state_dict()) == list(b.state_dict())
        b.load_state_dict(a.state_dict(), strict=True)
        fresh = ours((2, 3), **settings)
        fresh.load_state_dict(b.state_dict(), strict=True)
        for name, value in a.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], value)
    assert isinstance(ours(3), torchs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_with_float32_parameters_do_in_half_precision_what_torch_does(norm: str, dtype: torch.dtype) -> None:
    ours, torchs = (trained_(made(16)) for made in NORMS[norm])
    a, b = (normal(6, 16, seed=1, dtype=dtype).requires_grad_() for _ in range(2))
    dy = normal(6, 16, seed=2, dtype=dtype)
    y = ours(a * 1)
    expected = plain_norm(norm, torchs, b)
    assert y.dtype == expected.dtype == dtype
    y.backward(dy)
    expected.backward(dy)
    eps = 8 * torch.finfo(dtype).eps
    assert torch.allclose(y, expected, rtol=eps, atol=eps)
    assert torch.allclose(a.grad, b.grad, rtol=eps, atol=4 * eps)
    assert torch.allclose(ours.weight.grad, torchs.weight.grad, rtol=4 * eps, atol=4 * eps)
    assert ours.weight.grad.dtype == torch.float32


def plain_norm(norm: str, module: Any, x: Tensor) -> Tensor:
    """In float32, and back: torch's own rms_norm warns of mixed dtypes."""
    return (
        F.layer_norm(x.float(), module.normalized_shape, module.weight, module.bias, module.eps)
        if norm == "layer"
        else F.rms_norm(x.float(), module.normalized_shape, module.weight, module.eps)
    ).to(x.dtype)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_say_why_where_parameters_of_another_dtype_keep_the_input(norm: str) -> None:
    """As under autocast: either nothing is lost, or it is recorded."""
    module = NORMS[norm][0](8)
    y = module(normal(5, 8, dtype=torch.bfloat16).requires_grad_() * 1)
    if y.grad_fn.name() != "RowNormBackward":
        assert module.copies


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own rms_norm
@pytest.mark.parametrize("norm", NORMS)
def test_autocast_gives_norms_what_it_gives_torchs(norm: str) -> None:
    ours, torchs = (nn.Sequential(nn.Linear(8, 8), made(8), nn.Linear(8, 3)) for made in NORMS[norm])
    torchs.load_state_dict(ours.state_dict())
    x = normal(5, 8, dtype=torch.float32)
    for model in (ours, torchs):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=0.05, atol=0.03 * float(q.grad.abs().max())), name  # 8 bits


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("small", [0.0, 1e-40])
def test_weights_next_to_zero_keep_the_input_say_so_and_recover(norm: str, small: float) -> None:
    ours, torchs = (trained_(made(8)) for made in NORMS[norm])
    for change, copies in ((None, 0), (small, 1), (0.5, 1)):
        for module in (ours, torchs):
            module.zero_grad()
            if change is not None:
                with torch.no_grad():
                    module.weight[3] = change
        a, b = (normal(6, 8, seed=1, dtype=torch.float32).requires_grad_() for _ in range(2))
        dy = normal(6, 8, seed=2, dtype=torch.float32)
        assert torch.allclose(away(ours, dy, a), away(torchs, dy, b), atol=1e-5)
        assert torch.allclose(a.grad, b.grad, atol=1e-5)
        assert torch.allclose(ours.weight.grad, torchs.weight.grad, atol=1e-4)
        assert sum(ours.copies.values()) == copies
    assert "backward from the input: a weight is too small to invert" in str(ours.copies)


@pytest.mark.parametrize("norm", NORMS)
def test_weights_changed_through_data_are_seen_by_norms(norm: str) -> None:
    ours, torchs = (trained_(made(8, dtype=torch.float64)) for made in NORMS[norm])
    dy = normal(6, 8, seed=2)
    for weight in (0.5, 0.0):
        for module in (ours, torchs):
            module.zero_grad()
            module.weight.data[3] = weight
            away(module, dy, normal(6, 8, seed=1).requires_grad_())
        assert torch.allclose(ours.weight.grad, torchs.weight.grad, atol=1e-8)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)], ids=str)
def test_only_what_needs_a_gradient_gets_one(norm: str, wanted: tuple[int, int, int]) -> None:
    ours, torchs = (trained_(made(8, dtype=torch.float64)) for made in NORMS[norm])
    results = []
    for module in (ours, torchs):
        parameters = list(module.parameters())
        for p, need in zip(parameters, wanted[1:], strict=False):
            p.requires_grad_(bool(need))
        leaf = normal(6, 8, seed=1).requires_grad_(bool(wanted[0]))
        y = module(leaf * 1)
        if not y.requires_grad:
            pytest.skip("nothing needs one")
        (y * normal(6, 8, seed=2)).sum().backward()
        results.append([leaf.grad, *(p.grad for p in parameters)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("zero", [False, True], ids=["from the output", "from the input"])
def test_norms_take_inputs_and_gradients_of_any_strides(norm: str, zero: bool) -> None:
    ours, torchs = (trained_(made(8, dtype=torch.float64)) for made in NORMS[norm])
    if zero:
        for module in (ours, torchs):
            nn.init.zeros_(module.weight)
    wide, dy = normal(5, 6, 16, seed=1), normal(8, 6, 5, seed=2).permute(2, 1, 0)
    one = torch.ones((), dtype=torch.float64)
    for layout in (
        lambda t: t[..., ::2],
        lambda t: t.transpose(0, 1)[..., :8],
        lambda t: t[:, :1, :8].expand(-1, 6, -1),
    ):
        leaves = []
        for module in (ours, torchs):
            module.zero_grad()
            leaf = wide.clone().requires_grad_()
            x = layout(leaf * 1)
            gradient = dy if x.shape == dy.shape else one.expand(x.shape)
            module(x).backward(gradient)
            leaves.append([leaf.grad, module.weight.grad])
        for a, b in zip(*leaves, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)
    assert one == 1


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_norms_of_nothing_have_zero_gradients(norm: str, shape: tuple[int, ...], affine: bool) -> None:
    module = NORMS[norm][0](8, elementwise_affine=affine)
    leaf = torch.zeros(shape, requires_grad=True)
    y = module(leaf * 1)
    assert y.shape == shape
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == shape
    assert all(p.grad.tolist() == [0] * 8 for p in module.parameters())


@pytest.mark.parametrize("norm", NORMS)
def test_norms_refuse_another_shape_and_quote_it(norm: str) -> None:
    module = NORMS[norm][0]((3, 4))
    for shape in ((2, 3, 5), (4,), (2, 12)):
        with pytest.raises((ValueError, RuntimeError), match=r"3, 4.*"):
            module(torch.randn(shape))


@pytest.mark.parametrize("norm", NORMS)
def test_norms_leave_their_input_alone(norm: str) -> None:
    """It is the residual stream."""
    module = NORMS[norm][0](8)
    x = torch.randn(5, 8, requires_grad=True) * 1
    before = x.detach().clone()
    (module(x) + x).square().sum().backward()
    assert torch.equal(x, before)
    assert module.copies == {}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("length", [4, 16])
def test_norms_refuse_weights_of_another_shape(norm: str, length: int) -> None:
    """The kernels read as many elements as a row has."""
    module = NORMS[norm][0](8)
    module.weight = nn.Parameter(torch.ones(length))
    with pytest.raises((ValueError, RuntimeError)):
        module(torch.randn(3, 8))


@pytest.mark.parametrize("norm", NORMS)
def test_norms_take_strided_weights(norm: str) -> None:
    ours, torchs = (made(8, dtype=torch.float64) for made in NORMS[norm])
    ours.weight = nn.Parameter(normal(16, seed=3)[::2])
    torchs.weight = nn.Parameter(ours.weight.detach().clone(memory_format=torch.contiguous_format))
    assert not ours.weight.is_contiguous()
    a, b = (normal(5, 8, seed=1).requires_grad_() for _ in range(2))
    dy = normal(5, 8, seed=2)
    assert torch.allclose(away(ours, dy, a), away(torchs, dy, b), rtol=1e-11, atol=1e-11)
    assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-10)
    assert torch.allclose(ours.weight.grad, torchs.weight.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_inputs_that_are_not_floating_raise_with_their_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(4, 8, dtype=dtype)
    activations = (SwiGLU(), GELU()) if dtype == torch.int64 else ()  # torch has a complex silu
    for layer in (InPlaceLayerNorm(8), InPlaceRMSNorm(8), *activations):
        with pytest.raises((TypeError, RuntimeError), match=r"type|Long|floating|got torch\."):
            layer(x)


WITHOUT_VALUES = """
import torch, takeback.nn as n
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode() as mode:
    fake = torch.empty(4, 8)
meta, made = torch.empty(4, 8, device="meta"), {"device": "meta"}
for name, run, shape in (
    ("swiglu", lambda: n.swiglu(meta), (4, 4)),
    ("gelu", lambda: n.gelu(meta), (4, 8)),
    ("InPlaceABN", lambda: n.InPlaceABN(8, **made)(meta), (4, 8)),
    ("InPlaceABN, relu", lambda: n.InPlaceABN(8, activation="relu", **made)(meta), (4, 8)),
    ("InPlaceABN, no affine", lambda: n.InPlaceABN(8, affine=False, **made)(meta), (4, 8)),
    ("InPlaceLayerNorm", lambda: n.InPlaceLayerNorm(8, **made)(meta), (4, 8)),
    ("InPlaceRMSNorm", lambda: n.InPlaceRMSNorm(8, **made)(meta), (4, 8)),
    ("InPlaceRMSNorm, no affine", lambda: n.InPlaceRMSNorm(8, elementwise_affine=False, **made)(meta), (4, 8)),
    ("fake swiglu", lambda: n.swiglu(fake), (4, 4)),
    ("fake inplace_abn", lambda: n.inplace_abn(fake, None, None, None, None), (4, 8)),
    ("no channels", lambda: n.InPlaceABN(0)(torch.ones(4, 0)), (4, 0)),
    ("no channels, eval", lambda: n.InPlaceABN(0).eval()(torch.ones(4, 0)), (4, 0)),
):
    print(name, flush=True)
    assert run().shape == shape
print("done")
"""


def test_tensors_without_values_have_shapes() -> None:
    """In a process of its own: a kernel that is given their addresses ends it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_VALUES], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[-2:] == ["done", ""], (
        f"{done.returncode} at {done.stdout[-60:]}: {done.stderr[-600:]}"
    )


# -- what is overwritten, and why not ----------------------------------------------------------------------------------

LAYERS: dict[str, Callable[[], Any]] = {
    "layer": lambda: InPlaceLayerNorm(8),
    "rms": lambda: InPlaceRMSNorm(8),
    "SwiGLU": SwiGLU,
    "GELU": GELU,
}


@pytest.mark.parametrize("name", LAYERS)
def test_copies_says_why(name: str) -> None:
    def loss(module: Any) -> Tensor:
        return module(torch.randn(5, 8, requires_grad=True) * 1).sum()

    def held(module: Any) -> None:
        x = torch.randn(5, 8, requires_grad=True) * 1
        y = module(x)
        y.sum().backward()
        assert x is not y

    def kept(module: Any) -> None:
        loss(module).backward(retain_graph=True)

    def created(module: Any) -> None:
        x = torch.randn(5, 8, requires_grad=True)
        torch.autograd.grad(module(x * 1).sum(), x, create_graph=True)

    def checkpointed(module: Any) -> None:
        leaf = torch.randn(5, 8, requires_grad=True)
        checkpoint(lambda x: module(x * 1), leaf, use_reentrant=False).sum().backward()

    for run, reason in ((held, owner.HELD), (kept, owner.KEPT), (created, owner.KEPT), (checkpointed, owner.HOOKED)):
        module = LAYERS[name]()
        run(module)
        assert list(module.copies) == [reason]
    loss(module := LAYERS[name]()).backward()
    assert module.copies == {}


@pytest.mark.parametrize("turned", ["gate", "up"])
def test_swiglu_of_a_strided_input_says_why_and_is_right(turned: str) -> None:
    leaves = [normal(*((8, 5) if turned == name else (5, 8)), seed=1).requires_grad_() for name in ("gate", "up")]
    module, dy = SwiGLU(), normal(5, 8, seed=2)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        # A product keeps the strides of its operand, and is no view.
        return torch.autograd.grad(function(*(x.t() * 1 if x.shape == (8, 5) else x * 1 for x in leaves)), leaves, dy)

    for found, expected in zip(gradients(module), gradients(lambda g, u: F.silu(g) * u), strict=True):
        torch.testing.assert_close(found, expected)
    assert list(module.copies) == ["a kept input is not contiguous"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_backward_is_right_or_raises(name: str) -> None:
    module = LAYERS[name]()
    leaf = normal(5, 8, dtype=torch.float32).requires_grad_()
    loss = module(leaf * 1).square().sum()
    loss.backward(retain_graph=True)
    first, leaf.grad = leaf.grad.clone(), None
    loss.backward()
    assert torch.equal(leaf.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("name", LAYERS)
def test_layers_survive_copying_and_pickling(name: str) -> None:
    module = LAYERS[name]()
    module(torch.randn(5, 8, requires_grad=True) * 1).sum().backward()
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        x = normal(5, 8, dtype=torch.float32)
        assert torch.equal(clone(x), module(x))
        clone(x.requires_grad_() * 1).sum().backward()
        assert clone.copies == {}


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_outputs_of_norms_changed_in_place_raise_at_backward(name: str) -> None:
    y = LAYERS[name]()(torch.randn(5, 8, requires_grad=True) * 1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["SwiGLU", "GELU"])
def test_inputs_of_activations_changed_in_place_raise_at_backward(name: str) -> None:
    x = torch.randn(5, 8, requires_grad=True) * 1
    y = LAYERS[name]()(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


def plain_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 34), (8,), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("one", [True, False], ids=["one argument", "two"])
def test_swiglu_is_float64s_to_rounding_and_overwrites(one: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaves = [(3 * normal(*shape, seed=i)).to(dtype).requires_grad_() for i in range(1 if one else 2)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    expected = plain_swiglu(*doubles)
    dy = normal(*expected.shape, seed=5, dtype=dtype)
    expected.backward(dy.double())
    module = SwiGLU()
    out = away(module, dy, *leaves)
    assert module.copies == {}
    store = torch.finfo(dtype).eps
    few = FEW * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert_near("y", out, expected.detach(), (store + few) * expected.detach().abs() + torch.finfo(dtype).tiny * store)
    for leaf, double in zip(leaves, doubles, strict=True):
        # silu' = sigmoid * (1 + g * (1 - sigmoid)) cancels around its zero, where the terms are of dy * up's size
        halves = leaf.detach().double().chunk(2, -1) if one else [t.detach().double() for t in leaves]
        terms = dy.double().abs() * (halves[1].abs() + plain_swiglu(halves[0], torch.ones_like(halves[0])).abs())
        terms = torch.cat((terms, terms), -1) if one else terms
        assert_near(
            "dx", leaf.grad, double.grad, store * double.grad.abs() + few * terms + torch.finfo(dtype).tiny * store
        )


@pytest.mark.parametrize("function", [swiglu, SwiGLU()], ids=["function", "module"])
def test_gradcheck_of_swiglu(function: Any) -> None:
    inputs = normal(3, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: function(a * 1, b * 1), inputs)
    assert torch.autograd.gradcheck(lambda a: function(a * 1), inputs[:1])


@pytest.mark.parametrize(
    ("gate", "up"),
    [((3, 4), (4,)), ((4,), (3, 4)), ((3, 1), (3, 4)), ((2, 1, 4), (3, 1)), ((), (3,)), ((), ())],
    ids=str,
)
def test_swiglu_broadcasts_as_torch_does(gate: tuple[int, ...], up: tuple[int, ...]) -> None:
    results = []
    for function in (swiglu, plain_swiglu):
        a, b = normal(*gate, seed=1).requires_grad_(), normal(*up, seed=2).requires_grad_()
        y = function(a * 1, b * 1)
        results.append([y, *torch.autograd.grad(y.square().sum(), (a, b))])
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-12)


def whole_chunks(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.chunk(2, -1)  # type: ignore[return-value]


def same_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def overlapping(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :5], x[..., 3:]


def rows_apart(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2], x[2:4]


def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t() * 1, x.t() + 1


def expanded(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:1].expand(4, -1), x[1:2].expand(4, -1)


def strided(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, ::2], x[:, 1::2]


@pytest.mark.parametrize(
    "split",
    [whole_chunks, same_twice, overlapping, rows_apart, transposed, expanded, strided],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("kept", [True, False], ids=["kept graph", "consumed"])
def test_swiglu_of_tensors_that_share_storage_or_have_strides(split: Any, kept: bool) -> None:
    results = []
    for function in (swiglu, plain_swiglu):
        leaf = normal(4, 8, seed=1).requires_grad_()
        y = function(*split(leaf * 1))
        loss = (y * normal(*y.shape, seed=2)).sum()
        del y
        loss.backward(retain_graph=kept)
        results.append(leaf.grad)
    assert torch.allclose(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1])
def test_swiglu_with_one_input_that_needs_no_gradient_leaves_the_callers_alone(which: int) -> None:
    inputs = [normal(3, 4, seed=i) for i in range(2)]
    before = [t.clone() for t in inputs]
    inputs[which].requires_grad_()
    swiglu(*inputs).sum().backward()
    assert inputs[1 - which].grad is None
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    expected = [t.clone().requires_grad_(i == which) for i, t in enumerate(before)]
    plain_swiglu(*expected).sum().backward()
    assert torch.allclose(inputs[which].grad, expected[which].grad, rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4)], ids=str)
def test_swiglu_of_nothing(shape: tuple[int, ...]) -> None:
    for arguments in (1, 2):
        leaves = [torch.zeros(shape, requires_grad=True) for _ in range(arguments)]
        y = swiglu(*(t * 1 for t in leaves))
        y.sum().backward()
        assert y.shape == (*shape[:-1], shape[-1] // (3 - arguments))
        assert all(t.grad is not None and t.grad.shape == shape for t in leaves)


def test_swiglu_of_one_odd_tensor_raises_and_quotes_its_shape() -> None:
    for bad in (torch.randn(3, 5), torch.randn(())):
        with pytest.raises(ValueError, match=r"even last dimension"):
            swiglu(bad)


def test_swiglu_mixes_dtypes_as_torch_does() -> None:
    gate, up = normal(3, 4, dtype=torch.bfloat16), normal(3, 4, dtype=torch.float32)
    assert swiglu(gate, up).dtype == (F.silu(gate) * up).dtype == torch.float32


def test_swiglu_of_a_large_gate_has_no_nan() -> None:
    gate = torch.tensor([-1e4, -100.0, -90.0, 0.0, 90.0, 1e4, float("inf")], requires_grad=True)
    up = torch.ones(7, requires_grad=True)
    expected = F.silu(gate.detach())
    y = swiglu(gate * 1, up * 1)
    assert torch.allclose(y, expected, atol=1e-30, equal_nan=True)
    y[:-1].sum().backward()
    assert torch.isfinite(gate.grad[:-1]).all()
    assert torch.isfinite(up.grad[:-1]).all()


# -- GELU --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(3, 8), (5, 7, 3), (64, 257), (0, 4), ()], ids=str)
def test_gelu_has_torchs_bits(approximate: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    module, torchs = GELU(approximate), nn.GELU(approximate)
    a, b, c = ((4 * normal(*shape, seed=1)).to(dtype).requires_grad_() for _ in range(3))
    dy = normal(*shape, seed=2, dtype=dtype)
    out, expected = away(module, dy, a), away(torchs, dy, b)
    assert torch.equal(out, expected)
    assert torch.equal(a.grad, b.grad)
    assert module.copies == {}
    away(lambda x: gelu(x, approximate), dy, c)
    assert torch.equal(c.grad, b.grad)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t[..., ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t[:1].expand(6, -1),
        lambda t: t.transpose(0, 1) * 1,
        lambda t: t.as_strided((5, 4), (2, 1)),
    ],
    ids=["sliced", "transposed", "expanded", "dense, transposed", "overlapping"],
)
def test_gelu_takes_any_strides(approximate: str, layout: Callable[[Tensor], Tensor]) -> None:
    results = []
    for function in (gelu, F.gelu):
        leaf = normal(6, 8, seed=1, dtype=torch.float32).requires_grad_()
        y = function(layout(leaf * 1), approximate=approximate)
        loss = (y * normal(*y.shape, seed=2, dtype=torch.float32)).sum()
        del y
        loss.backward()
        results.append(leaf.grad)
    assert torch.allclose(*results, rtol=1e-6, atol=1e-7)


def test_gelu_is_torchs_module() -> None:
    assert isinstance(GELU(), nn.GELU)
    assert repr(GELU("tanh")) == repr(nn.GELU("tanh"))
    assert list(GELU().state_dict()) == []
    with pytest.raises(RuntimeError, match="approximate"):
        GELU("cubic")(torch.randn(3))


# -- torch.func and compiled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "hessian"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_torch_func_is_right_or_says_that_there_is_no_rule(name: str, transform: str) -> None:
    ours = LAYERS[name]().double()
    torchs = {"layer": nn.LayerNorm(8), "rms": nn.RMSNorm(8), "SwiGLU": plain_swiglu, "GELU": nn.GELU()}[name]
    torchs = torchs.double() if isinstance(torchs, nn.Module) else torchs
    x = normal(3, 8)

    def run(layer: Any) -> Any:
        def loss(x: Tensor) -> Tensor:
            return layer(x * 1).square().sum()

        if transform == "vmap":
            return torch.func.vmap(loss)(x[None])
        if transform == "jvp":
            return torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]
        return getattr(torch.func, transform)(loss)(x)

    expected = run(torchs)
    try:
        got = run(ours)
    except (RuntimeError, NotImplementedError) as error:
        assert re.search("functorch|vmap|forward|jvp", str(error)), error  # noqa: PT017
        return
    assert torch.allclose(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_layers_compile_into_one_graph(name: str) -> None:
    torch._dynamo.reset()
    module = LAYERS[name]()
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    a, b = (normal(5, 8, dtype=torch.float32).requires_grad_() for _ in range(2))
    (compiled(a) * 2).sum().backward()
    (twin(b * 1) * 2).sum().backward()
    assert torch.allclose(a.grad, b.grad, atol=1e-6)
    torch._dynamo.reset()
