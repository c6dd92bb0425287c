"""CUDA: readers on another stream, and a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Skip, Trial

kind = HazardKind("CUDA streams and graphs")
hazard = kind.hazard


@dataclass(frozen=True)
class _Streams:
    """Two streams, and work that keeps the other reader's stream busy while the op's kernel starts on its own."""

    t: Trial
    main: Any
    side: Any
    busy: Tensor

    @classmethod
    def of(cls, t: Trial) -> _Streams:
        return cls(t, torch.cuda.current_stream(), torch.cuda.Stream(), torch.ones(2048, 2048, device=t.device))

    def delay(self, tensor: Tensor) -> Tensor:
        """In backward, the node that made the tensor is queued at once, and reads its gradient much later."""

        def work(_: Tensor) -> None:
            for _ in range(40):
                self.busy.mm(self.busy)

        tensor.register_hook(work)
        return tensor

    def on_side(self, make: Callable[..., Tensor], *reads: Tensor) -> Tensor:
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            made = make(*reads)
        self.main.wait_stream(self.side)
        for each in (*reads, made):
            each.record_stream(self.side)
            each.record_stream(self.main)
        return made


def _in_rounds(t: Trial, graph: Callable[[_Streams], Tensor]) -> None:
    """The first round compiles kernels, which takes longer than any delay."""
    for _ in range(3):
        t.without_gradients()
        graph(_Streams.of(t)).backward()
        torch.cuda.synchronize()


@hazard("two streams: the op on the side stream", cuda=True)
def op_on_side_stream(t: Trial) -> None:
    def graph(streams: _Streams) -> Tensor:
        y = streams.on_side(t.op, *t.inputs())
        return t.loss(y + streams.delay(t.leaf("v") * t.leaf("w")))

    _in_rounds(t, graph)


@hazard("two streams: the gradient's other reader on the side stream", cuda=True)
def reader_on_side_stream(t: Trial) -> None:
    def graph(streams: _Streams) -> Tensor:
        y = t.op(*t.inputs())
        return t.loss(y + streams.delay(streams.on_side(torch.mul, t.leaf("v"), t.leaf("w"))))

    _in_rounds(t, graph)


@hazard("two streams: the output's detached reader on the side stream", cuda=True)
def detached_on_side_stream(t: Trial) -> None:
    def graph(streams: _Streams) -> Tensor:
        y = t.op(*t.inputs())
        read = streams.delay(streams.on_side(lambda w, v: v * w, t.leaf("w"), y.detach()))
        return t.loss(read) + t.loss(y, "d")

    _in_rounds(t, graph)


@hazard("two streams: the input's other reader on the side stream", cuda=True)
def input_on_side_stream(t: Trial) -> None:
    if t.in_place:
        raise Skip("the op is known to write its input")

    def graph(streams: _Streams) -> Tensor:
        x = t.inputs()
        loss = t.loss(t.op(*x))
        for i, each in enumerate(x):
            weight = t.leaf(f"w{i}", each.shape)
            loss = loss + t.loss(streams.delay(streams.on_side(torch.mul, weight, each.detach())), f"d{i}")
        return loss

    _in_rounds(t, graph)


@hazard("CUDA graph, replayed", cuda=True)
def cuda_graph(t: Trial) -> None:
    module, c = t.module(), t.constant("c")
    v, w = t.leaf("v"), t.leaf("w")
    t.inputs()

    def step() -> None:
        other = v * w
        ((other + module(*t.inputs())) * c).sum().backward()
        (module(*t.inputs()) * c).sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            t.without_gradients()
            step()
    torch.cuda.current_stream().wait_stream(side)
    t.without_gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
