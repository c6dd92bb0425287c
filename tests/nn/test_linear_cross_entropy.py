"""Linear + cross-entropy in chunks: float64's gradients to rounding, no logits, no work that nobody wants."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import takeback as tb
from takeback.nn.functional import linear_cross_entropy
from takeback.nn.loss_rows import chunk_rows

ROWS, COLUMNS, CLASSES = 60, 24, 101


class Watch(TorchDispatchMode):
    """Counts products, and the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            self.products.append(name)
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        return result


def inputs(dtype: torch.dtype, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, ROWS // 3, COLUMNS), torch.randn(CLASSES, COLUMNS) * 0.3
    targets = torch.randint(CLASSES, (3, ROWS // 3))
    targets[0, :7] = -100
    given = hidden.to(dtype), weight.to(dtype), torch.randn(CLASSES).to(dtype) if bias else None
    return *given, targets


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
    """What it stands for, with all logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    if cap := how.pop("softcap", None):
        logits = torch.tanh(logits / cap) * cap
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **how)


def run(loss: Callable[..., Tensor], dtype: torch.dtype, of: Any, by: float = 0.37, **how: Any) -> list[Tensor]:
    hidden, weight, bias, targets = of
    leaves = [None if each is None else each.to(dtype, copy=True).requires_grad_() for each in (hidden, weight, bias)]
    result = loss(leaves[0], leaves[1], targets, leaves[2], **how)
    (result * by).backward()
    return [result.detach(), *(each.grad for each in leaves if each is not None)]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


SETTINGS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"softcap": 5.0},
    {"softcap": 5.0, "label_smoothing": 0.2, "reduction": "sum"},
    {"ignore_index": 3},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
def test_gradients_are_no_further_from_float64s_than_twice_those_of_the_whole_logits(dtype: torch.dtype) -> None:
    for how, bias, rows in itertools.product(SETTINGS, (True, False), (None, 7)):
        *tensors, targets = inputs(dtype, bias)
        given = (*tensors, torch.where(targets == -100, how.get("ignore_index", -100), targets))
        exact = run(whole, torch.float64, given, **how)
        torchs = run(whole, dtype, given, **how)
        ours = run(linear_cross_entropy, dtype, given, rows=rows, **how)
        for name, e, t, o in zip(("loss", "hidden", "weight", "bias"), exact, torchs, ours, strict=False):
            assert o.dtype == t.dtype
            floor = 1e-6 if name == "loss" else torch.finfo(dtype).eps
            assert distance(o, e) <= max(2 * distance(t, e), floor), (name, how, bias, rows)


def test_a_weight_gradient_of_many_chunks_is_accumulated_wider_than_bfloat16() -> None:
    torch.manual_seed(0)
    given = torch.randn(512, 8).bfloat16(), torch.randn(9, 8).bfloat16(), None, torch.randint(9, (512,))
    exact, torchs = (run(whole, dtype, given)[2] for dtype in (torch.float64, torch.bfloat16))
    ours = run(linear_cross_entropy, torch.bfloat16, given, rows=8)[2]
    assert distance(ours, exact) <= 1.1 * distance(torchs, exact)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "nothing", "everything", "no_grad"])
def test_nothing_is_computed_for_what_needs_no_gradient_and_logits_are_never_whole(frozen: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 4), torch.randn(50, 4)
    hidden.requires_grad_(frozen not in ("hidden", "everything"))
    weight.requires_grad_(frozen not in ("weight", "everything"))
    targets = torch.randint(50, (64,))
    with Watch() as watch, torch.set_grad_enabled(frozen != "no_grad"):
        loss = linear_cross_entropy(hidden, weight, targets, rows=16)
        if loss.requires_grad:
            loss.backward()
    assert len(watch.products) == 4 * {"nothing": 3, "hidden": 2, "weight": 2}.get(frozen, 1)
    assert watch.largest < 64 * 50 / 2
    assert (hidden.grad is None) == (frozen in ("hidden", "everything", "no_grad"))
    torch.testing.assert_close(loss, whole(hidden, weight, targets, None))


def test_ignored_rows_have_no_influence_whatever_they_hold() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    clean = run(linear_cross_entropy, torch.float32, (hidden, weight, bias, targets))
    hidden = hidden.clone()
    hidden[0, :3], hidden[0, 3:7] = float("nan"), float("inf")
    ruined = run(linear_cross_entropy, torch.float32, (hidden, weight, bias, targets))
    assert all(map(torch.equal, clean, ruined))
    assert bool((clean[1][0, :7] == 0).all())


def test_all_rows_ignored_is_nan_as_in_torch_and_zero_as_a_sum() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    targets = torch.full_like(targets, -100)
    assert bool(linear_cross_entropy(hidden, weight, targets).isnan())
    assert float(linear_cross_entropy(hidden, weight, targets, reduction="sum")) == 0
    assert float(linear_cross_entropy(hidden[:0], weight, targets[:0], reduction="sum")) == 0


def test_num_items_divides_the_sum() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    total = linear_cross_entropy(hidden, weight, targets, bias, reduction="sum")
    for number in (17, 17.0, torch.tensor(17)):
        assert torch.equal(linear_cross_entropy(hidden, weight, targets, bias, num_items=number), total / 17)


def test_a_kept_graph_gives_the_same_gradients_again_and_a_second_derivative_raises() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss * 2, weight, retain_graph=True)
    torch.testing.assert_close(second, 2 * first)
    (created,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.equal(created, first)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        created.sum().backward()


def test_one_weight_used_twice_and_tied_to_an_embedding_gets_both_gradients() -> None:
    torch.manual_seed(0)
    ids = torch.randint(20, (30,))

    def grads(loss: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(1)
        table = torch.randn(20, 8, requires_grad=True)
        hidden = F.embedding(ids, table)
        (loss(hidden, table, ids, None) + 0.5 * loss(hidden.tanh(), table, ids.flip(0), None)).backward()
        assert table.grad is not None
        return table.grad

    torch.testing.assert_close(grads(linear_cross_entropy), grads(whole))


def test_under_autocast_products_are_narrow_and_the_float32_weight_gets_a_float32_gradient() -> None:
    given = inputs(torch.float32)
    exact = run(whole, torch.float64, given)
    with torch.autocast("cpu", torch.bfloat16):
        torchs, ours = (run(loss, torch.float32, given) for loss in (whole, linear_cross_entropy))
    for e, t, o in zip(exact, torchs, ours, strict=True):
        assert o.dtype == torch.float32
        assert distance(o, e) <= 2 * distance(t, e)
        assert distance(o, e) > 1e-5  # it did use bfloat16


def test_torch_func_takes_torchs_operators() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    ours = torch.func.grad(lambda w: linear_cross_entropy(hidden, w, targets))(weight)
    torch.testing.assert_close(ours, torch.func.grad(lambda w: whole(hidden, w, targets, None))(weight))


@pytest.mark.parametrize(
    ("count", "columns", "dtype", "rows"),
    [
        (100, 4096, torch.float32, 100),  # all at once where they are few
        (8192, 2048, torch.float32, 2048),  # as many rows as the weight has columns
        (8192, 2048, torch.bfloat16, 1176),  # two thirds of that: half-precision logits exist twice
        (10_000, 64, torch.float32, 256),  # never fewer than fill a machine
        (8200, 2048, torch.float64, 1640),  # equal chunks
    ],
)
def test_rows_of_a_chunk(count: int, columns: int, dtype: torch.dtype, rows: int) -> None:
    assert chunk_rows(count, columns, dtype) == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, "'mean' or 'sum'"),
        ({"softcap": 0.0}, "softcap"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"rows": 0}, "rows"),
        ({"weight": torch.randn(5, 7)}, "hidden is"),
        ({"bias": torch.randn(7)}, "bias has shape"),
        ({"targets": torch.randn(3, ROWS // 3)}, "class indices"),
        ({"weight": torch.randn(CLASSES, COLUMNS).bfloat16()}, "one dtype"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**({"hidden": hidden, "weight": weight, "targets": targets} | change))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(64, 16), nn.Linear(16, 16)
        self.loss = tb.nn.LinearCrossEntropy(16, 64, softcap=10.0, label_smoothing=0.1, rows=16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.loss(torch.relu(self.inner(self.table(ids))), targets)
        return loss


def test_a_compiled_step_has_the_bits_of_eager_with_the_same_function() -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    step = tb.compile_step(model, lambda m, x, y: m(x, y), optimizers[0])
    for _ in range(3):
        ids, targets = torch.randint(64, (2, 4, 10))
        targets[0, :3] = -100
        loss = twin(ids, targets)
        assert torch.equal(step(ids, targets), loss.detach())
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert list(model.loss.state_dict()) == ["weight", "bias"]
    assert twin.loss.logits(torch.randn(2, 16)).abs().max() <= 10
