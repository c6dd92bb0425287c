"""Gradients of other dtypes: autocast, fp32 gradients for bf16 weights, float64; models that are moved afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from grad_twins import assert_same, backward_both, in_its_slice, twins
from torch import nn

import takeback
from takeback.errors import GradBufferError

TOKENS = torch.tensor([[1, 4, 4, 0], [0, 2, 6, 6]])


class Net(nn.Module):
    """An embedding, a 1×1 and a 3-wide convolution, and products."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 8, dtype=dtype)
        self.inner = nn.Linear(8, 6, dtype=dtype)
        self.one = nn.Conv1d(4, 5, 1, dtype=dtype)
        self.wide = nn.Conv1d(5, 3, 3, dtype=dtype)
        self.head = nn.Linear(4, 2, bias=False, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.one(self.inner(self.table(tokens)).tanh())).relu())


def autocast(m: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m(TOKENS)
    return y.float().square().sum()


def scale(m: nn.Module) -> float:
    return max(float(p.grad.abs().max()) for p in m.parameters() if p.grad is not None)


def test_autocast_gives_eagers_gradients_in_float32() -> None:
    model, buf, eager = twins(Net())
    for _ in range(2):
        backward_both(model, eager, autocast)
        assert_same(model, buf, eager, rtol=2e-2, atol=1e-2 * scale(eager))
    assert {f.dtype for f in buf.flats} == {torch.float32}


def test_autocast_output_has_eagers_bits() -> None:
    model, _, eager = twins(Net())
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(TOKENS), eager(TOKENS)
    assert ours.dtype is torch.bfloat16
    assert torch.equal(ours, theirs)


def test_backward_under_autocast_is_right_too() -> None:
    model, buf, eager = twins(Net())
    for inside in (True, False):
        for m in (model, eager):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                result = m(TOKENS).float().square().sum()
            with torch.autocast("cpu", torch.bfloat16):
                result.backward()
        assert_same(model, buf, eager, rtol=2e-2, atol=2e-2 * scale(eager))


def test_autocast_switched_off_inside_is_exact() -> None:
    model, buf, eager = twins(Net())

    def loss(m: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return m(TOKENS).square().sum()

    backward_both(model, eager, loss)
    assert_same(model, buf, eager, exact=["table.weight", "inner.weight", "head.weight"])


def test_a_tied_weight_under_autocast_is_right() -> None:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    source[1].weight = source[0].weight
    model, buf, eager = twins(source)
    for _ in range(2):
        backward_both(model, eager, autocast)
        assert_same(model, buf, eager, rtol=2e-2, atol=2e-2 * scale(eager))


def test_converted_gradients_are_counted_as_copies() -> None:
    """On a CPU the product of two bf16 matrices cannot land in float32: a temporary is rounded into the slice."""
    model = nn.Linear(8, 6)
    buf = takeback.GradBuffer(model)
    for turn in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.randn(3, 8))
        y.float().square().sum().backward()
        assert buf.copies == turn
        assert buf.reasons == {"weight": "computed in bfloat16, kept in float32"}


@pytest.mark.parametrize("kind", ["linear", "embedding", "conv 1", "conv 3"])
def test_float32_gradients_of_a_bf16_model(kind: str) -> None:
    torch.manual_seed(0)
    make: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
        "linear": lambda: (nn.Linear(8, 6, dtype=torch.bfloat16), torch.randn(3, 5, 8)),
        "embedding": lambda: (nn.Embedding(7, 6, dtype=torch.bfloat16), TOKENS),
        "conv 1": lambda: (nn.Conv2d(8, 6, 1, dtype=torch.bfloat16), torch.randn(3, 8, 4, 4)),
        "conv 3": lambda: (nn.Conv2d(8, 6, 3, dtype=torch.bfloat16), torch.randn(3, 8, 4, 4)),
    }
    layer, x = make[kind]()
    model, buf, eager = twins(layer, dtype=torch.float32)
    eager = eager.float()
    for _ in range(3):
        model(x.to(torch.bfloat16) if x.is_floating_point() else x).float().square().sum().backward()
        eager(x).square().sum().backward()
    assert buf.flat.dtype is torch.float32
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert p.dtype is torch.bfloat16
        assert p.grad is not None
        assert p.grad.dtype is torch.float32
        assert in_its_slice(buf, p)
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2 * scale(eager))


def test_small_gradients_add_up_in_float32_where_bf16_would_lose_them() -> None:
    table = nn.Embedding(1, 1, dtype=torch.bfloat16)
    buf = takeback.GradBuffer(table, dtype=torch.float32)
    for _ in range(1000):
        table(torch.tensor([0])).sum().backward()
    assert float(buf.flat[0]) == 1000.0


def test_after_detach_a_graph_from_before_gives_gradients_in_the_parameters_dtype() -> None:
    model, buf, eager = twins(Net(torch.bfloat16), dtype=torch.float32)
    model(TOKENS).float().sum().backward()
    graph = model(TOKENS).float().square().sum()
    buf.detach()
    model.zero_grad()
    graph.backward()
    eager(TOKENS).float().square().sum().backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert p.grad.dtype is torch.bfloat16
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2 * scale(eager))


def test_a_model_of_mixed_dtypes_can_have_gradients_of_one() -> None:
    torch.manual_seed(0)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(4, 2, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x.to(torch.bfloat16)).double())

    model, buf, eager = twins(Cast(), dtype=torch.float32)
    backward_both(model, eager, lambda m: m(torch.ones(2, 3)).square().sum())
    assert buf.flat.dtype is torch.float32
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_one_dtype_keep_it(dtype: torch.dtype) -> None:
    model, buf, eager = twins(Net(dtype))
    for _ in range(2):
        backward_both(model, eager, lambda m: m(TOKENS).square().sum())
        tolerance = 1e-10 if dtype is torch.float64 else 4e-2
        assert_same(model, buf, eager, rtol=tolerance, atol=tolerance * scale(eager))
    assert buf.flat.dtype is dtype


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "data": lambda m: [setattr(p, "data", p.data.double()) for p in m.parameters()],
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("then", ["backward", "norm", "zero"])
def test_a_model_moved_afterwards_is_refused_or_right(move: str, held: bool, then: str) -> None:
    torch.manual_seed(0)
    model, buf, eager = twins(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3)))
    x = torch.randn(2, 3, 5, 5)
    if held:
        backward_both(model, eager, lambda m: m(x).square().sum())
    for m in (model, eager):
        MOVES[move](m)
    x = x.to(eager[0].weight.dtype)
    try:
        if then == "backward":
            backward_both(model, eager, lambda m: m(x).square().sum())
        total = buf.zero_().norm() if then == "zero" else buf.norm()
        if then == "zero":
            assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        else:
            grads = [p.grad for p in eager.parameters() if p.grad is not None]
            torch.testing.assert_close(
                total.double(), torch.nn.utils.get_total_norm(grads).double(), rtol=1e-2, atol=1e-6
            )
            assert_same(model, buf, eager, rtol=1e-2, atol=1e-2)
    except GradBufferError as error:
        assert "Move the model first, then make the GradBuffer" in str(error)  # noqa: PT017


def test_moving_to_where_it_is_already_changes_nothing() -> None:
    model, buf, eager = twins(Net())
    backward_both(model, eager, lambda m: m(TOKENS).square().sum())
    model.to("cpu").float().to(torch.float32)
    backward_both(model, eager, lambda m: m(TOKENS).square().sum())
    assert_same(model, buf, eager)


def test_shared_memory_keeps_the_slices() -> None:
    model, buf, eager = twins(nn.Linear(3, 2))
    backward_both(model, eager, lambda m: m(torch.ones(1, 3)).sum())
    try:
        model.share_memory()
        backward_both(model, eager, lambda m: m(torch.ones(1, 3)).sum())
        torch.testing.assert_close(buf.norm(), torch.nn.utils.get_total_norm([p.grad for p in eager.parameters()]))
    except GradBufferError as error:
        assert "Move the model first" in str(error)  # noqa: PT017


def test_a_buffer_made_without_grad_mode_works() -> None:
    model = Net()
    with torch.no_grad():
        model, buf, eager = twins(model)
    backward_both(model, eager, lambda m: m(TOKENS).square().sum())
    assert_same(model, buf, eager)


def test_a_buffer_made_in_inference_mode_works() -> None:
    model = nn.Linear(3, 2)
    with torch.inference_mode():
        buf = takeback.GradBuffer(model)
    model(torch.ones(1, 3)).sum().backward()
    buf.clip_(0.1)
    assert float(buf.norm()) == pytest.approx(0.1, rel=1e-4)


def test_detach_leaves_gradients_in_the_parameters_dtype() -> None:
    model = nn.Linear(3, 2).bfloat16()
    buf = takeback.GradBuffer(model, dtype=torch.float32)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    buf.detach()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.bfloat16
    assert bool(model.weight.grad.eq(1).all())
