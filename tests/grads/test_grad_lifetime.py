"""detach(), and a buffer that simply goes, give the model back as it was; nothing is kept alive."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from grad_twins import backward_both, twins
from torch import nn
from torch.autograd.graph import get_gradient_edge

import takeback
from takeback.grads import slots as slots_of

TOKENS = torch.tensor([[1, 4, 4], [0, 2, 6]])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.Conv1d(3, 2, 1), nn.LayerNorm(3), nn.Conv1d(2, 2, 3))


def loss(m: nn.Module) -> torch.Tensor:
    return m(TOKENS).square().sum()


def fingerprint(m: nn.Module) -> list[object]:
    found: list[object] = []
    for name, module in m.named_modules():
        state = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        found.append((name, type(module), sorted(state), module.forward.__func__))
    for name, p in m.named_parameters():
        found.append((name, id(p), p.dtype, p.requires_grad, p._backward_hooks, p.grad_dtype))
    return found


@pytest.mark.parametrize("how", ["detach", "twice", "garbage", "fp32"])
@pytest.mark.parametrize("held", [False, True])
def test_the_model_is_as_it_was(how: str, held: bool) -> None:
    gc.collect()
    model = net()
    before, table = fingerprint(model), dict(slots_of._SLOTS)
    buf = takeback.GradBuffer(model, dtype=torch.float64 if how == "fp32" else None)
    assert fingerprint(model) != before
    if held:
        loss(model).backward()
    if how == "garbage":
        del buf
        gc.collect()
    else:
        buf.detach()
        assert not buf.attached
    if how == "twice":
        buf.detach()
    assert fingerprint(model) == before
    assert slots_of._SLOTS.keys() <= table.keys()


def test_after_detach_nothing_is_written_into_the_buffer() -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    buf.detach()
    for m in (model, eager):
        m.zero_grad()
    flat = buf.flat.clone()
    for _ in range(2):
        backward_both(model, eager, loss)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert torch.equal(flat, buf.flat)


def test_gradients_survive_detach_and_the_buffer() -> None:
    model, buf, eager = twins(net())
    backward_both(model, eager, loss)
    buf.detach()
    del buf
    gc.collect()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    backward_both(model, eager, loss)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_hooks_on_the_accumulate_nodes_are_gone_after_detach() -> None:
    model = net()
    buf = takeback.GradBuffer(model)
    node = get_gradient_edge(model[1].weight).node
    flat = buf.flat
    buf.detach()
    del buf
    gc.collect()
    torch.nn.functional.linear(torch.ones(4), model[1].weight).sum().backward()
    assert not flat.any()
    assert node is get_gradient_edge(model[1].weight).node


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("order", ["model first", "buffer first"])
def test_neither_model_nor_buffer_leaks(detach: bool, trained: bool, order: str) -> None:
    model = net()
    buf = takeback.GradBuffer(model)
    if trained:
        loss(model).backward()
        buf.clip_(1.0)
    refs = [weakref.ref(x) for x in (model, model[1], model[1].weight, buf, buf.slots[0], buf.flat)]
    if detach:
        buf.detach()
    if order == "model first":
        del model
        gc.collect()
        del buf
    else:
        del buf
        gc.collect()
        del model
    gc.collect()
    assert [r() for r in refs] == [None] * 6


def test_without_cycles_a_detached_model_goes_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = net()
        buf = takeback.GradBuffer(model)
        loss(model).backward()
        buf.detach()
        refs = [weakref.ref(model[1]), weakref.ref(model[1].weight), weakref.ref(buf.flat)]
        del buf, model
        assert [r() for r in refs] == [None] * 3
    finally:
        gc.enable()


def test_a_buffer_kept_in_its_model_does_not_leak() -> None:
    model = nn.Linear(3, 2)
    model.buf = takeback.GradBuffer(model)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_a_graph_keeps_working_when_its_buffer_goes_in_between() -> None:
    model, buf, eager = twins(net())
    graph = loss(model)
    del buf
    gc.collect()
    graph.backward()
    loss(eager).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_buffers_may_follow_each_other() -> None:
    model = net()
    eager = copy.deepcopy(model)
    for _ in range(4):
        buf = takeback.GradBuffer(model)
        backward_both(model, eager, loss)
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
        buf.detach()


def test_buffers_of_parts_of_one_model_do_not_disturb_each_other() -> None:
    """The first knows of the second part's module, for it was frozen only, and must not take its forward away."""
    source = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    source[1].requires_grad_(False)
    first = takeback.GradBuffer(source)
    source[1].requires_grad_(True)
    second = takeback.GradBuffer(source[1])
    source(torch.ones(2, 4)).sum().backward()
    assert (first.copies, second.copies) == (0, 0)
    first.detach()
    source.zero_grad()
    source(torch.ones(2, 4)).sum().backward()
    assert (second.copies, dict(second.reasons)) == (0, {})


def test_two_threads_may_run_backwards_on_one_model() -> None:
    """A product releases the interpreter: without a lock the second would overwrite the first."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 256)
    twin = copy.deepcopy(layer)
    buf = takeback.GradBuffer(layer)
    inputs = [torch.randn(64, 256) for _ in range(2)]
    for x in inputs:
        twin(x).square().sum().backward()
    for _ in range(10):
        layer.zero_grad()
        losses = [layer(x).square().sum() for x in inputs]
        barrier = threading.Barrier(2)

        def run(loss: torch.Tensor, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            loss.backward()

        threads = [threading.Thread(target=run, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-4, atol=1e-3)
    assert buf.copies == 0


def test_a_class_that_cannot_be_subclassed_is_left_alone() -> None:
    class Strict(nn.Linear):
        def __init_subclass__(cls, *, needed: int) -> None: ...

    model = nn.Sequential(nn.Linear(3, 3), Strict(3, 3))
    buf = takeback.GradBuffer(model)
    model(torch.ones(2, 3)).sum().backward()
    assert "cannot be subclassed" in buf.reasons["1.weight"]
    assert "0.weight" not in buf.reasons
