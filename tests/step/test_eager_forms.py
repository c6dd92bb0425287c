"""What torch computes another way while it is recorded has eager's bits all the same, in every step, from one plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from form_cases import Model, Pick, case, draw, few_at_first, loss_of, names_in, ops_of
from torch import Tensor, nn

import takeback as tb
from harness import Case, sgd, train_both
from takeback.compiler.capture.eager_forms import PICKED_SUMS, SUM_OF_GATHERED, SUM_OF_MASKED
from takeback.compiler.run.cuda_graph import why_not_captured

pytestmark = [
    pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels"),
    pytest.mark.filterwarnings("ignore:takeback made"),
]


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


class _OwnFill(torch.autograd.Function):
    """Asks autograd for the gradient, as functions do that compute their forward twice."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(h, value)
        return h.masked_fill(h > 0.2, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        h, value = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = h.masked_fill(h > 0.2, value)
        return torch.autograd.grad(out, (h, value), grad)


def filled_in_a_function(model: Model, h: Tensor) -> Tensor:
    out = _OwnFill.apply(h, model.value)
    assert isinstance(out, Tensor)
    return out


def filled_in_a_reentrant_checkpoint(model: Model, h: Tensor) -> Tensor:
    out = torch.utils.checkpoint.checkpoint(lambda h: filled(model, h.sin()), h, use_reentrant=True)
    assert isinstance(out, Tensor)
    return out


FILLS = (
    filled_in_a_function,
    filled_in_a_reentrant_checkpoint,
    filled,
    filled_in_place,
    filled_by_a_broadcast_mask,
    filled_rows_of_a_transposed_one,
    filled_in_a_checkpoint,
)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("pick", FILLS, ids=lambda f: f.__name__)
def test_gradient_of_a_value_that_is_filled_in_has_eagers_bits(pick: Pick, memory: str) -> None:
    step = train_both(case(pick), steps=8, memory=memory, poison=True)
    assert len(ops_of(step, SUM_OF_MASKED)) == 1
    assert "where.self" not in names_in(step)
    assert "scalar_tensor" not in names_in(step)


@pytest.mark.parametrize("pick", [filled, filled_in_a_function], ids=lambda f: f.__name__)
def test_first_comparison_that_is_equal_by_chance_is_no_licence(pick: Pick) -> None:
    """One element that is picked has the same sum either way; in later steps there are many."""
    train_both(Case(lambda: Model(pick), loss_of, few_at_first, sgd), steps=8)


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("batch", [draw, few_at_first])
def test_penalty_on_the_gradient_of_a_value_that_is_filled_in_has_eagers_bits(
    batch: Callable[[int], tuple[Tensor, Tensor]], memory: str
) -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        (grad,) = torch.autograd.grad(loss, model.value, create_graph=True)
        return loss + grad.square()

    train_both(Case(lambda: Model(filled), loss_fn, batch, sgd), steps=8, memory=memory)


def test_gradient_under_torch_func_is_looked_on_in_eager_too() -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        h = model.first(x)
        grad = torch.func.grad(lambda v: F.cross_entropy(model.last(h.masked_fill(h > 0.2, v)), y))(
            model.value.detach()
        )
        inner = torch.func.grad(lambda v: (v * x[:, :1]).prod())(torch.ones(8))
        return F.cross_entropy(model(x), y) + grad + (inner * model.gain).sum()

    step = train_both(case(filled, loss_fn), steps=5)
    assert len(ops_of(step, SUM_OF_MASKED)) == 1


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


def by_aten(model: Model, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.cross_entropy_loss(model(x), y, model.weight, 1, -100, 0.1)
    return out


def by_the_binding(model: Model, x: Tensor, y: Tensor) -> Tensor:
    return torch._C._nn.cross_entropy_loss(model(x), y, model.weight, 1, -100, 0.1)


@pytest.mark.parametrize("loss_fn", [by_aten, by_the_binding])
def test_loss_that_is_called_straight_has_eagers_bits(loss_fn: Callable[..., Any]) -> None:
    assert len(ops_of(train_both(case(lambda m, h: h, loss_fn), steps=8), SUM_OF_GATHERED)) == 1


def test_what_a_user_writes_like_torchs_loss_is_left_alone() -> None:
    def loss_fn(model: Model, x: Tensor, y: Tensor) -> Tensor:
        logits, out = model(x), y == -100  # nothing may run between the ops that are alike
        weights = model.weight.gather(0, y.masked_fill(out, 0)).masked_fill_(out, 0).sum()
        return F.cross_entropy(logits, y, reduction="sum") / weights

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
