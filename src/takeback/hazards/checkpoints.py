"""Checkpointing, offloading and other hooks on what is saved for backward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Trial

kind = HazardKind("checkpointing and saved-tensor hooks")
hazard = kind.hazard


def _checkpointed(reentrant: bool, where: str, t: Trial) -> None:
    module, v, w = t.module(), t.leaf("v"), t.leaf("w")

    def block(*x: Tensor) -> Tensor:
        if where == "inside":
            other = v * w
            return (other + module(*(each * 0.9 for each in x))).sin()
        if where == "first":  # its input is what the checkpoint kept to run again
            return module(*x).sin()
        return module(*(each.tanh() for each in x))  # last: its output leaves the checkpoint

    other = v * w
    y = checkpoint(block, *t.inputs(), use_reentrant=reentrant)
    t.see("output", y)
    loss = t.loss(other + y)
    del y
    loss.backward()
    loss = t.loss(checkpoint(block, *t.inputs("b"), use_reentrant=reentrant))
    loss.backward()


for _reentrant in (False, True):
    for _where in ("inside", "first", "last"):
        hazard(f"checkpoint, use_reentrant={_reentrant}, the op {_where}")(
            functools.partial(_checkpointed, _reentrant, _where)
        )


@hazard("checkpoint of two ops in a row, retain_graph")
def checkpoint_twice(t: Trial) -> None:
    t.same_shape()
    first, second = t.module(0), t.module(1)

    def block(*x: Tensor) -> Tensor:
        return second(first(*(each * 0.9 for each in x)), *x[1:]) * 1.1

    loss = t.loss(checkpoint(block, *t.inputs(), use_reentrant=False))
    loss.backward(retain_graph=True)
    loss.backward()


@hazard("save_on_cpu")
def saved_on_cpu(t: Trial) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = t.loss(t.op(*t.inputs()))
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        other = t.leaf("v") * t.leaf("w")
        loss = t.loss(other + t.op(*t.inputs("b")), "d")
    loss.backward(retain_graph=True)
    loss.backward()


@hazard("saved-tensor hooks that keep what was packed")
def hooks_keep_packed(t: Trial) -> None:
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = t.loss(t.op(*t.inputs()))
    for i, saved in enumerate(packed):  # after the forward, which may update running statistics
        t.keep(f"packed tensor {i}", saved)
    loss.backward()


@hazard("saved-tensor hooks that pack a copy, twice unpacked")
def hooks_pack_copies(t: Trial) -> None:
    copies: list[tuple[Tensor, Tensor]] = []

    def pack(saved: Tensor) -> int:
        copies.append((saved.detach().clone(), saved.detach().clone()))
        return len(copies) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: copies[i][0]):
        loss = t.loss(t.op(*t.inputs()))
    loss.backward(retain_graph=True)
    loss.backward()
    t.kept += [(f"packed copy {i}", now, then) for i, (now, then) in enumerate(copies)]
