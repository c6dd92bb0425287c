"""Of what torch computes another way while it is recorded: gradients of extremes, which have eager's bits, and second
gradients, which are refused by name where they have not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import Case, sgd, train_both
from takeback.compiler.capture.eager_products import running_products_differ

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels"),
    pytest.mark.filterwarnings("ignore:takeback made"),
]

Reduce = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 2.0, -1.0, 0.3, 0.25, 0.5, -0.1]))
        self.c = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


SCALES = (
    1.0,
    2.0,
    1.0,
    0.5,
    -1.0,
    -2.0,
    0.0,
    -0.0,
    torch.inf,
)  #: the first steps, in which plans are compared, hide it


def draw(i: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(7, 6, generator=g), torch.randint(5, (7,), generator=g), torch.tensor(SCALES[i])


def scaled(reduce: Reduce) -> Callable[..., Tensor]:
    def loss_fn(model: Model, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + reduce(model.w) * scale

    return loss_fn


def in_vmap(w: Tensor) -> Tensor:
    return torch.func.vmap(lambda one: one * w.max())(torch.ones(2)).sum()


def _least(w: Tensor) -> Tensor:
    return w.min()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is on its way out, and still there
    scripted = torch.jit.script(_least)


EXTREMES: dict[str, Reduce] = {
    "max": lambda w: w.max(),
    "torch.max": lambda w: torch.max(w),
    "min": lambda w: w.min(),
    "median": lambda w: w.median(),
    "nanmedian": lambda w: w.nanmedian(),
    "of a transposed one": lambda w: (w.view(3, 3).t() * 2).max(),
    "of a number": lambda w: w[2].max(),
    "of NaN": lambda w: torch.where(w > 1, w * torch.nan, w).max().nan_to_num(1.0),
    "in vmap": in_vmap,
    "in a script": lambda w: scripted(w),
}


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("name", EXTREMES)
def test_gradient_of_an_extreme_has_eagers_bits(name: str, memory: str) -> None:
    case = Case(Model, scaled(EXTREMES[name]), draw, sgd)
    train_both(case, steps=len(SCALES), memory=memory, poison=True)


@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
def test_extreme_that_is_subtracted_is_not_refused_in_vain(name: str) -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) - EXTREMES[name](model.w)

    train_both(Case(Model, loss_fn, draw, sgd), steps=5)


class _Hiding(torch.autograd.graph.saved_tensors_hooks):
    """Computes what looks like the share, while autograd waits for what a node has saved."""

    def __init__(self) -> None:
        super().__init__(lambda t: t, self.unpack)

    @staticmethod
    def unpack(saved: Tensor) -> Tensor:
        return saved + (saved > 1) * saved.sum().neg() * 0  # -0.0 where it is not: x + -0.0 is x, -0.0 + 0.0 is not


def test_product_of_the_users_own_inside_of_the_node_is_left_alone() -> None:
    def hidden(w: Tensor) -> Tensor:
        with _Hiding():
            return (w * 2).max()

    step = train_both(Case(Model, scaled(hidden), draw, sgd), steps=5)
    names = [op.name for op in step._last.original.ops]  # type: ignore[union-attr]
    assert names.count("masked_fill_.Tensor") + names.count("masked_fill_") == 1


def penalty(reduce: Reduce) -> Callable[..., Tensor]:
    def loss_fn(model: Model, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(reduce(model.w).square(), model.w, create_graph=True)
        return F.cross_entropy(model(x), y) + grad.square().sum()

    return loss_fn


SECOND: dict[str, tuple[Reduce, str]] = {
    "max": (EXTREMES["max"], r"gradient of max\(\).*create_graph=True.*Call x.amax\(\)"),
    "nanmedian": (EXTREMES["nanmedian"], r"nanmedian\(\) over a whole tensor, with create_graph=True"),
    "cumprod": (lambda w: w.cumprod(0).sum(), r"gradient of this cumprod.*Multiply step by step"),
    "vander": (lambda w: torch.linalg.vander(w[:3]).sum(), r"gradient of this cumprod.*inside of another function"),
    "det": (lambda w: w.view(3, 3).det(), r"determinant with create_graph=True.*Use torch.linalg.slogdet"),
}


def refused(loss_fn: Callable[..., Any], message: str) -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tb.CaptureError, match=message):
        step(*draw(0))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


OLDER = running_products_differ()  # of torch, before 2.13


@pytest.mark.parametrize("name", [name for name in SECOND if not (OLDER and name == "cumprod")])  # it has a form there
def test_second_gradient_that_is_not_eagers_is_refused(name: str) -> None:
    refused(penalty(SECOND[name][0]), SECOND[name][1])


@pytest.mark.parametrize("name", [name for name in SECOND if name not in EXTREMES and not (OLDER and name == "vander")])
def test_first_gradient_of_these_has_eagers_bits(name: str) -> None:
    train_both(Case(Model, scaled(SECOND[name][0]), draw, sgd), steps=5)


WAYS_OUT: dict[str, Reduce] = {
    "amax": lambda w: w.amax(),
    "median": lambda w: w.flatten().median(0).values,
    "slogdet": lambda w: w.view(3, 3).slogdet().logabsdet,
    "product": lambda w: w.view(3, 3).prod(0).sum(),
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_second_gradient_of_a_way_out_has_eagers_bits(name: str) -> None:
    train_both(Case(Model, penalty(WAYS_OUT[name]), draw, sgd), steps=5)


def test_gradient_in_a_second_forward_is_not_taken_for_a_second_gradient() -> None:
    """A checkpoint computes with gradients enabled while a node of another kind waits for what it has saved."""

    def twice(w: Tensor) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(lambda w: ((w == 0) * 0.1 + w).cumprod(0), w, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out.sum()

    train_both(Case(Model, scaled(twice), draw, sgd), steps=5)


def test_running_product_of_complex_numbers_is_refused_where_there_are_zeros() -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        rows = model.c * (torch.arange(3) != 1)
        return F.cross_entropy(model(x), y) + rows.cumprod(1).abs().sum()

    refused(loss_fn, r"gradient of cumprod \(of complex numbers\).*zeros.*Keep zeros out of it")


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_pseudo_inverse_of_complex_numbers_has_eagers_bits(memory: str) -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + torch.linalg.pinv(model.c).abs().sum() * 0.01

    train_both(Case(Model, loss_fn, draw, sgd), steps=5, memory=memory)
