"""A model with a GradBuffer and its twin in plain eager: the same steps on both, then their gradients are compared.

The twin is copied before the buffer is made, so nothing of ours is in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import takeback

Loss = Callable[[nn.Module], torch.Tensor]


def twins(model: nn.Module, **options: Any) -> tuple[nn.Module, takeback.GradBuffer, nn.Module]:
    """The model with its buffer attached, the buffer, and an untouched copy."""
    eager = copy.deepcopy(model)
    return model, takeback.GradBuffer(model, **options), eager


def in_its_slice(buf: takeback.GradBuffer, p: torch.Tensor) -> bool:
    """Whether `.grad` lies where the slot says: asked by address, not by the slot's own view."""
    slot = next(s for s in buf.slots if s.param is p)
    flat, grad = buf.flats[slot.flat], p.grad
    assert grad is not None
    place = flat.data_ptr() + slot.offset * flat.itemsize
    same_storage = grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    empty = not p.numel()
    return (
        (empty or (same_storage and grad.data_ptr() == place)) and grad.stride() == p.stride() and grad.shape == p.shape
    )


def assert_same(
    model: nn.Module,
    buf: takeback.GradBuffer,
    eager: nn.Module,
    *,
    exact: Iterable[str] = (),
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Every gradient is eager's, or absent where eager's is; what is there lies in its slice."""
    exact = set(exact)
    names = [n for n, _ in model.named_parameters()]
    assert names == [n for n, _ in eager.named_parameters()]
    assert exact <= set(names), exact
    kept = {id(slot.param) for slot in buf.slots}
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None or not p.grad.any(), f"{name} has a gradient, eager's has none"
            continue
        assert p.grad is not None, f"{name} has no gradient"
        assert p.grad.dtype == q.grad.dtype, name
        if name in exact:
            assert torch.equal(p.grad, q.grad), name
        else:
            torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
        if id(p) in kept:
            assert in_its_slice(buf, p), f"{name} is not in its slice"


def backward_both(model: nn.Module, eager: nn.Module, loss: Loss, **how: Any) -> None:
    loss(model).backward(**how)
    loss(eager).backward(**how)


def big_copies(backward: Callable[[], object], sizes: set[int]) -> list[str]:
    """The copies and clones that a backward made of tensors of these element counts, counted by the profiler."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        backward()
    found = []
    for event in prof.events():
        if event.name in ("aten::copy_", "aten::clone", "aten::contiguous"):
            shapes = [s for s in event.input_shapes if isinstance(s, list)]
            if any(torch.Size(s).numel() in sizes for s in shapes):
                found.append(f"{event.name} {event.input_shapes}")
    return found
