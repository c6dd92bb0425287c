"""Random small networks of shared layers and functional uses, driven at random: the gradients are always eager's.

A network is a list of instructions over one [ROWS, WIDTH] value; a drive is a list of backwards, zeroings and reads.
Everything is float64, so that only a wrong gradient can be far from eager's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from grad_twins import assert_same
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import takeback

ROWS, WIDTH = 3, 4
WHERE = torch.tensor([0, 3, 3])


class Shared(nn.Module):
    """Two layers, two tables and a 1×1 convolution, some of which share their weights."""

    def __init__(self, tie: int) -> None:
        super().__init__()
        torch.manual_seed(tie)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.table, self.padded = nn.Embedding(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH, padding_idx=3)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.free = nn.Parameter(torch.randn(WIDTH))
        self.double()
        if tie & 1:
            self.b.weight = self.table.weight
        if tie & 2:
            self.padded.weight = self.a.weight
        if tie & 4:
            self.conv.bias = self.a.bias
        if tie & 8:
            self.free = self.conv.bias


Op = Callable[[Shared, torch.Tensor], torch.Tensor]
OPS: dict[str, Op] = {
    "a": lambda m, x: m.a(x),
    "b": lambda m, x: m.b(x),
    "table": lambda m, x: x + m.table(WHERE),
    "padded": lambda m, x: x * m.padded(WHERE),
    "conv": lambda m, x: m.conv(x.t()[None])[0].t(),
    "conv rows": lambda m, x: m.conv(x[:, :, None])[:, :, 0],
    "functional a": lambda m, x: F.linear(x, m.a.weight, m.a.bias),
    "functional b": lambda m, x: x @ m.b.weight.t(),
    "functional table": lambda m, x: x + F.embedding(WHERE, m.table.weight),
    "weights": lambda m, x: x * m.a.weight.sum() + m.padded.weight[:ROWS],
    "shift": lambda m, x: x + m.free,
    "again": lambda m, x: m.a(x) + m.a(x),
    "reentrant": lambda m, x: checkpoint(lambda y: m.b(m.a(y)), x, use_reentrant=True),
    "reentrant mixed": lambda m, x: checkpoint(lambda y: F.linear(m.b(y), m.b.weight), x, use_reentrant=True),
    "checkpoint": lambda m, x: checkpoint(lambda y: m.a(m.table(WHERE) + y), x, use_reentrant=False),
    "itself": lambda m, x: x + x,
    "no grad": lambda m, x: x + m.a(x).detach(),
}
DRIVES = ["backward", "none", "zero", "buffer", "retain", "grad", "norm", "clip", "inputs", "outside", "hook", "freeze"]


def run(m: Shared, net: list[str]) -> torch.Tensor:
    x = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).requires_grad_()
    y = x
    for name in net:
        y = OPS[name](m, y).tanh()
    return y.square().sum() + m.free.sum() * 0.1


def drive(m: Shared, net: list[str], act: str, buf: takeback.GradBuffer | None) -> object:
    if act in ("grad", "inputs"):  # torch refuses both with a reentrant checkpoint
        net = [name for name in net if "reentrant" not in name]
    if act == "backward":
        return run(m, net).backward()
    if act == "none":
        return m.zero_grad()
    if (act in ("zero", "buffer") and buf is None) or act == "zero":
        return m.zero_grad(set_to_none=False)
    if act == "buffer":
        return buf.zero_()
    if act == "retain":
        loss = run(m, net)
        loss.backward(retain_graph=True)
        return loss.backward()
    if act == "grad":
        asked = [p for p in m.parameters() if p.requires_grad]
        grads = torch.autograd.grad(run(m, net), asked, allow_unused=True)
        return [g for g in grads if g is not None]
    held = [p.grad for p in m.parameters() if p.grad is not None]
    if act == "norm":
        flat = torch.cat([torch.zeros(1, dtype=torch.float64), *(g.flatten() for g in held)])
        return torch.linalg.vector_norm(flat) if buf is None else buf.norm()
    if act == "clip":
        return torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) if buf is None else buf.clip_(0.5)
    if act == "inputs":
        return run(m, net).backward(inputs=[m.free]) if m.free.requires_grad else None
    if act == "outside":
        m.a.weight.grad = torch.full_like(m.a.weight, 0.5)
        return None
    if act == "hook" and m.a.weight.requires_grad:
        handle = m.a.weight.register_hook(lambda g: g * 2)
        run(m, net).backward()
        return handle.remove()
    if act == "freeze":
        m.a.requires_grad_(not m.a.weight.requires_grad)
    return None


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tie=st.integers(0, 15),
    nets=st.lists(st.lists(st.sampled_from(list(OPS)), min_size=1, max_size=4), min_size=2, max_size=2),
    acts=st.lists(st.tuples(st.sampled_from(DRIVES), st.integers(0, 1)), min_size=1, max_size=7),
)
@example(tie=1, nets=[["table", "b", "functional b"], ["b"]], acts=[("backward", 0), ("buffer", 0), ("backward", 1)])
@example(tie=3, nets=[["reentrant mixed", "b"], ["a"]], acts=[("backward", 0), ("retain", 0), ("none", 0), ("clip", 0)])
@example(tie=0, nets=[["a"], ["b"]], acts=[("buffer", 0), ("backward", 0), ("none", 0), ("norm", 0)])
@example(tie=0, nets=[["a"], ["b"]], acts=[("backward", 0), ("none", 0), ("backward", 1), ("clip", 0)])
def test_gradients_are_eagers(tie: int, nets: list[list[str]], acts: list[tuple[str, int]]) -> None:
    model = Shared(tie)
    eager = copy.deepcopy(model)
    buf = takeback.GradBuffer(model)
    try:
        for act, which in [*acts, ("backward", 0), ("norm", 0)]:
            ours, theirs = drive(model, nets[which], act, buf), drive(eager, nets[which], act, None)
            if isinstance(theirs, list | torch.Tensor):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, check_dtype=False)
            if act == "outside":  # it is in its slice after the next backward or read
                continue
            buf.gather_()
            assert_same(model, buf, eager, rtol=1e-9, atol=1e-9)
        packed = {slot.name for slot in buf.slots if slot.copies}
        assert set(buf.reasons) <= packed
    finally:
        buf.detach()
