"""An output that somebody holds, reads later or writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Skip, Trial

kind = HazardKind("an output that somebody holds")
hazard = kind.hazard


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "the output": lambda y: y,
    "its detach()": lambda y: y.detach(),
    "its .data": lambda y: y.data,
    "a view of it": lambda y: y[1:],
    "a view of its detach()": lambda y: y.detach().view(-1)[2:],
    "its storage": lambda y: y.untyped_storage(),
    "its numpy()": lambda y: y.detach().numpy(),
    "its DLPack alias": lambda y: torch.from_dlpack(y.detach()),
}


def _tensor(held: Any, y: Tensor) -> Tensor:
    if isinstance(held, Tensor):
        return held
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0, dtype=y.dtype, device=y.device).set_(held)
    return torch.from_numpy(held)


def _user_holds(form: str, t: Trial) -> None:
    if form == "its numpy()":
        t.needs_numpy()
    y = t.op(*t.inputs())
    held = HOLDS[form](y)
    like = torch.empty(0, dtype=y.dtype, device=y.device)
    then = _tensor(held, y).detach().clone()
    loss = t.loss(y)
    del y
    loss.backward()
    t.kept.append((form, _tensor(held, like).detach(), then))


for _form in HOLDS:
    hazard(f"the user holds {_form}")(functools.partial(_user_holds, _form))


@hazard("the user holds the input")
def holds_input(t: Trial) -> None:
    x = t.inputs()
    loss = t.loss(t.op(*x))
    for i, each in enumerate(x):
        t.keep(f"input {i}", each)
    loss.backward()


@hazard("the user holds the input from before the op")
def holds_input_before(t: Trial) -> None:
    if t.in_place:
        raise Skip("the op is known to write its input")
    x = t.inputs()
    for i, each in enumerate(x):
        t.keep(f"input {i}", each)
    t.loss(t.op(*x)).backward()


@hazard("the user holds a view of the input")
def holds_input_view(t: Trial) -> None:
    x = t.inputs()
    views = [each.detach().view(-1)[1:] for each in x]
    loss = t.loss(t.op(*x))
    del x
    for i, each in enumerate(views):
        t.keep(f"view of input {i}", each)
    loss.backward()


@hazard("a later backward reads a view of the output")
def view_saved_for_later(t: Trial) -> None:
    y = t.op(*t.inputs())
    flat = y.detach().reshape(-1)[1:-1]
    later = t.loss(flat * t.leaf("w", flat.shape))
    loss = t.loss(y)
    del y, flat
    loss.backward()
    later.backward()


@hazard("a later backward reads the output")
def output_saved_for_later(t: Trial) -> None:
    y = t.op(*t.inputs())
    later = t.loss(y.detach() * t.leaf("w"))
    loss = t.loss(y)
    del y
    loss.backward()
    later.backward()


@hazard("a later backward reads the output as another dtype")
def output_saved_as_integers(t: Trial) -> None:
    y = t.op(*t.inputs())
    held = y.detach().view(torch.int16 if y.element_size() == 2 else torch.int32)
    then = held.clone()
    loss = t.loss(y)
    del y
    loss.backward()
    t.see("bits unchanged", (held == then).all().float())


@hazard("the output has several readers")
def several_readers(t: Trial) -> None:
    y = t.op(*t.inputs())
    loss = t.loss(y.sin(), "c") + t.loss(y * t.leaf("w"), "d") + t.loss(y.reshape(-1)[3:].exp() * 0.1, "e") + y.sum()
    del y
    loss.backward()


@hazard("the output's reader saved it")
def reader_saves_output(t: Trial) -> None:
    t.loss(t.op(*t.inputs()).exp() * 0.1).backward()


@hazard("y * y")
def output_squared(t: Trial) -> None:
    def square(y: Tensor) -> Tensor:
        return y * y

    t.loss(square(t.op(*t.inputs()))).backward()


@hazard("the output is never read")
def unused_output(t: Trial) -> None:
    t.op(*t.inputs())
    t.loss(t.leaf("v") * t.leaf("w")).backward()
    t.loss(t.op(*t.inputs("b"))).backward()


@hazard("detach() branch")
def detached_branch(t: Trial) -> None:
    y = t.op(*t.inputs())
    loss = t.loss(y.detach() * t.leaf("w")) + t.loss(y, "d")
    del y
    loss.backward()


@hazard("the user writes the output in place")
def user_writes_output(t: Trial) -> None:
    y = t.op(*t.inputs())
    y = y * 2 if t.plain else y.mul_(2)
    t.loss(y).backward()


@hazard("the user writes a view of the output in place")
def user_writes_output_view(t: Trial) -> None:
    y = t.op(*t.inputs())
    y = y.clone() if t.plain else y
    y[0].mul_(3)
    t.loss(y).backward()


@hazard("the user writes the output's detach() in place")
def user_writes_detached(t: Trial) -> None:
    y = t.op(*t.inputs())
    if t.plain:
        y = y.clone()
    y.detach().mul_(2)
    t.loss(y).backward()
