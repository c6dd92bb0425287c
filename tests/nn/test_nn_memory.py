"""What the layers of takeback.nn keep for backward and take in backward, in bytes that torch's allocator was asked for.

`A` is one activation's bytes. The slack, A / 8, is for tables of channels and rows, which are far smaller.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from takeback.compiler.run import allocator
from takeback.nn import GELU, InPlaceABN, InPlaceLayerNorm, InPlaceRMSNorm, SwiGLU

NATIVE = allocator.load()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="memory is measured with the native allocator, which needs g++")

BATCH, CHANNELS, SIDE, WIDTH = 8, 16, 24, 64
A = BATCH * CHANNELS * SIDE * SIDE * 4
ROWS = A // WIDTH // 4
SLACK = A // 8
FORWARD, BACKWARD, NODE = 1, 2, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So that no worker's scratch is counted."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Taken:
    """Bytes of one forward and backward."""

    kept: int = 0  #: still alive after the forward, besides what lived before it
    peak: int = 0  #: the most alive
    of_node: list[int] = field(default_factory=list)  #: requests of more than the slack while the watched node ran
    largest: int = 0  #: of a request while the watched node ran


def measure(forward: Callable[[], Tensor], watch: str = "") -> Taken:
    """Of a step `forward().backward()`; `watch` is the name of a backward node."""
    assert NATIVE is not None
    gc.collect()
    cell = allocator.Cell()
    cell.view[0] = FORWARD
    seen = 0

    def enter(*_: Any) -> None:
        nonlocal seen
        seen += 1
        cell.view[0] = NODE

    def leave(*_: Any) -> None:
        cell.view[0] = BACKWARD

    with NATIVE.record(cell) as recording:
        loss = forward()
        cell.view[0] = BACKWARD
        for node in nodes(loss):
            if watch and node.name() == watch:
                node.register_prehook(enter)
                node.register_hook(leave)
        del node
        loss.backward()
    assert seen or not watch, f"no node is called {watch}"
    taken, level, sizes = Taken(), 0, dict[int, int]()
    for event in recording.events:
        block, op = int(event["id"]), int(event["op"])
        if event["kind"] == allocator.ALLOC:
            sizes[block] = int(event["size_bytes"])
            level += sizes[block]
            if op == NODE:
                taken.largest = max(taken.largest, sizes[block])
                taken.of_node += [sizes[block]] if sizes[block] > SLACK else []
        elif block in sizes:
            level -= sizes.pop(block)
        taken.peak = max(taken.peak, level)
        if op == FORWARD:
            taken.kept = level
    return taken


def nodes(loss: Tensor) -> list[Any]:
    found, stack = [], [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.append(node)
            stack += [next_node for next_node, _ in node.next_functions]
    return found


def ready(module: Any) -> Any:
    """With gradients already there, and everything that is made once made."""
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    return module


def images(last: bool = False) -> Tensor:
    x = torch.randn(BATCH, CHANNELS, SIDE, SIDE)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def step(model: Any, x: Tensor) -> Callable[[], Tensor]:
    model(x).sum().backward()
    return lambda: model(x).sum()


class Scale(nn.Module):
    """Something linear that saves its input, as a convolution does, and takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def plain(activation: nn.Module) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.BatchNorm2d(CHANNELS), activation]


def ours(activation: str) -> Callable[[], list[nn.Module]]:
    return lambda: [InPlaceABN(CHANNELS, activation=activation)]


def convolutions(norm: Callable[[], list[nn.Module]], depth: int = 4) -> nn.Sequential:
    conv = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(depth + 1)]
    layers = [layer for i in range(depth) for layer in (conv[i], *norm())]
    return ready(nn.Sequential(*layers, conv[depth]))


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
def test_a_chain_of_convolutions_and_in_place_norms_keeps_half(last: bool) -> None:
    """Each layer keeps its output where torch keeps input and output; both keep the last convolution's result."""
    depth, x = 4, images(last)
    kept = {}
    for name, norm in (("torch", plain(nn.LeakyReLU(0.01, inplace=True))), ("ours", ours("leaky_relu"))):
        model = convolutions(norm, depth)
        kept[name] = measure(step(model.to(memory_format=torch.channels_last) if last else model, x)).kept
    assert abs(kept["torch"] - (2 * depth) * A) < A + depth * SLACK, kept
    assert kept["ours"] <= kept["torch"] - depth * A + SLACK, kept
    assert kept["ours"] <= 0.56 * kept["torch"], kept


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_where_the_input_is_kept_it_is_one_buffer_with_the_output(activation: str) -> None:
    """The next convolution keeps the output, so there are two, as with ReLU; with SiLU torch keeps three."""
    torchs = nn.ReLU(inplace=True) if activation == "relu" else nn.SiLU()
    kept = [measure(step(convolutions(norm), images())).kept for norm in (plain(torchs), ours(activation))]
    spared = 0 if activation == "relu" else 4
    assert kept[1] <= kept[0] - spared * A + SLACK, kept


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("activation", ["identity", "leaky_relu", "elu", "relu", "silu"])
def test_backward_of_an_in_place_norm_takes_no_activation(activation: str, last: bool) -> None:
    model = convolutions(ours(activation), depth=2)
    model = model.to(memory_format=torch.channels_last) if last else model
    taken = measure(step(model, images(last)), watch="ActivatedNormBackward")
    assert taken.of_node == []
    assert all(m.copies == {} for m in model if isinstance(m, InPlaceABN))


def test_backward_of_torchs_norm_takes_some() -> None:
    """That the measurement can fail."""
    model = convolutions(plain(nn.LeakyReLU(0.01, inplace=True)), depth=2)
    taken = measure(step(model, images()), watch="NativeBatchNormBackward0")
    assert len(taken.of_node) >= 2
    assert set(taken.of_node) == {A}


def test_a_held_output_costs_one_activation() -> None:
    model = ready(nn.Sequential(Scale(), InPlaceABN(CHANNELS), Scale()))
    x, held = images(), []

    def forward() -> Tensor:
        held.append(y := model[1](model[0](x)))
        return model[2](y).sum()

    forward().backward()
    held.clear()
    assert measure(forward, watch="ActivatedNormBackward").of_node == [A]


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels_last"])
def test_peak_of_a_chain_is_lower_by_what_it_keeps_less(last: bool) -> None:
    peaks = []
    for norm in (plain(nn.LeakyReLU(0.01, inplace=True)), ours("leaky_relu")):
        layers = [layer for _ in range(5) for layer in (Scale(), *norm())]
        peaks.append(measure(step(ready(nn.Sequential(*layers)), images(last))).peak)
    assert peaks[1] <= peaks[0] - 4 * A, peaks


# -- rows --------------------------------------------------------------------------------------------------------------


def linears(*between: Callable[[], nn.Module], width: int = WIDTH, then: int = WIDTH) -> nn.Sequential:
    layers = [layer for made in between for layer in (nn.Linear(WIDTH, width), made(), nn.Linear(then, WIDTH))]
    return ready(nn.Sequential(*layers))


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("torchs", "made", "node"),
    [
        (nn.LayerNorm, InPlaceLayerNorm, "RowNormBackward"),
        (nn.RMSNorm, InPlaceRMSNorm, "RowNormBackward"),
    ],
    ids=["layer", "rms"],
)
def test_row_norms_keep_one_buffer_less_and_take_none_in_backward(torchs: Any, made: Any, node: str) -> None:
    theirs = measure(step(linears(lambda: torchs(WIDTH), lambda: torchs(WIDTH)), rows()))
    model = linears(lambda: made(WIDTH), lambda: made(WIDTH))
    mine = measure(step(model, rows()), watch=node)
    assert mine.kept <= theirs.kept - 2 * A + SLACK, (mine, theirs)
    assert mine.peak <= theirs.peak - A + SLACK, (mine, theirs)
    assert mine.of_node == []
    assert all(m.copies == {} for m in model if isinstance(m, made))


def test_a_layer_norm_on_the_residual_stream_keeps_one_buffer_less() -> None:
    class Block(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.norm, self.linear = norm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x))

    kept = []
    for norm in (nn.LayerNorm, InPlaceLayerNorm):
        model = ready(nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(norm) for _ in range(4))))
        kept.append(measure(step(model, rows())).kept)
    assert kept[1] <= kept[0] - 4 * A + SLACK, kept


class PlainSwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def test_swiglu_keeps_one_buffer_less_and_takes_none_in_backward() -> None:
    """torch keeps silu(gate) as well."""
    theirs = measure(step(linears(PlainSwiGLU, width=2 * WIDTH), rows()))
    mine = measure(step(linears(SwiGLU, width=2 * WIDTH), rows()), watch="SwiGLUFunctionBackward")
    assert mine.kept <= theirs.kept - A + SLACK, (mine, theirs)
    assert mine.of_node == []


class TwoSwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.swiglu = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.swiglu(self.gate(x), self.up(x))


def test_swiglu_of_two_tensors_takes_none_in_backward() -> None:
    model = ready(nn.Sequential(TwoSwiGLU(), nn.Linear(WIDTH, WIDTH)))
    assert measure(step(model, rows()), watch="SwiGLUFunctionBackward").of_node == []


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_takes_none_in_backward_where_torch_takes_one(approximate: str) -> None:
    theirs = measure(step(linears(lambda: nn.GELU(approximate)), rows()), watch="GeluBackward0")
    mine = measure(step(linears(lambda: GELU(approximate)), rows()), watch="GELUFunctionBackward")
    assert theirs.of_node == [A]
    assert mine.of_node == []
    assert mine.kept <= theirs.kept + SLACK
    assert mine.peak <= theirs.peak
