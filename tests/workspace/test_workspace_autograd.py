"""A buffer that a graph, a view or anybody else holds is not handed out again; tracers get torch.empty."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import takeback as tb


def clobber(ws: tb.Workspace, size: int = 16, count: int = 4) -> None:
    """Takes and overwrites whatever is free."""
    with ws.step():
        taken = [ws.take(size).fill_(float("nan")) for _ in range(count)]
        del taken


class Scale(torch.autograd.Function):
    """x * w, with the product in scratch and the operands saved, one of them in scratch."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, ws: tb.Workspace) -> torch.Tensor:
        saved = ws.take(x.shape).copy_(x)
        ctx.save_for_backward(saved)
        return torch.mul(x, saved, out=ws.take(x.shape))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grad * 2 * saved, None


def test_a_buffer_saved_by_an_op_is_kept_back_while_the_graph_lives() -> None:
    ws = tb.Workspace()
    w = torch.arange(16.0, requires_grad=True)
    with ws.step():
        loss = (ws.take(16).fill_(3.0) * w).sum()
    assert ws.stats().kept_buffers == 1
    clobber(ws)
    loss.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [3.0] * 16
    del loss
    assert ws.stats().kept_buffers == 0


def test_a_buffer_saved_by_a_function_of_the_users_is_kept_back_while_the_graph_lives() -> None:
    ws = tb.Workspace()
    x = torch.arange(16.0, requires_grad=True)
    with ws.step():
        loss = Scale.apply(x, ws).sum()
    for _ in range(3):
        clobber(ws)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.arange(16.0))
    assert ws.stats().kept_buffers == 0  # the backward released what was saved


def test_scratch_that_became_part_of_a_graph_has_the_gradient_of_a_plain_tensor() -> None:
    ws = tb.Workspace()
    results = []
    for make in (ws.take, torch.empty):
        x = torch.linspace(-1, 1, 16).requires_grad_()
        with ws.step():
            y = make((16,)).copy_(x).exp_()
            z = make((16,)).copy_(y).mul_(x)
            loss = z.sum()
            del y, z
        clobber(ws)
        loss.backward()
        results.append(x.grad)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[3:5],
        lambda t: t.detach(),
        lambda t: t.view(torch.int32),
        lambda t: t.untyped_storage(),
        lambda t: t.numpy(),
        lambda t: torch.from_numpy(t.numpy()[2:]),
        lambda t: memoryview(t.numpy())[1:],
        lambda t: torch.utils.dlpack.to_dlpack(t),
    ],
    ids=["itself", "view", "detached", "other dtype", "storage", "numpy", "numpy view", "memoryview", "dlpack"],
)
def test_whatever_holds_the_bytes_keeps_them_back(hold: object) -> None:
    ws = tb.Workspace()
    assert callable(hold)
    with ws.step():
        t = ws.take(16).fill_(5.0)
        address, held = t.data_ptr(), hold(t)
        del t
    for _ in range(2):
        with ws.step():
            assert address not in {t.data_ptr() for t in [ws.take(16) for _ in range(3)]}
    assert ws.stats().kept_buffers == 1
    del held
    gc.collect()
    assert ws.stats().kept_buffers == 0
    with ws.step():
        assert address in {t.data_ptr() for t in [ws.take(16) for _ in range(4)]}


def test_bytes_go_between_inference_mode_and_training() -> None:
    ws = tb.Workspace()
    with torch.inference_mode(), ws.step():
        t = ws.take(16).fill_(1.0)
        address = t.data_ptr()
        assert t.is_inference()
        del t
    w = torch.ones(16, requires_grad=True)
    with ws.step():
        t = ws.take(16).fill_(2.0)
        assert t.data_ptr() == address
        (t * w).sum().backward()
        assert w.grad is not None
        assert w.grad.tolist() == [2.0] * 16


def test_scratch_taken_without_gradients_may_be_written_with_them() -> None:
    for debug in (False, True):
        ws = tb.Workspace(debug=debug)
        x = torch.ones(4, requires_grad=True)
        with ws.step():
            with torch.no_grad():
                t = ws.take(4)
            t.copy_(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [1.0] * 4


def test_under_torch_func_scratch_does_what_torch_empty_does() -> None:
    ws = tb.Workspace()
    x = torch.linspace(-1, 1, 6)

    def loss(x: torch.Tensor, make: object) -> torch.Tensor:
        assert callable(make)
        return make((6,)).copy_(x).exp_().sum()

    with ws.step():
        got = torch.func.grad(lambda x: loss(x, ws.take))(x)
    assert torch.equal(got, torch.func.grad(lambda x: loss(x, torch.empty))(x))


# -- tracers -----------------------------------------------------------------------------------------------------


def test_torch_compile_traces_through_in_one_graph_and_takes_nothing() -> None:
    ws = tb.Workspace()

    def f(x: torch.Tensor) -> torch.Tensor:
        with ws.step():
            return torch.mul(x, 2.0, out=ws.take(x.shape)) + 1

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    x = torch.arange(4.0)
    assert torch.equal(compiled(x), f(x))
    assert ws.stats().takes == 1  # of the plain call


def test_fake_tensors_and_make_fx_get_memory_of_their_own() -> None:
    ws = tb.Workspace()
    with ws.step():
        ws.take(4).fill_(7.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        with ws.step():
            return ws.take(4).copy_(x).mul_(2.0)

    with FakeTensorMode() as mode:
        assert f(mode.from_tensor(torch.ones(4))).shape == (4,)
    graph = make_fx(f)(torch.ones(4))
    assert torch.equal(graph(torch.full((4,), 5.0)), torch.full((4,), 10.0))
    assert ws.stats().takes == 1


def test_compile_step_compiles_a_step_that_takes_scratch() -> None:
    ws = tb.Workspace()

    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with ws.step():
            return ws.take((8, 3)).copy_(model(x)).square().mean()

    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = tb.compile_step(model, loss_fn, optimizer)
        for _ in range(4):
            x = torch.randn(8, 4)
            if compiled:
                losses.append(step(x))
            else:
                loss = loss_fn(model, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    assert all(torch.equal(a, b) for a, b in zip(losses[:4], losses[4:], strict=True))
