"""Gradients of products, which torch computes another way while they are recorded, have eager's bits or are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from form_cases import Model, Pick, case, draw, loss_of
from torch import Tensor

import takeback as tb
from harness import Case, sgd, train_both
from takeback.compiler.capture import eager_products, looked_on

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels"),
    pytest.mark.filterwarnings("ignore:takeback made"),
]

#: Zeros among the factors, and second gradients, take that of a running product, which torch 2.11 computes otherwise.
by_running_products = pytest.mark.skipif(
    eager_products.running_products_differ(), reason="refused by name in this version of torch"
)


def whole(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).prod()


def of_rows(model: Model, h: Tensor) -> Tensor:
    return h * torch.prod(1 + 0.1 * h, 1, keepdim=True)


def of_columns(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).prod(dim=0)


def of_a_transposed_one(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).t().prod() * (1 + 0.1 * h).t().prod(1)


def in_double(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).prod(-1, True, dtype=torch.float64).float()


def of_one(model: Model, h: Tensor) -> Tensor:
    return h * (1 + h[:, :1]).prod(1, keepdim=True)


def masked(model: Model, h: Tensor) -> Tensor:
    return h * torch.masked.prod(1 + 0.1 * h, 1, keepdim=True, mask=h > 0)


def in_a_checkpoint(model: Model, h: Tensor) -> Tensor:
    out = torch.utils.checkpoint.checkpoint(lambda h: of_rows(model, h.sin()), h, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


def complex_one(model: Model, h: Tensor) -> Tensor:
    return h * torch.complex(1 + 0.1 * h, 0.1 * h).prod(1, keepdim=True).abs()


def of_none(model: Model, h: Tensor) -> Tensor:
    return h * h[:, :0].prod(1, keepdim=True)


def of_a_number(model: Model, h: Tensor) -> Tensor:
    return h * model.value.prod() * model.value.prod(0)


def running(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).cumprod(1) * torch.cumprod(1 + 0.1 * h, dim=0)


def running_in_double(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).t().cumprod(-1, dtype=torch.float64).t().float()


def of_an_axis(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).prod(axis=1, keepdims=True) * model.gain.prod(axis=0)


def of_a_numpy_dim(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).prod(np.int64(1), keepdim=True)


def of_aten(model: Model, h: Tensor) -> Tensor:
    return h * torch.ops.aten.prod(model.gain) * torch.ops.aten.prod.dim_int(1 + 0.1 * h, 1, True)


def of_an_x(model: Model, h: Tensor) -> Tensor:
    return h * torch.prod(x=1 + 0.1 * h, dim=1, keepdim=True) * torch.prod(input=model.gain)


def whole_in_double(model: Model, h: Tensor) -> Tensor:
    return h * (1 + 0.1 * h).prod(dtype=torch.float64).float()


def complex_one_with_a_zero(model: Model, h: Tensor) -> Tensor:
    rows = torch.complex(1 + 0.1 * h, 0.1 * h) * (torch.arange(8) != 3)
    whole = torch.complex(model.gain, 1 - model.gain) * (torch.arange(8) != 5)
    return h * (1 + rows.prod(1, keepdim=True).abs() + rows.prod(0).abs() + whole.prod().real)


PRODUCTS = (
    of_an_axis,
    of_a_numpy_dim,
    of_aten,
    of_an_x,
    whole_in_double,
    complex_one_with_a_zero,
    running,
    running_in_double,
    whole,
    of_rows,
    of_columns,
    of_a_transposed_one,
    in_double,
    of_one,
    masked,
    in_a_checkpoint,
    complex_one,
    of_none,
    of_a_number,
)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("pick", PRODUCTS, ids=lambda f: f.__name__)
def test_gradient_of_a_product_has_eagers_bits(pick: Pick, memory: str) -> None:
    train_both(case(pick), steps=6, memory=memory, poison=True)


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_product_without_a_gradient_gives_none() -> None:
    def stopped(model: Model, h: Tensor) -> Tensor:
        whole, rows = model.gain.prod(), torch.complex(model.gain, model.gain).cumprod(0)
        return h * _Stop.apply(whole) * _Stop.apply(rows).abs()

    train_both(case(stopped), steps=5)  # which finds a .grad that is on one side only


@by_running_products
@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("zeros", [1, 2])
@pytest.mark.parametrize("penalty", [False, True])
def test_zeros_among_other_factors_have_eagers_bits(zeros: int, penalty: bool, memory: str) -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        whole = -(model.gain - model.gain.detach() * (torch.arange(8) < zeros)).prod()  # zeros, which are trained
        if penalty:
            (grad,) = torch.autograd.grad(whole, model.gain, create_graph=True)
            whole = (grad * torch.arange(1.0, 9.0)).sum() + whole
        return F.cross_entropy(model(x), y) + whole

    train_both(case(lambda m, h: h, loss_fn), steps=5, memory=memory)


def _rows(h: Tensor) -> Tensor:
    return h.prod(1, keepdim=True)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is on its way out, and still there
    scripted = torch.jit.script(_rows)


def in_vmap(model: Model, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row * (1 + 0.1 * row).prod())(h)


def closed_over_in_vmap(model: Model, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row * model.gain.prod())(h)


def in_a_script(model: Model, h: Tensor) -> Tensor:
    return h * scripted(1 + 0.1 * h)


def unseen(model: Model, h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h * model.gain.prod()


def unseen_ones_of_one(model: Model, h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h * (1 + h[:, :1]).prod(1, keepdim=True)


@pytest.mark.parametrize("pick", [in_vmap, closed_over_in_vmap, in_a_script, unseen, unseen_ones_of_one])
def test_product_that_is_not_seen_is_refused(pick: Pick) -> None:
    model = Model(pick)
    before = copy.deepcopy(model.state_dict())
    step = tb.compile_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tb.CaptureError, match=r"gradient of a product.*in (unseen|in_|closed|<lambda>).*Call torch"):
        step(*draw(0))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_product_that_is_not_seen_and_trivial_is_not_refused() -> None:
    def trivial(model: Model, h: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return h * model.value.prod() * h[:, :0].prod(1, keepdim=True)

    train_both(case(trivial), steps=4)


def zeroed(count: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of which every third has so many zeros in its first row."""

    def batch(i: int) -> tuple[Tensor, Tensor]:
        x, y = draw(i)
        if i % 3 == 2:
            x[0, :count] = 0
        return x, y

    return batch


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dim", [None, 1])
def test_zeros_that_come_and_go_take_eagers_way(count: int, dim: int | None) -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        x = (x * model.value).float()
        return F.cross_entropy(model(x) * (x.prod() if dim is None else x.prod(dim, keepdim=True)), y)

    train_both(Case(lambda: Model(lambda m, h: h), loss_fn, zeroed(count), sgd), steps=9, plans=2)


@by_running_products
@pytest.mark.parametrize("count", [0, 1, 2])
def test_gradient_of_a_gradient_of_a_product_has_eagers_bits(count: int) -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        x[0, :count] = 0
        loss = F.cross_entropy(model(x * 1), y) * (x * model.value).prod()
        (grad,) = torch.autograd.grad(loss, model.value, create_graph=True)
        return loss + grad.square()

    def unwritten(model: Model, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model, x.clone(), y)

    train_both(case(lambda m, h: h, unwritten), steps=5)


def test_product_under_autocast_has_eagers_bits() -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    train_both(case(of_rows, loss_fn), steps=5)


def test_product_that_torch_refuses_is_refused_by_torch() -> None:
    def wrong(model: Model, h: Tensor) -> Tensor:
        return h * h.prod(7)

    model = Model(wrong)
    step = tb.compile_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(IndexError, match="Dimension out of range"):
        step(*draw(0))


def as_in_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (eager_products, looked_on):
        monkeypatch.setattr(module, "running_products_differ", lambda: True)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradient_of_a_running_product_is_one(dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_torch_2_11(monkeypatch)
    x = torch.rand(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)).add(0.5).requires_grad_()
    with eager_products.EagerProducts():
        out = x.cumprod(dim)
        assert type(out.grad_fn).__name__ == "_RunningProductBackward"
        assert torch.autograd.gradcheck(lambda x: x.cumprod(dim), x)
        assert torch.autograd.gradgradcheck(lambda x: x.cumprod(dim), x)


@pytest.mark.parametrize("kind", ["zeros", "vander", "in place"])
def test_running_product_whose_way_is_not_known_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Model, h: Tensor) -> Tensor:
        if kind == "zeros":
            return h + (h * (h > 0)).cumprod(1)
        return h + (torch.linalg.vander(h[0], N=8)[:7] if kind == "vander" else (h * 1).cumprod_(1))

    as_in_torch_2_11(monkeypatch)
    model = Model(run)
    before = copy.deepcopy(model.state_dict())
    step = tb.compile_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tb.CaptureError, match=r"cumprod.*torch 2.13"):
        step(*draw(0))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
