"""Graphs on which in-place backwards and buffer reuse went wrong elsewhere, compiled: shared gradient storages,
expanded gradients, norms whose input is read again, views of saved values, the user's own in-place ops, aliased batches
and aux.

Each runs plain and with dead bytes poisoned, and must give eager's bits, leave the caller's tensors alone, and never
overwrite a result that was returned (tests/harness.py holds them all to the end).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Case, adamw, same, sgd, train_both
from takeback import compile_step
from takeback.errors import CaptureError

pytestmark = pytest.mark.usefixtures("short_search")

ROWS, WIDTH = 4, 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Weights(nn.Module):
    """Four square weights, and a norm's scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4) for _ in range(4))
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("count", torch.zeros(ROWS, WIDTH))


def noise(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda i: (torch.randn(shape or (ROWS, WIDTH), generator=torch.Generator().manual_seed(i)),)


def norm(m: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), m.scale, m.shift)


def in_place(x: Tensor, *changes: Callable[[Tensor], object]) -> Tensor:
    """x after the user's own in-place changes."""
    for change in changes:
        change(x)
    return x


def diamond(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    left, right = h.relu(), h.tanh()
    return (left * right + left @ m.b - right).square().mean()


def residual_chain(m: Any, x: Tensor) -> Tensor:
    for w in (m.a, m.b, m.c, m.d):
        x = x + F.gelu(norm(m, x) @ w)
    return x.square().mean()


def residual_in_place(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    for w in (m.b, m.c, m.d):
        h = h.add_(norm(m, h.clone()) @ w)
    return h.square().mean()


def into_slices(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(ROWS, 2 * WIDTH)
    out[:, :WIDTH] = x @ m.a
    out[:, WIDTH:].copy_(x @ m.b)
    out[1:3, 2:9] *= 2
    out[0] = 1.5
    return (out[:, ::2] * out[:, 1::2]).sum()


def into_empty(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(ROWS, WIDTH)
    out.copy_(x @ m.a)
    out[:, 0].zero_()
    out.t().mul_(2)
    return (out @ m.b).square().sum()


def index_put(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    h[torch.tensor([0, 2])] = (x @ m.b)[:2]
    h.index_put_((torch.tensor([1, 1]), torch.tensor([0, 0])), torch.tensor([0.5, 0.25]), accumulate=True)
    h[h.detach() > 1] = 0.0  # a mask as index_put: its shape is fixed
    return h.square().mean()


def views_of_saved(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.a).exp()  # exp saves its result
    top, rest = h[:2], h[2:]
    return (top * rest).sum() + h.t().reshape(-1)[:5].square().sum() + h.view(2, -1).softmax(1).max()


def saved_and_overwritten_view(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    kept = h.sigmoid()
    h[:, 1:].relu_()
    return (kept * h @ m.b).mean()


def three_uses(m: Any, x: Tensor) -> Tensor:
    return ((x @ m.a @ m.a + x * m.a.diagonal()) @ m.a.t()).square().mean()


def shared_subexpression(m: Any, x: Tensor) -> Tensor:
    w = m.a * m.b
    return ((x @ w).relu() @ w + (x @ w.t())).square().mean() + w.sum()


def two_gradients_one_storage(m: Any, x: Tensor) -> Tensor:
    z = m.a + m.b  # both gradients are the gradient of z
    return (x @ z).square().mean()


def three_gradients_one_storage(m: Any, x: Tensor) -> Tensor:
    return (m.a + m.b + m.c + x.sum()).sum()


def transposed_gradient(m: Any, x: Tensor) -> Tensor:
    return ((x[:, :, None] * m.a.t()) ** 2).sum() + (m.b.t() @ x.t()).square().sum()


def slice_gradients(m: Any, x: Tensor) -> Tensor:
    wide = torch.cat([m.a, m.b], 1)
    left, right = (x @ wide).split(WIDTH, 1)
    return (left * right).mean() + m.c[1:3].sum() + m.d[:, ::2].square().sum()


def norm_read_again(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    return (norm(m, h) * h + h.square()).mean()


def two_norms(m: Any, x: Tensor) -> Tensor:
    return norm(m, norm(m, x @ m.a)).mul(x).square().mean()


def batch_norm_twice(m: Any, x: Tensor) -> Tensor:
    h = F.batch_norm(x @ m.a, None, None, m.scale, m.shift, training=True)
    return (F.batch_norm(h, None, None, m.scale, m.shift, training=True) * h).square().mean()


def exp_chain(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.a).tanh().exp()
    h = h * h.exp() * 0.1
    return (h.mul(h).exp() - h).mean()


def in_place_after_save(m: Any, x: Tensor) -> Tensor:
    h = F.leaky_relu(x @ m.a, inplace=True) + 1
    h = F.dropout(h, 0.3, inplace=True)
    return F.silu(h @ m.b, inplace=True).add_(1).mul_(2).sum()


def counts(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    return (x @ m.a * m.count).mean()


def running_average(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    with torch.no_grad():
        m.count.lerp_(h, 0.1)
    return (h - m.count).square().mean()


def buffer_read_before_and_after(m: Any, x: Tensor) -> Tensor:
    before = m.count * 2
    m.count.copy_(x)
    return ((x @ m.a) * before + m.count @ m.b).mean()


def in_place_views(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    h.t_()
    h.unsqueeze_(0)
    h.transpose_(1, 2)
    h.squeeze_(0)
    return (h @ m.b).square().mean()


def square_in_place_transpose(m: Any, x: Tensor) -> Tensor:
    w = m.a * 2
    w.t_()  # the same shape, so that only the numbers tell
    return (x @ w).square().mean()


def chunks_joined_again(m: Any, x: Tensor) -> Tensor:
    q, k, v = (x @ torch.cat([m.a, m.b, m.c], 1)).chunk(3, 1)
    return (torch.cat([q, k, v], 1).view(ROWS, 3, WIDTH).unbind(1)[1] * (q @ k.t()).softmax(1).mm(v)).sum()


def reused_in_no_grad(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    with torch.no_grad():
        weight = h.softmax(1).mul_(2).clamp_(0, 1)
    return (h * weight).sum() + h.detach().mul(m.shift).sum()


def data_write(m: Any, x: Tensor) -> Tensor:
    h = x @ m.a
    h.data.clamp_(-1, 1)
    return h.square().mean()


def max_pool_indices(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.a)[None]
    pooled, where = F.max_pool1d(h, 2, return_indices=True)
    return F.max_unpool1d(pooled, where, 2).mul(h).sum() + where.float().mul(pooled).mean()


def retained_graph(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.a).tanh()
    (first,) = torch.autograd.grad(h.sum(), m.a, retain_graph=True)
    (second,) = torch.autograd.grad((h * h).sum(), m.a, create_graph=True)
    return (h @ m.b).mean() + (first * m.c).sum() + second.square().sum()


def expanded(m: Any, x: Tensor) -> Tensor:
    return (m.shift.expand(ROWS, WIDTH) * (x @ m.a)).sum() + m.scale[None].repeat(3, 1).square().sum()


def long_chain(m: Any, x: Tensor) -> Tensor:
    for _ in range(12):
        x = (x + x.sin() * m.scale).cos() - m.shift
    return x.mean()


GRAPHS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "x + x": lambda m, x: ((x @ m.a) + (x @ m.a)).square().sum(),
    "h + h": lambda m, x: (lambda h: (h + h).sum())(x @ m.a),
    "h * h": lambda m, x: (lambda h: (h * h).sum())(x @ m.a),
    "h - h": lambda m, x: (lambda h: (h - h + h * h.detach()).sum())(x @ m.a),
    "sum of the output": lambda m, x: (x @ m.a @ m.b).sum(),
    "sum of an in-place norm": lambda m, x: norm(m, x @ m.a).sum(),
    "a parameter alone": lambda m, x: m.a.sum(),
    "a parameter and its view": lambda m, x: m.a.sum() + m.a.t()[0].sum() + m.a.view(-1)[3],
    "mean of one element": lambda m, x: (x @ m.a)[0, 0],
    "the parameter by itself": lambda m, x: m.a[0, 0] * 1,
    **{
        f.__name__: f
        for f in (
            two_gradients_one_storage,
            three_gradients_one_storage,
            diamond,
            two_norms,
            batch_norm_twice,
            norm_read_again,
            exp_chain,
            views_of_saved,
            saved_and_overwritten_view,
            residual_chain,
            residual_in_place,
            into_slices,
            into_empty,
            index_put,
            three_uses,
            shared_subexpression,
            transposed_gradient,
            slice_gradients,
            in_place_after_save,
            counts,
            running_average,
            buffer_read_before_and_after,
            in_place_views,
            square_in_place_transpose,
            chunks_joined_again,
            reused_in_no_grad,
            data_write,
            max_pool_indices,
            retained_graph,
            expanded,
            long_chain,
        )
    },
}


@pytest.mark.parametrize("poison", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "poison"])
@pytest.mark.parametrize("name", GRAPHS)
def test_hazardous_graph_gives_eagers_bits(name: str, poison: bool) -> None:
    train_both(Case(Weights, GRAPHS[name], noise(), adamw if poison else sgd), poison=poison, steps=8, memory="auto")


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"clip_norm": 0.1}, {"keep_grads": False}], ids=str)
@pytest.mark.parametrize(
    "name", ["three_gradients_one_storage", "sum of the output", "a parameter and its view", "diamond", "three_uses"]
)
def test_shared_gradient_storage_survives_settings(name: str, settings: dict[str, Any]) -> None:
    train_both(Case(Weights, GRAPHS[name], noise(), settings=settings), poison=True, memory="auto")


# -- aux -----------------------------------------------------------------------------------------------------------


def aux_of_intermediate(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    h = x @ m.a
    return h.relu().square().mean(), {"h": h, "view": h[1:, ::2], "relu": h.relu()}


def aux_of_saved(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    h = (x @ m.a).exp()
    return (h * h).mean(), [h, h.t(), h.detach()]


def aux_of_batch(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    return (x @ m.a).mean(), (x, x[:2], x.t())


def aux_of_parameter(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    return (x @ m.a).mean(), {"frozen": m.a.detach().clone(), "b": m.b * 1, "shift": m.shift + 0}


def aux_of_loss(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    loss = (x @ m.a).square().mean()
    return loss, (loss, loss.detach(), loss * 2)


def aux_of_buffer_copy(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    m.count.add_(1)
    return (x @ m.a).mean(), m.count.clone()


def aux_expanded(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    h = (x @ m.a).mean(1, keepdim=True)
    return h.sum(), h.expand(-1, 5)


def aux_without_tensors(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    return (x @ m.a).mean(), {"rows": x.shape[0], "name": "x"}


AUX = (
    aux_of_intermediate,
    aux_of_saved,
    aux_of_batch,
    aux_of_parameter,
    aux_of_loss,
    aux_of_buffer_copy,
    aux_expanded,
    aux_without_tensors,
)


@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poison"])
@pytest.mark.parametrize("loss_fn", AUX, ids=lambda f: f.__name__)
def test_aux_is_eagers_and_outlives_the_step(loss_fn: Callable[..., Any], poison: bool) -> None:
    train_both(Case(Weights, loss_fn, noise()), poison=poison, memory="auto")


def test_aux_that_is_a_parameter_shows_the_parameter_after_the_step() -> None:
    """An alias, in eager: what the caller reads after the step is the updated parameter. Every step must agree on
    whether it hands out the parameter itself or a copy, or a caller who collects them gets a mixture."""

    def loss_fn(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ m.a).square().mean(), m.a

    torch.manual_seed(0)
    model = Weights()
    step = compile_step(model, loss_fn, sgd(model))
    returned = []
    for i in range(4):
        _, aux = step(*noise()(i))
        assert torch.equal(aux, model.a)
        returned.append(aux)
    aliases = [t.data_ptr() == model.a.data_ptr() for t in returned]
    assert len(set(aliases)) == 1, f"the parameter itself in some steps, a copy in others: {aliases}"


# -- batches -------------------------------------------------------------------------------------------------------


def next_row(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((x @ m.a) - y).square().mean()


def shifted(i: int) -> tuple[Tensor, Tensor]:
    """Two views of one storage, as tokens[:, :-1] and tokens[:, 1:], with another base in every step."""
    g = torch.Generator().manual_seed(i)
    base = torch.randn(ROWS + 3, WIDTH + 5, generator=g)
    return base[i % 3 : i % 3 + ROWS, i % 4 : i % 4 + WIDTH], base[i % 3 : i % 3 + ROWS, i % 4 + 1 : i % 4 + 1 + WIDTH]


def once_shared_once_not(i: int) -> tuple[Tensor, Tensor]:
    """The same strides, from one storage in even steps and from two in odd ones."""
    x, y = shifted(i)
    return (x, y) if i % 2 == 0 else (x, shifted(i + 100)[1])


def same_twice(i: int) -> tuple[Tensor, Tensor]:
    (x,) = noise()(i)
    return x, x


def same_then_different(i: int) -> tuple[Tensor, Tensor]:
    (x,) = noise()(i)
    return x, (x if i < 3 else noise()(i + 50)[0])


def transposed(i: int) -> tuple[Tensor, Tensor]:
    return noise(WIDTH, ROWS)(i)[0].t(), noise(ROWS, 2 * WIDTH)(i)[0][:, ::2]


def broadcast(i: int) -> tuple[Tensor, Tensor]:
    return noise(1, WIDTH)(i)[0].expand(ROWS, WIDTH), noise(ROWS, 1)(i)[0].expand(ROWS, WIDTH)


def reversed_halves(i: int) -> tuple[Tensor, Tensor]:
    both = noise(2, ROWS, WIDTH)(i)[0]
    return (both[0], both[1]) if i % 2 else (both[1], both[0])


def integers(i: int) -> tuple[Tensor, Tensor]:
    base = torch.randint(9, (ROWS, WIDTH + 1), generator=torch.Generator().manual_seed(i))
    return base[:, :-1].float(), base[:, 1:]


BATCHES = (
    shifted,
    once_shared_once_not,
    same_twice,
    same_then_different,
    transposed,
    broadcast,
    reversed_halves,
    integers,
)


@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poison"])
@pytest.mark.parametrize("draw", BATCHES, ids=lambda f: f.__name__)
def test_aliased_or_strided_batch_gives_eagers_bits(draw: Callable[[int], Any], poison: bool) -> None:
    train_both(Case(Weights, next_row, draw), poison=poison, plans=None, memory="auto")


def reads_batch_later(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = x @ m.a
    return (h * x + y.flip(0) * x.t().contiguous().t()).square().mean() + (x + y).sigmoid().mul(m.shift).sum()


def scales_batch(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5)
    y[:, 0] = 1.0
    return next_row(m, x, y)


def fills_batch(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = x @ m.a
    y.copy_(h.detach())
    return (h * y).mean()


@pytest.mark.parametrize("loss_fn", [reads_batch_later, scales_batch, fills_batch], ids=lambda f: f.__name__)
def test_batch_is_written_only_where_the_users_code_writes_it(loss_fn: Callable[..., Any]) -> None:
    """versus_eager compares the batch after each step with eager's, bit for bit."""

    def draw(i: int) -> tuple[Tensor, Tensor]:
        return noise()(i)[0], noise()(i + 99)[0]

    train_both(Case(Weights, loss_fn, draw), poison=True, memory="auto")


@pytest.mark.parametrize("draw", [shifted, same_twice], ids=lambda f: f.__name__)
def test_users_write_to_one_of_two_batch_tensors_that_share_memory_is_refused(draw: Callable[[int], Any]) -> None:
    def loss_fn(m: Any, x: Tensor, y: Tensor) -> Tensor:
        before = y.sum() * m.scale.sum()
        x.mul_(0.5)
        return ((x @ m.a) - y).square().mean() + before

    model = Weights()
    step = compile_step(model, loss_fn, sgd(model))
    with pytest.raises(CaptureError, match=r"writes a batch tensor in place at .*test_hazard_graphs\.py"):
        step(*draw(0))


def test_batch_that_requires_a_gradient_is_refused() -> None:
    model = Weights()
    step = compile_step(model, diamond, sgd(model))
    with pytest.raises(CaptureError, match="tensor 0 of the batch requires grad"):
        step(noise()(0)[0].requires_grad_())


def test_tensors_the_caller_holds_are_never_written() -> None:
    """Views of parameters follow the parameter; copies, batches, losses and gradients stay what they were."""
    torch.manual_seed(0)
    model = Weights()
    step = compile_step(model, aux_of_intermediate, adamw(model), keep_grads=True)
    held: list[tuple[Tensor, Tensor]] = []
    view = model.a.detach()[1:]
    for i in range(12):
        batch = noise()(i)
        loss, aux = step(*batch)
        for t in (*batch, loss, *aux.values(), *(p.grad for p in model.parameters() if p.grad is not None)):
            held.append((t, t.clone()))
        assert torch.equal(view, model.a[1:])
    gc.collect()
    assert all(same(now, then) for now, then in held)
    addresses = {t.data_ptr() for t, _ in held}
    assert len(addresses) == len({id(t) for t, _ in held}), "two results share bytes"


def test_two_compiled_steps_of_one_model_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    model, twin = Weights(), Weights()
    twin.load_state_dict(model.state_dict())
    optimizer, twins = sgd(model), sgd(twin)
    ours = [compile_step(model, f, optimizer) for f in (diamond, residual_chain)]
    for i in range(10):
        f = (diamond, residual_chain)[i % 2]
        loss = ours[i % 2](*noise()(i))
        twins.zero_grad()
        expected = f(twin, *noise()(i))
        expected.backward()
        twins.step()
        assert torch.equal(loss, expected.detach())


def test_eager_steps_between_compiled_ones_do_not_disturb_them() -> None:
    torch.manual_seed(0)
    model, twin = Weights(), Weights()
    twin.load_state_dict(model.state_dict())
    optimizer, twins = adamw(model), adamw(twin)
    step = compile_step(model, diamond, optimizer)
    for i in range(12):
        twins.zero_grad()
        expected = diamond(twin, *noise()(i))
        expected.backward()
        twins.step()
        if i % 4 == 3:
            optimizer.zero_grad()
            loss = diamond(model, *noise()(i))
            loss.backward()
            optimizer.step()
        else:
            loss = step(*noise()(i))
        assert torch.equal(loss.detach(), expected.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


class HandsBackItsCopy(torch.autograd.Function):
    """A backward whose gradient is a clone of a saved value: the clone is moved, and must still be kept."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (h,) = ctx.saved_tensors
        return grad, h.detach().clone()


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), torch.optim.RMSprop])
def test_gradient_that_is_a_moved_copy_is_kept_for_the_caller(make: Callable[..., Any]) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)
            self.b = torch.nn.Parameter(torch.randn(4, 6))

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        return HandsBackItsCopy.apply(m.linear(x), m.b).square().mean()

    torch.manual_seed(0)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer, twins = make(model.parameters()), make(twin.parameters())
    step = compile_step(model, loss_fn, optimizer, keep_grads=True, poison=True)
    for i in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
        twins.zero_grad()
        expected = loss_fn(twin, x)
        expected.backward()
        twins.step()
        assert torch.equal(step(x), expected.detach()), i
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (i, name)
            assert torch.equal(p, q), (i, name)
    assert step._plans[0].executor.layout.draft.moves, "the copy was not moved: this test shows nothing"


class HandsBackWhatItSaved(torch.autograd.Function):
    """A backward whose gradient *is* a saved value: however cheap to rebuild, it must be there for the update."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, ctx.saved_tensors[0]


def test_forward_value_that_becomes_a_gradient_is_not_rebuilt_away() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
            self.b = torch.nn.ParameterList(torch.randn(64, 32) for _ in range(4))

    def loss_fn(m: Any, x: Tensor) -> Tensor:
        for linear, b in zip(m.linears, m.b, strict=True):
            x = HandsBackWhatItSaved.apply(torch.nn.functional.gelu(linear(x)), b).tanh()
        return x.square().mean()

    torch.manual_seed(0)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin)]
    step = compile_step(model, loss_fn, optimizers[0], poison=True)
    for i in range(5):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(i))
        optimizers[1].zero_grad()
        expected = loss_fn(twin, x)
        expected.backward()
        optimizers[1].step()
        assert torch.equal(step(x), expected.detach()), i
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)), i
