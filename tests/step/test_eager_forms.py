"""What torch computes another way while it is recorded has eager's bits all the same, in every step, from one plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import takeback as tb
from harness import Case, sgd, train_both
from takeback.compiler.capture import eager_forms, recorder
from takeback.compiler.capture.eager_forms import PICKED_SUMS, SUM_OF_GATHERED, SUM_OF_MASKED
from takeback.compiler.run.cuda_graph import why_not_captured

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels"),
    pytest.mark.filterwarnings("ignore:takeback made"),
]

Pick = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.value = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weight", torch.rand(5) + 0.5)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pick(self, self.first(x)))


def draw(i: int, rows: int = 7) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    y = torch.randint(5, (rows,), generator=g)
    y[torch.rand(rows, generator=g) > 0.6] = -100
    y[0] = 1
    return torch.randn(rows, 6, generator=g), y


def loss_of(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def case(pick: Pick, loss_fn: Callable[..., Any] = loss_of, **settings: Any) -> Case:
    return Case(lambda: Model(pick), loss_fn, draw, sgd, settings=settings)


def names_in(step: tb.CompiledStep) -> list[str]:
    return [op.name for op in step._last.original.ops]  # type: ignore[union-attr]


def ops_of(step: tb.CompiledStep, target: object) -> list[Any]:
    return [op for op in step._last.executor.program.ops if op.target is target]  # type: ignore[union-attr]


# -- masked_fill -------------------------------------------------------------------------------------------------------


def filled(model: Model, h: Tensor) -> Tensor:
    return h.masked_fill(h > 0.2, model.value)


def filled_in_place(model: Model, h: Tensor) -> Tensor:
    return (h * 2).masked_fill_(h > 0.2, model.value.exp())


def filled_by_a_broadcast_mask(model: Model, h: Tensor) -> Tensor:
    return h.masked_fill((h > 0.2).any(1, keepdim=True), model.value)


def filled_rows_of_a_transposed_one(model: Model, h: Tensor) -> Tensor:
    return h.t().masked_fill(h.t() > 0.2, model.value).t()


def filled_in_a_checkpoint(model: Model, h: Tensor) -> Tensor:
    out = torch.utils.checkpoint.checkpoint(lambda h: filled(model, h.sin()), h, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


FILLS = (
    filled,
    filled_in_place,
    filled_by_a_broadcast_mask,
    filled_rows_of_a_transposed_one,
    filled_in_a_checkpoint,
)


@pytest.mark.parametrize("pick", FILLS, ids=lambda f: f.__name__)
def test_gradient_of_a_value_that_is_filled_in_has_eagers_bits(pick: Pick) -> None:
    step = train_both(case(pick), steps=8, memory="min", poison=True)
    assert len(ops_of(step, SUM_OF_MASKED)) == 1
    assert "where.self" not in names_in(step)
    assert "scalar_tensor" not in names_in(step)


def test_first_comparison_that_is_equal_by_chance_is_no_licence() -> None:
    """One element that is picked has the same sum either way; in later steps there are many."""

    def few_at_first(i: int) -> tuple[Tensor, Tensor]:
        x, y = draw(i, rows=64)
        return (x * 0 + 0.001, y) if i < 3 else (x, y)

    train_both(Case(lambda: Model(filled), loss_of, few_at_first, sgd), steps=8)


def test_sum_of_the_users_own_is_left_alone() -> None:
    def chosen(model: Model, h: Tensor) -> Tensor:
        return h * torch.where(h > 0.2, h, 0.0).sum() + torch.where(h > 0.2, model.value, h)

    step = train_both(case(chosen), steps=4)
    assert not ops_of(step, SUM_OF_MASKED)
    assert "where.self" in names_in(step)


class _Hiding(torch.autograd.graph.saved_tensors_hooks):
    """Computes, like a checkpoint's second forward, while autograd waits for what a node has saved."""

    def __init__(self) -> None:
        super().__init__(lambda t: t, self.unpack)

    @staticmethod
    def unpack(saved: Tensor) -> Tensor:
        if saved.dtype is torch.bool:
            zeros = torch.where(saved, torch.zeros(saved.shape), torch.zeros(()))
            return saved & (zeros.sum() == 0)
        return saved


def test_sum_of_the_users_own_inside_of_autograds_node_is_left_alone() -> None:
    def filled_under_hooks(model: Model, h: Tensor) -> Tensor:
        with _Hiding():
            return filled(model, h)

    step = train_both(case(filled_under_hooks), steps=4)
    assert names_in(step).count("sum") == 1
    assert len(ops_of(step, SUM_OF_MASKED)) == 1


# -- products ----------------------------------------------------------------------------------------------------------


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


PRODUCTS = (
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


@pytest.mark.parametrize("pick", PRODUCTS, ids=lambda f: f.__name__)
def test_gradient_of_a_product_has_eagers_bits(pick: Pick) -> None:
    train_both(case(pick), steps=6, memory="min", poison=True)


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
    for module in (eager_forms, recorder):
        monkeypatch.setattr(module, "running_products_differ", lambda: True)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradient_of_a_running_product_is_one(dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_torch_2_11(monkeypatch)
    x = torch.rand(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)).add(0.5).requires_grad_()
    with eager_forms.EagerProducts():
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
    with pytest.raises(tb.CaptureError, match=r"gradient of cumprod.*Use torch 2.13"):
        step(*draw(0))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


# -- a weighted cross-entropy with label smoothing ---------------------------------------------------------------------


def smoothed(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=model.weight, label_smoothing=0.1)


def smoothed_by_a_module(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(weight=model.weight, label_smoothing=0.1, ignore_index=1)(model(x), y.clamp(min=0))


def smoothed_over_an_image(model: Model, x: Tensor, y: Tensor) -> Tensor:
    planes = model(x).t().reshape(1, 5, 1, -1)
    return F.cross_entropy(planes, y.view(1, 1, -1), weight=model.weight, label_smoothing=0.1)


def smoothed_over_strided_targets(model: Model, x: Tensor, y: Tensor) -> Tensor:
    planes = model(x).t().reshape(1, 5, -1, 1).expand(1, 5, -1, 2)
    targets = torch.stack((y, y)).t()[None]
    return F.cross_entropy(planes, targets, weight=model.weight, label_smoothing=0.1)


SMOOTHED = (
    smoothed,
    smoothed_by_a_module,
    smoothed_over_an_image,
    smoothed_over_strided_targets,
)


@pytest.mark.parametrize("loss_fn", SMOOTHED, ids=lambda f: f.__name__)
def test_weighted_loss_with_smoothing_has_eagers_bits(loss_fn: Callable[..., Any]) -> None:
    step = train_both(case(lambda m, h: h, loss_fn), steps=8, memory="min", poison=True)
    assert len(ops_of(step, SUM_OF_GATHERED)) == 1
    assert "gather" not in names_in(step)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_other_reductions_are_torchs(reduction: str) -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=model.weight, label_smoothing=0.1, reduction=reduction).sum()

    assert not ops_of(train_both(case(lambda m, h: h, loss_fn), steps=5), SUM_OF_GATHERED)


def test_what_a_user_writes_like_torchs_loss_is_left_alone() -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        out = y == -100
        weights = model.weight.gather(0, y.masked_fill(out, 0)).masked_fill_(out, 0)
        return F.cross_entropy(model(x), y, reduction="sum") / weights.sum()

    assert not ops_of(train_both(case(lambda m, h: h, loss_fn), steps=5), SUM_OF_GATHERED)


# -- the rest of the compiler ------------------------------------------------------------------------------------------


def test_graph_is_not_captured_around_them() -> None:
    step = train_both(case(filled, smoothed), steps=3)
    program = step._last.executor.program  # type: ignore[union-attr]
    for target in PICKED_SUMS:
        assert "counts the rows" in str(why_not_captured(program, ops_of(step, target)))


def test_mode_fast_keeps_what_can_be_fused() -> None:
    model = Model(filled)
    step = tb.compile_step(model, smoothed, torch.optim.SGD(model.parameters(), lr=0.1), mode="fast")
    for i in range(4):
        step(*draw(i))
    assert not any(ops_of(step, target) for target in PICKED_SUMS)
