"""Workspace on a GPU: streams have buffers of their own, a backward's thread joins the step, graphs may be captured."""

from __future__ import annotations

import pytest
import torch

import takeback as tb

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA GPU", allow_module_level=True)

CUDA = "cuda"


def test_what_was_taken_on_one_stream_is_never_handed_out_on_another() -> None:
    ws = tb.Workspace()
    side = torch.cuda.Stream()
    found = []
    for stream in (torch.cuda.current_stream(), side, torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream), ws.step():
            found.append(ws.take(1000, device=CUDA).data_ptr())
    torch.cuda.synchronize()
    assert found[0] == found[2] != found[1] == found[3]
    assert ws.stats().misses == 2


def test_a_slow_reader_on_its_own_stream_is_not_overwritten_by_the_next_take() -> None:
    ws = tb.Workspace()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), ws.step():
        t = ws.take(1 << 20, device=CUDA).fill_(1.0)
        torch.cuda._sleep(50_000_000)
        total = t.sum()
        del t
    with ws.step():
        ws.take(1 << 20, device=CUDA).fill_(2.0)
    torch.cuda.synchronize()
    assert total.item() == 1 << 20


class Doubled(torch.autograd.Function):
    """Its backward runs in a thread of autograd's."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, ws: tb.Workspace) -> torch.Tensor:
        ctx.ws = ws  # type: ignore[attr-defined]
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ws = ctx.ws  # type: ignore[attr-defined]
        return torch.mul(grad, 2, out=ws.take(grad.shape, grad.dtype, grad.device)).clone(), None


@pytest.mark.parametrize("debug", [False, True])
def test_a_backward_in_autograds_thread_takes_in_the_step_that_is_open(debug: bool) -> None:
    ws = tb.Workspace(debug=debug)
    for _ in range(3):
        x = torch.ones(8, device=CUDA, requires_grad=True)
        with ws.step():
            Doubled.apply(x, ws).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 8
    assert ws.stats().misses == 1


def test_debug_mode_poisons_on_the_stream_of_the_scratch() -> None:
    ws = tb.Workspace(debug=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), ws.step():
        t = ws.take(16, device=CUDA).fill_(1.0)
        kept = t.clone()
    with pytest.raises(tb.WorkspaceError, match="after that step"):
        t.sum()
    torch.cuda.synchronize()
    assert kept.tolist() == [1.0] * 16


def test_a_capture_uses_what_is_there_and_refuses_to_allocate() -> None:
    ws = tb.Workspace()
    side = torch.cuda.Stream()
    x = torch.ones(64, device=CUDA)
    with torch.cuda.stream(side):
        with ws.step():
            ws.take(64, device=CUDA)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side), ws.step():
            out = torch.mul(x, 3, out=ws.take(64, device=CUDA)).clone()
            with pytest.raises(tb.WorkspaceError, match="while a CUDA graph is captured"):
                ws.take(1 << 20, device=CUDA)
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [3.0] * 64


def test_norms_are_not_shared_between_streams() -> None:
    cache = tb.NormCache()
    p = torch.nn.Parameter(torch.ones(4, device=CUDA))
    cache.norm(p)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert cache.norm(p) == 2
    assert (cache.hits, cache.misses) == (0, 2)
