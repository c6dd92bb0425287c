"""Weights used several times in one graph, several backwards through it, and gradients that are not accumulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from grad_twins import assert_same, backward_both, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

import takeback

TOKENS = torch.tensor([[1, 4, 4], [0, 2, 6]])


class Tied(nn.Module):
    """An embedding whose table is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(tokens)).tanh())


Use = Callable[[Tied, torch.Tensor], torch.Tensor]
USES: dict[str, Use] = {
    "packed": lambda m, x: m.head(x) @ m.table.weight.detach(),
    "functional": lambda m, x: F.linear(x, m.table.weight) @ m.table.weight.detach(),
    "product": lambda m, x: x @ m.table.weight.t() @ m.table.weight.detach(),
    "rows": lambda m, x: x + m.table(TOKENS),
    "functional rows": lambda m, x: x + F.embedding(TOKENS, m.table.weight),
    "checkpoint": lambda m, x: checkpoint(lambda y: F.linear(m.head(y), m.head.weight.t()), x, use_reentrant=True),
    "checkpoint, packed": lambda m, x: checkpoint(lambda y: m.head(y) @ m.table.weight.detach(), x, use_reentrant=True),
    "checkpoint, modern": lambda m, x: checkpoint(
        lambda y: F.linear(m.head(y), m.head.weight.t()), x, use_reentrant=False
    ),
}


def test_a_tied_table_is_right_without_a_copy() -> None:
    model, buf, eager = twins(Tied())
    for _ in range(3):
        backward_both(model, eager, lambda m: m(TOKENS).square().sum())
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
        assert buf.copies == 0
    assert len(buf.slots) == 3


@pytest.mark.parametrize("first", USES)
@pytest.mark.parametrize("second", USES)
@pytest.mark.parametrize("third", ["packed", "functional"])
def test_a_weight_used_in_every_order_is_right(first: str, second: str, third: str) -> None:
    model, buf, eager = twins(Tied())

    def loss(m: nn.Module) -> torch.Tensor:
        x = m.middle(torch.ones(2, 3, 5, requires_grad=True))
        for name in (first, second, third):
            x = USES[name](m, x).tanh()
        return x.square().sum()

    for _ in range(2):
        backward_both(model, eager, loss)
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    model.zero_grad()
    eager.zero_grad()
    backward_both(model, eager, loss)
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)


def test_a_framework_addition_is_counted_with_its_reason() -> None:
    model, buf, _ = twins(Tied())
    (model(TOKENS).sum() + F.linear(torch.ones(5), model.table.weight).sum()).backward()
    assert buf.copies == 1
    assert list(buf.reasons) == ["table.weight"]
    assert buf.reasons["table.weight"]
    model.zero_grad()
    model(TOKENS).sum().backward()
    assert (buf.copies, dict(buf.reasons)) == (0, {})


@pytest.mark.parametrize("times", [2, 3])
def test_a_module_called_several_times_is_right_without_a_copy(times: int) -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Embedding(4, 4)))

    def loss(m: nn.Module) -> torch.Tensor:
        x = m[2](torch.tensor([[0, 1, 2, 2]]))
        for _ in range(times):
            x = (m[1](m[0](x)) + m[2](torch.tensor([[3, 1, 1, 0]]))).tanh()
        return x.square().sum()

    for _ in range(2):
        backward_both(model, eager, loss)
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-5)
    assert buf.copies == 0


def test_the_sum_of_an_output_with_itself_is_right() -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Linear(4, 3))
    x = torch.randn(5, 4)

    def doubled(m: nn.Module) -> torch.Tensor:
        y = m(x)
        return (y + y).sum() + (y * y).sum() + m(x).sum() + m(x + x).sum()

    backward_both(model, eager, doubled)
    assert_same(model, buf, eager)


def test_retained_graph_adds_the_second_time() -> None:
    model, buf, eager = twins(Tied())
    losses = [m(TOKENS).square().sum() for m in (model, eager)]
    for turn in range(3):
        for loss in losses:
            loss.backward(retain_graph=turn < 2)
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    assert buf.copies == 0
    for loss in losses:
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def penalty(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """WGAN-GP: the loss holds the norm of the gradient with respect to the input."""
    y = m(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.sum() + (dx.norm() - 1).square()


@pytest.mark.parametrize("kind", ["linear", "conv 1×1", "conv 3×3"])
def test_gradient_penalty_is_right(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "linear":
        net, shape = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), (5, 4)
    else:
        k = 1 if kind == "conv 1×1" else 3
        net, shape = nn.Sequential(nn.Conv2d(3, 4, k), nn.Tanh(), nn.Conv2d(4, 2, k)), (2, 3, 6, 6)
    model, buf, eager = twins(net)
    x = torch.randn(shape, requires_grad=True)
    for _ in range(2):
        backward_both(model, eager, lambda m: penalty(m, x))
        assert_same(model, buf, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("before", [False, True])
def test_create_graph_backward_leaves_gradients_with_a_history(before: bool) -> None:
    model, buf, eager = twins(Tied())
    if before:
        backward_both(model, eager, lambda m: m(TOKENS).sum())
    results = []
    for m in (model, eager):
        m(TOKENS).square().sum().backward(create_graph=True)
        grads = [p.grad for p in m.parameters()]
        assert all(g is not None and g.requires_grad for g in grads)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), list(m.parameters())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    for m in (model, eager):
        m.zero_grad()
    backward_both(model, eager, lambda m: m(TOKENS).sum())
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    assert buf.copies == 0


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gather_takes_gradients_with_a_history_without_it() -> None:
    model, buf, eager = twins(Tied())
    for m in (model, eager):
        m(TOKENS).square().sum().backward(create_graph=True)
    expected = torch.nn.utils.get_total_norm([p.grad.detach() for p in eager.parameters()])
    torch.testing.assert_close(buf.norm(), expected)
    assert not buf.flat.requires_grad
    for p in (*model.parameters(), *eager.parameters()):
        p.grad = None  # a gradient with a history refers to its parameter and back


@pytest.mark.parametrize("state", ["none", "held", "zero"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_grad_touches_neither_grad_nor_buffer(state: str, create_graph: bool) -> None:
    model, buf, eager = twins(Tied())
    if state == "held":
        backward_both(model, eager, lambda m: m(TOKENS).sum())
    elif state == "zero":
        buf.zero_()
    flat, before = buf.flat.clone(), [p.grad for p in model.parameters()]
    for inputs in (list, lambda ps: list(ps)[1:2], lambda ps: list(ps)[::-1]):
        got = [
            torch.autograd.grad(m(TOKENS).square().sum(), inputs(m.parameters()), create_graph=create_graph)
            for m in (model, eager)
        ]
        for ours, theirs in zip(*got, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert ours.untyped_storage().data_ptr() != buf.flat.untyped_storage().data_ptr()
    assert torch.equal(flat, buf.flat)
    assert all(p.grad is b for p, b in zip(model.parameters(), before, strict=True))


def test_autograd_grad_leaves_no_reason_behind_for_a_later_copy() -> None:
    model, buf, _ = twins(Tied())
    torch.autograd.grad(model(TOKENS).sum(), list(model.parameters()), create_graph=True)
    F.linear(torch.ones(5), model.table.weight).sum().backward()
    assert "create_graph" not in buf.reasons["table.weight"]


def test_backward_to_inputs_writes_only_those() -> None:
    model, buf, eager = twins(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))
    ours, theirs = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
    for chosen in ([], ["0.weight"], ["2.bias"], ["0.bias", "2.weight"]):
        for m, x in ((model, ours), (eager, theirs)):
            inputs = [p for n, p in m.named_parameters() if n in chosen] or [x]
            m(x).square().sum().backward(inputs=inputs)
        assert_same(model, buf, eager)
    assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert buf.copies == 0


def test_autograd_grad_inside_a_backward_is_right() -> None:
    """A backward that runs autograd.grad over the same weights, as implicit layers do."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, m: nn.Module) -> torch.Tensor:
            ctx.m = m
            ctx.save_for_backward(x)
            return m(x).detach()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.m(x)
            dx, *_ = torch.autograd.grad(y, [x, ctx.m.weight], dy)
            return dx, None

    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    for _ in range(2):
        backward_both(model, eager, lambda m: m[1](Inner.apply(m[0](x), m[1])).square().sum())
        assert_same(model, buf, eager)


def test_batched_gradients_are_right() -> None:
    model, buf, eager = twins(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    got = []
    for m in (model, eager):
        y = m(torch.ones(4))
        got.append(torch.autograd.grad(y, list(m.parameters()), torch.eye(3), is_grads_batched=True))
    for ours, theirs in zip(*got, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not buf.flat.any()


def test_a_graph_built_before_detach_still_gives_gradients_but_not_into_the_buffer() -> None:
    model, buf, eager = twins(Tied())
    loss = model(TOKENS).square().sum()
    buf.detach()
    loss.backward()
    eager(TOKENS).square().sum().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    assert not buf.flat.any()


def test_a_graph_built_under_another_buffer_goes_into_the_new_one() -> None:
    model, buf, eager = twins(Tied())
    loss = model(TOKENS).square().sum()
    buf.detach()
    new = takeback.GradBuffer(model)
    loss.backward()
    eager(TOKENS).square().sum().backward()
    assert_same(model, new, eager, rtol=1e-4, atol=1e-4)
