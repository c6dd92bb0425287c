"""Checks what the user gave to compile_step, before anything runs, and puts a `Subject` together from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.capture.hooks import hooks_on
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.program import Role
from takeback.errors import CaptureError

_NEW_PLANS_BEFORE_WARNING = 4


@dataclass(frozen=True)
class Subject:
    """What is to be captured: the user's own objects, and how a step is put together from them."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    parameters: tuple[torch.nn.Parameter, ...]
    names: Mapping[int, str]  #: parameter names by id
    states: tuple[tuple[torch.Tensor, str], ...] = ()
    accumulate: int = 1
    clip_norm: float | None = None
    scaling: Scaling | None = None

    def known(self) -> dict[torch.Tensor, tuple[Role, str]]:
        found: dict[torch.Tensor, tuple[Role, str]] = {}
        for p in self.parameters:
            found[p] = (Role.PARAMETER, self.names[id(p)])
        for name, b in self.model.named_buffers():
            found.setdefault(b, (Role.BUFFER, name))
        for t, name in self.states:
            found.setdefault(t, (Role.STATE, name))
        if self.scaling is not None:
            found[self.scaling.scale_tensor] = (Role.STATE, "scaler.scale")
        return found


def check(model: Any, loss_fn: Any, optimizer: Any) -> None:
    """Raises for arguments that no step could be made of."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not callable(loss_fn):
        raise CaptureError(f"loss_fn must be callable as loss_fn(model, *batch), got {type(loss_fn).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CaptureError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CaptureError(
            "LBFGS evaluates the loss several times in one step through a closure, so it is not one forward, backward "
            "and update. Use it in eager."
        )
    if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise CaptureError(
            "the model is wrapped in DistributedDataParallel, which averages gradients where no recorder sees it, so a "
            "replay would not. Pass the module inside it (model.module), and the process group as group=."
        )
    known = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in known:
                raise CaptureError(
                    f"parameter {i} of group {g} of the optimizer (shape {tuple(p.shape)}) is not a parameter of the "
                    f"model. Make the optimizer from model.parameters(), after the model has its final parameters."
                )
    devices = sorted({str(t.device) for t in _placed(model)})
    if len(devices) > 1:
        raise CaptureError(
            f"the model is on more than one device ({', '.join(devices)}). Move it to one: model.to(device)."
        )
    if devices and device_of(model).type not in ("cpu", "cuda"):
        raise CaptureError(f"mode 'exact' runs on the CPU and on CUDA in this version; the model is on {devices[0]}.")


def _placed(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model is; the CPU if it has no tensor."""
    return next((t.device for t in _placed(model)), torch.device("cpu"))


def build(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    leaves: Sequence[torch.Tensor],
    *,
    accumulate: int,
    clip_norm: float | None,
    scaling: Scaling | None = None,
) -> Subject:
    """The subject of a recording, as the user's objects are now."""
    check(model, loss_fn, optimizer)
    device = device_of(model)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError("a step cannot be recorded while a CUDA graph is being captured. Run it once before.")
    hook = hooks_on(model)
    if hook is not None:
        raise CaptureError(
            f"there is {hook}, and a replay runs no Python, so it would be dropped. Remove it, or do its work inside "
            f"loss_fn (values to look at can be returned as aux)."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    storages = {p.untyped_storage()._cdata: names[id(p)] for p in model.parameters()}
    for i, leaf in enumerate(leaves):
        if leaf.layout is not torch.strided:
            raise CaptureError(
                f"tensor {i} of the batch has layout {leaf.layout}; takeback plans strided tensors only."
            )
        owner = storages.get(leaf.untyped_storage()._cdata)
        if owner is not None:
            raise CaptureError(
                f"tensor {i} of the batch is the parameter {owner!r}, or a view of it. The update would write it while "
                f"the batch is only borrowed. Read it through the model inside loss_fn."
            )
        if leaf.requires_grad:
            raise CaptureError(
                f"tensor {i} of the batch requires grad, and takeback computes the gradients of the model's parameters "
                f"only. Pass it detached; where loss_fn needs its gradient, call .requires_grad_() on a detached copy."
            )
        if leaf.device != device and leaf.device.type != "cpu":
            raise CaptureError(f"tensor {i} of the batch is on {leaf.device}, the model on {device}.")
    states = tuple(
        (value, f"{names.get(id(p), 'parameter')}.{name}")
        for p, table in optimizer.state.items()
        for name, value in table.items()
        if isinstance(value, torch.Tensor)
    )
    return Subject(model, loss_fn, tuple(model.parameters()), names, states, accumulate, clip_norm, scaling)


class NewPlans:
    """Warns when one step after the other needs a plan of its own, and says what varies."""

    def __init__(self) -> None:
        self._keys: list[Hashable] = []
        self._warned = False

    def steady(self) -> None:
        self._keys.clear()

    def note(self, key: Hashable) -> None:
        self._keys.append(key)
        if len(self._keys) < _NEW_PLANS_BEFORE_WARNING or self._warned:
            return
        self._warned = True
        varies = _difference(self._keys[-2], self._keys[-1])
        same = self._keys[-2] == self._keys[-1]
        advice = (
            "Pass such a value as a tensor, or change it between steps only."
            if same
            else "Pad to a few fixed sizes (buckets), pass numbers as tensors, or raise max_plans."
        )
        warnings.warn(
            f"takeback made {len(self._keys)} plans in a row: {varies}. Each new plan is recorded and "
            f"compared with eager, which takes a few steps' time. {advice}",
            RuntimeWarning,
            stacklevel=7,  # note, _record, _call, _in_turn, the turn, __call__, and the line that calls the step
        )


def _difference(before: Hashable, after: Hashable) -> str:
    """The first place where two keys differ, in words."""
    if isinstance(before, torch.Size) and isinstance(after, torch.Size):
        if len(before) == len(after):
            for dim, (a, b) in enumerate(zip(before, after, strict=True)):
                if a != b:
                    return f"dimension {dim} of a batch tensor varies ({tuple(before)}, then {tuple(after)})"
        return f"a batch tensor's shape varies ({tuple(before)}, then {tuple(after)})"
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        for a, b in zip(before, after, strict=True):
            if a != b:
                return _difference(a, b)
    if before == after:
        return "a Python value that the step reads changes between steps"
    return f"an argument varies ({before!r}, then {after!r})"
