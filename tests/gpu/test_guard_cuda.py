"""The guard on a GPU: raw writes of Triton kernels, other streams, checkpoints on the engine's threads, no alarms."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import takeback as tb
from takeback.nn import streams as streams_of_nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)


def by_triton(tensor: torch.Tensor) -> None:
    """A raw kernel: no version counter sees it."""
    import gpu_fill

    gpu_fill.fill[((tensor.numel() + 255) // 256,)](tensor.detach(), tensor.numel(), BLOCK=256)


def by_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(3)


def by_copy(tensor: torch.Tensor) -> None:
    torch.cuda.current_stream().synchronize()
    tensor.data.copy_(torch.full_like(tensor, 7, device="cpu"))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, write_gradient: Any, write_input: Any) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        ctx.writes = write_gradient, write_input
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dx = dy * 2
        for write, tensor in zip(ctx.writes, (dy, ctx.saved_tensors[0]), strict=True):
            if write is not None:
                write(tensor)
        return dx, None, None


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape or (33, 47), device="cuda", requires_grad=True)


def errors_of(step: Callable[[], object], **options: bool) -> list[tb.OverwriteError]:
    with tb.guard(on_error="collect", **options) as g:
        step()
        torch.cuda.synchronize()
    assert not [reason for reason in g.skipped if "cannot be read" in reason]
    return g.errors


WRITES = [by_triton, by_data, by_copy]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_saved_tensor_of_another_node(write: Callable[[torch.Tensor], None], exact: bool) -> None:
    def step() -> None:
        h = torch.tanh(leaf())
        Double.apply(h, None, write).square().mean().backward()

    [error] = errors_of(step, exact=exact)
    assert error.node == "DoubleBackward"
    assert re.match(r"TanhBackward0, which saved it as result, test_guard_cuda.py:\d+ in step\(\)", error.readers[0])


@pytest.mark.parametrize("write", WRITES)
def test_a_gradient_that_waits_at_the_other_branch(write: Callable[[torch.Tensor], None]) -> None:
    def step() -> None:
        x = leaf()
        e = x.exp()
        (e + Double.apply(x.cos(), write, None)).square().mean().backward()

    [error] = errors_of(step)
    assert "ExpBackward0, as its incoming gradient 0" in error.readers[0]


def test_a_variable_of_the_user_and_none() -> None:
    def step(keep: bool) -> None:
        h = leaf() * 3
        y = Double.apply(h, None, by_data)
        if not keep:
            del h
        y.square().mean().backward()

    assert errors_of(lambda: step(False)) == []
    [error] = errors_of(lambda: step(True))
    assert error.readers == ("your own code, through the variable h of step()",)


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        h = x.tanh()
        return Double.apply(h, None, by_data)

    def step() -> None:
        checkpoint(block, leaf() * 1, use_reentrant=reentrant).square().mean().backward()

    [error] = errors_of(step)
    assert error.node == "DoubleBackward"


def test_the_error_reaches_the_caller_and_leaves_the_engine_usable() -> None:
    with pytest.raises(tb.OverwriteError, match="DoubleBackward"), tb.guard():
        Double.apply(leaf().tanh(), None, by_data).square().mean().backward()
    x = leaf()
    x.square().mean().backward()
    assert x.grad is not None


def train(side: torch.cuda.Stream | None) -> tuple[list[torch.Tensor], dict[str, int]]:
    torch.manual_seed(0)
    gelu = tb.nn.GELU()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), tb.nn.InPlaceABN(8), nn.Dropout(0.2), nn.Conv2d(8, 4, 3), gelu, nn.Conv2d(4, 4, 3)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stream = side or torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(torch.randn(4, 3, 16, 16, device="cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().clone() for p in (*model.parameters(), *model.buffers())], dict(gelu.copies)


@pytest.mark.parametrize("every_node", [False, True])
@pytest.mark.parametrize("streams", [1, 2])
def test_training_has_no_alarm_the_same_bits_and_the_same_decisions(every_node: bool, streams: int) -> None:
    streams_of_nn.forget()
    side = torch.cuda.Stream() if streams == 2 else None
    torch.backends.cudnn.deterministic = True
    try:
        plain, copies = train(side)
        with tb.guard(every_node=every_node) as g:
            guarded, guarded_copies = train(side)
    finally:
        torch.backends.cudnn.deterministic = False
    assert g.errors == []
    assert copies == guarded_copies
    assert bool(copies) is (side is not None)  # on the default stream it is in place
    assert all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))


def test_grad_buffer_has_no_alarm() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    buffer = tb.GradBuffer(model)
    with tb.guard() as g:
        for _ in range(3):
            model(torch.randn(16, 32, device="cuda")).square().mean().backward()
    assert g.errors == []
    assert g.report()["checked"] > 0
    buffer.detach()
