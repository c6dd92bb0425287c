"""Checks what the user gave to compile_step, before anything runs, and puts a `Subject` together from it."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from takeback.compiler.capture.derived import Derived, derived_of, settle_
from takeback.compiler.capture.drawers import Drawers
from takeback.compiler.capture.hooks import hooks_on
from takeback.compiler.capture.modes import dispatch_mode
from takeback.compiler.capture.optimizers import Optimizers, check_disjoint, optimizers_of
from takeback.compiler.capture.reach import modules_beside
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.site import level_of_user
from takeback.compiler.program import Role, Site
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
    beside: Mapping[str, torch.nn.Module] = field(default_factory=dict)  #: modules that loss_fn holds, by name
    derived: tuple[Derived, ...] = ()
    updates: bool = True  #: False: gradients are left for a later update, neither unscaled nor clipped
    drawers: Drawers = field(default_factory=Drawers)  #: functions that a replay calls anew; recordings add to them
    exact: bool = True  #: a recording is to have eager's bits, also where torch computes otherwise while it is recorded
    given: dict[str, object] = field(default_factory=dict)  #: what the call has besides tensors, by path
    arguments: tuple[str, ...] = ()  #: the names of those that are given by position
    replaced: frozenset[int] = frozenset()  #: storages of tensors that others stand in for

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """All that the step may use."""
        return _modules_of(self.model, self.beside)

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


def check(
    model: Any, loss_fn: Any, optimizer: Any, scaler: object | None = None, *, anywhere: bool = False
) -> Optimizers:
    """Raises for arguments that no step could be made of. Gives the optimizers as the step has them. `anywhere`: it is
    not to run where the model is."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not callable(loss_fn):
        raise CaptureError(f"loss_fn must be callable as loss_fn(model, *batch), got {type(loss_fn).__name__}")
    optimizers = optimizers_of(optimizer, scaler)
    check_disjoint(optimizers.members)
    if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise CaptureError(
            "the model is wrapped in DistributedDataParallel, which averages gradients where no recorder sees it, so a "
            "replay would not. Pass the module inside it (model.module), and the process group as group=."
        )
    sharded = next((m for m in model.modules() if _is_sharded(m)), None)
    if sharded is not None:
        raise CaptureError(
            f"the model is sharded ({type(sharded).__name__}): FSDP gathers and frees its parameters, and averages its "
            f"gradients, by hooks that a replay would not run. Where a rank can hold the whole model, pass the plain "
            f"one and the process group as group=; else train it in eager."
        )
    known = {id(p) for p in model.parameters()}
    groups = [group for member in optimizers.members for group in member.param_groups]
    for g, group in enumerate(groups):
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
    if devices and not anywhere and device_of(model).type not in ("cpu", "cuda"):
        raise CaptureError(f"mode 'exact' runs on the CPU and on CUDA in this version; the model is on {devices[0]}.")
    return optimizers


def _check_initialized(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuses tensors of lazy modules that have no shape yet: the step would give them one, once."""
    for outer in modules.values():
        for name, tensor in (*outer.named_parameters(), *outer.named_buffers()):
            if torch.nn.parameter.is_lazy(tensor):
                raise CaptureError(
                    f"{name} of a lazy module has no shape yet: the first forward gives it one. Run the model once on "
                    f"such a batch before the first step, under torch.no_grad()."
                )


def _is_sharded(module: torch.nn.Module) -> bool:
    """By FullyShardedDataParallel or fully_shard; by name, for to import them takes a second."""
    return any(
        kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") and kind.__module__.startswith("torch.distributed")
        for kind in type(module).__mro__
    )


def _placed(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _modules_of(model: torch.nn.Module, beside: Mapping[str, torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    return tuple({id(m): m for outer in (model, *beside.values()) for m in outer.modules()}.values())


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model is; the CPU if it has no tensor."""
    return next((t.device for t in _placed(model)), torch.device("cpu"))


def check_surroundings() -> None:
    """Raises where something around the step would see a replay's ops."""
    mode = dispatch_mode()
    if mode is not None:
        raise CaptureError(
            f"the step is called inside of a TorchDispatchMode ({type(mode).__qualname__}), which would see a replay's "
            f"ops in place of eager's. Leave it before the step."
        )


def build(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer | Optimizers,
    leaves: Sequence[torch.Tensor],
    *,
    accumulate: int,
    clip_norm: float | None,
    scaling: Scaling | None = None,
    updates: bool = True,
    drawers: Drawers | None = None,
    exact: bool = True,
    given: dict[str, object] | None = None,
    arguments: tuple[str, ...] = (),
) -> Subject:
    """The subject of a recording, as the user's objects are now."""
    optimizers = check(model, loss_fn, optimizer)
    device = device_of(model)
    if device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError("a step cannot be recorded while a CUDA graph is being captured. Run it once before.")
    beside = modules_beside(model, loss_fn)
    hook = hooks_on({"": model, **beside})
    if hook is not None:
        raise CaptureError(
            f"there is {hook}, and a replay runs no Python, so it would be dropped. Remove it, or do its work inside "
            f"loss_fn (values to look at can be returned as aux)."
        )
    _check_initialized({"": model, **beside})
    derived = derived_of(_modules_of(model, beside))
    settle_(derived)
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
        for p, table in optimizers.states
        for name, value in table.items()
        if isinstance(value, torch.Tensor)
    )
    parameters = tuple(model.parameters())
    return Subject(
        model,
        loss_fn,
        parameters,
        names,
        states,
        accumulate,
        clip_norm,
        scaling,
        beside,
        derived,
        updates,
        drawers if drawers is not None else Drawers(),
        exact,
        given if given is not None else {},
        arguments,
    )


class NewPlans:
    """Warns when one step after the other needs a plan of its own, and says what varies."""

    def __init__(self, *, earned: bool = False) -> None:
        """`earned`: plans are not made again and again, but as far as steps earn them."""
        self._keys: collections.deque[Hashable] = collections.deque(maxlen=2)  # they may hold objects of the batch
        self._in_a_row = 0
        self._earned = earned
        self._warned = False
        self._read: Site | None = None

    def read_(self, site: Site | None) -> None:
        """The next plan is made because the value that was read into Python here is another one."""
        self._read = site

    def steady(self) -> None:
        self._keys.clear()
        self._in_a_row = 0

    def note(self, key: Hashable, changed: str | None = None) -> None:
        """`changed`: why the plan for this key could not be used, if there is one."""
        self._keys.append(key)
        self._in_a_row += 1
        read, self._read = self._read, None
        if self._in_a_row < _NEW_PLANS_BEFORE_WARNING or self._warned:
            return
        self._warned = True
        same = self._keys[-2] == self._keys[-1]
        varies = changed if same and changed else difference(self._keys[-2], self._keys[-1])
        if same and read is not None:
            varies = f"the value that is read into Python at {read.describe()} is another one each time"
        given = same and changed is not None and changed.startswith("the argument ")
        advice = (
            "If it is only looked at, return the tensor as aux and call .item() outside of the step; else keep it in a "
            "tensor (torch.where instead of if)."
            if same and read is not None
            else "Leave it out of the call if the step does not need it; if it does, pass it as a tensor."
            if given
            else "If the step needs a number that changes, pass it as a tensor; if not, do not read it there."
            if same
            else "Pad to a few fixed sizes (buckets), pass numbers as tensors, or raise max_plans."
        )
        earned = (
            ", so further ones are made as steps earn them, and until then such steps run plainly in eager"
            if self._earned and read is None
            else ""
        )
        warnings.warn(
            f"takeback made {self._in_a_row} plans in a row: {varies}. Each new plan is recorded and "
            f"compared with eager, which takes a few steps' time{earned}. {advice}",
            RuntimeWarning,
            stacklevel=level_of_user(),
        )


def difference(before: Hashable, after: Hashable, path: str = "") -> str:
    """The first place where two keys differ, in words. `path`: to that place, in the call."""
    if isinstance(before, torch.Size) and isinstance(after, torch.Size):
        if len(before) == len(after):
            for dim, (a, b) in enumerate(zip(before, after, strict=True)):
                if a != b:
                    return f"dimension {dim} of a batch tensor varies ({tuple(before)}, then {tuple(after)})"
        return f"a batch tensor's shape varies ({tuple(before)}, then {tuple(after)})"
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        named = len(before) == 2 and isinstance(before[0], str | int) and before[0] == after[0]
        if named:
            path = f"{path}[{before[0]!r}]" if path else str(before[0])
        for a, b in zip(before, after, strict=True):
            if a != b:
                return difference(a, b, path)
    if before == after:
        return "a Python value that the step reads changes between steps"
    what = f"the argument {path}" if path else "an argument"
    if isinstance(before, tuple) and isinstance(after, tuple):
        return f"{what} has {len(before)} entries, then {len(after)}"
    return f"{what} varies ({before!r}, then {after!r})"
