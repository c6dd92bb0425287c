"""What loss_fn returned: taken apart into loss and aux, and refused where a replay could not give eager's gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.capture.subject import Subject
from takeback.errors import CaptureError


def _named(loss_fn: Callable[..., Any]) -> str:
    """loss_fn's name, with file and line where it has one."""
    function = inspect.unwrap(loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__", function)
    code = getattr(function, "__code__", None)
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def split_loss(out: Any, loss_fn: Callable[..., Any]) -> tuple[Any, Any, bool]:
    """(loss, aux, whether there is aux) of what loss_fn returned."""
    if isinstance(out, tuple) and not hasattr(out, "_fields") and len(out) == 2:
        return out[0], out[1], True
    if isinstance(out, torch.Tensor):
        return out, None, False
    raise CaptureError(
        f"{_named(loss_fn)} returned a {type(out).__name__}; it must return the loss, or (loss, aux). "
        f"A transformers model returns an output object: return its .loss."
    )


def check_loss(loss: Any, subject: Subject, *, first: bool) -> None:
    name = _named(subject.loss_fn)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"the loss that {name} returned is a {type(loss).__name__}, not a tensor.")
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss that {name} returned has shape {tuple(loss.shape)}; it must be a scalar. "
            f"Reduce it with .mean() or .sum()."
        )
    if loss.is_complex():
        raise CaptureError(
            f"the loss that {name} returned is complex; a loss must be real. Take .abs() or .real of it."
        )
    if first and any(p.grad is not None for p in subject.parameters):
        raise CaptureError(
            f"{name} ran the backward itself (a parameter has a .grad). Return the loss; takeback runs forward, "
            f"backward and update."
        )
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss that {name} returned needs no gradient: no parameter with requires_grad=True led to it, or it "
            f"was detached, or computed under no_grad."
        )


@dataclass(frozen=True)
class Leaves:
    """What the loss depends on besides the model's parameters."""

    foreign: Mapping[torch.nn.Parameter, str]  #: of the modules that loss_fn holds, with their names
    reentrant: bool  #: a checkpoint hides what is inside of it, and must get the whole backward


def leaves_of(loss: torch.Tensor, subject: Subject, reachable: Sequence[torch.Tensor]) -> Leaves:
    """Eager would leave a gradient in every tensor that needs one; takeback does for the model's parameters only. For
    those of another module that is what people want (a discriminator in a generator's loss); the report says so. A
    tensor that belongs to no module is refused."""
    ours = {id(p) for p in subject.parameters}
    theirs = {id(t) for t in reachable if t.is_leaf and t.requires_grad} - ours
    modules = {p: f"{m}.{n}" for m, module in subject.beside.items() for n, p in module.named_parameters()}
    found: set[torch.nn.Parameter] = set()
    reentrant = False
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        reentrant = reentrant or node.name() == "CheckpointFunctionBackward"
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ours:
            if variable in modules:
                found.add(variable)
            elif id(variable) in theirs:
                raise CaptureError(
                    f"a tensor of shape {tuple(variable.shape)} that requires grad takes part in the loss, but is not "
                    f"a parameter of the model, so it would get no gradient. Make it a parameter of the model, or "
                    f"detach it."
                )
        pending.extend(following for following, _ in node.next_functions)
    if reentrant:
        found = {p for p in modules if p.requires_grad and id(p) not in ours}
    return Leaves({p: name for p, name in modules.items() if p in found}, reentrant)
