"""Writes the optimizer's update as ops of the program, for SGD, Adam and AdamW, on the path eager would take, or (mode
fast) in the one kernel that torch has for it: one pass over parameters and state instead of a dozen.

In: a program whose gradients are known, and the user's optimizer after its first own step (so that its state exists).
Out: the program with the update appended, and the formulas of its run-time scalars; or a reason why the optimizer's own
`step()` is called instead. capture/twin.py proves that this is what torch does.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from takeback.compiler.capture.optimizers import inner_of
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.update_writer import Formula, Group, UpdateWriter
from takeback.compiler.program import HyperScalar, Op, Phase, Program, Region, Role
from takeback.norm_cache import move_versions_

aten = torch.ops.aten

optimizer_module = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name

#: Hooks on every optimizer's step; checked on 2.11 and 2.13.
_GLOBAL_HOOKS = (
    optimizer_module._global_optimizer_pre_hooks,
    optimizer_module._global_optimizer_post_hooks,
)

_STATE_NAMES = {"sgd": ("momentum_buffer",), "adam": ("step", "exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Updates:
    """Those of all optimizers whose update is in the plan, in their order."""

    each: tuple[Update, ...]

    def scalars(self) -> list[float]:
        return [value for update in self.each for value in update.scalars()]

    def still_applies(self) -> bool:
        return all(update.still_applies() for update in self.each)

    @property
    def in_one_kernel(self) -> bool:
        """Whether one of them is, though eager takes another path."""
        return any(update.in_one_kernel for update in self.each)

    def note_(self) -> None:
        """What eager's step() would have noted of being called: a scheduler made since looks for it, and would warn
        (checked on 2.11 and 2.13)."""
        for update in self.each:
            if "step" in vars(update.optimizer):
                update.optimizer._opt_called = True


@dataclass(frozen=True)
class Update:
    """The formulas behind the update's scalars, and what must still be as it was for the update to apply."""

    optimizer: torch.optim.Optimizer
    formulas: tuple[Formula, ...]
    watched: tuple[tuple[torch.nn.Parameter, str, torch.Tensor], ...]  #: state tensors, by identity
    structure: tuple[object, ...]
    together: tuple[tuple[torch.Tensor, ...], ...] = ()  #: counts of steps that one number stands for
    in_one_kernel: bool = False  #: though eager takes another path

    def scalars(self) -> list[float]:
        """The values of all formulas now: hyper-parameters and step counts are read afresh."""
        groups = self.optimizer.param_groups
        known: dict[tuple[int, str, float], float] = {}
        values: list[float] = []
        for f in self.formulas:
            step = 0.0 if f.step is None else f.step.item() + 1.0
            key = (f.group, f.text, step)
            if key not in known:
                known[key] = f.function(groups[f.group], step)
            values.append(known[key])
        return values

    def still_applies(self) -> bool:
        """Whether eager would take the same update now, on the same tensors."""
        if own_step_reason(self.optimizer) is not None or self.structure != structure(self.optimizer):
            return False
        state: Mapping[Any, Any] = self.optimizer.state
        nothing: dict[str, Any] = {}
        for p, names, values in self._by_parameter:
            if not all(map(operator.is_, map(state.get(p, nothing).get, names), values)):
                return False
        return all(map(_are_equal, self.together))

    @functools.cached_property
    def _by_parameter(self) -> list[tuple[torch.nn.Parameter, tuple[str, ...], tuple[torch.Tensor, ...]]]:
        """What is watched, for each parameter at once: to look one up takes its hash, which is computed in Python."""
        grouped: dict[int, list[tuple[torch.nn.Parameter, str, torch.Tensor]]] = {}
        for each in self.watched:
            grouped.setdefault(id(each[0]), []).append(each)
        return [
            (of[0][0], tuple(name for _, name, _ in of), tuple(value for _, _, value in of)) for of in grouped.values()
        ]


def structure(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """What decides the sequence of the update's ops; the other settings are only numbers."""
    flags = ("nesterov", "maximize", "foreach", "fused", "amsgrad", "capturable", "differentiable")
    return tuple(
        (
            tuple(group.get(f) for f in flags),
            group.get("momentum", 0) != 0,
            group.get("weight_decay", 0) != 0,
            type(group.get("lr")),
            tuple(id(p) for p in group["params"]),
        )
        for group in optimizer.param_groups
    )


def own_step_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why this optimizer's update is not written into the plan, or None if it can be."""
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        inner = inner_of(optimizer)
        if inner is not None:
            return (
                f"{kind.__module__}.{kind.__qualname__} wraps {type(inner).__name__} and may do more than call its "
                f"step(); pass the optimizer inside it if it does not"
            )
        return f"{kind.__module__}.{kind.__qualname__} is not one whose update takeback writes out"
    replaced = _replaced_step(optimizer)
    if replaced is not None:
        return replaced
    tables = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *_GLOBAL_HOOKS)
    if any(hook is not move_versions_ for table in tables for hook in table.values()):  # a replay moves them as well
        return "the optimizer has step hooks"
    for group in optimizer.param_groups:
        for flag in ("maximize", "amsgrad", "capturable", "differentiable"):
            if group.get(flag):
                return f"{flag}=True"
        for name in ("lr", "weight_decay", "momentum", "eps", "dampening"):
            if isinstance(group.get(name), torch.Tensor):
                return f"{name} is a tensor"
        if any(isinstance(b, torch.Tensor) for b in group.get("betas", ())):
            return "betas are tensors"
        if any(p.is_complex() for p in group["params"]):
            return "a parameter is complex"
    return None


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _replaced_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Where somebody has put a function of his own in the place of step(), on this optimizer or on its class. torch's
    own do not count: learning-rate schedulers put one there that notes the call, and then calls step()."""
    step: Any = optimizer.step
    while step is not None:
        step = getattr(step, "__func__", step)
        code = getattr(step, "__code__", None)
        if code is None:
            return f"step was replaced by a {type(step).__qualname__}"
        if not code.co_filename.startswith(_TORCH):
            return f"step was replaced by {code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        step = getattr(step, "__wrapped__", None)
    return None


@dataclass(frozen=True)
class _Updated:
    """One parameter as the update sees it."""

    parameter: Region
    grad: Region
    states: Mapping[str, Region]
    step: torch.Tensor | None


def _are_equal(steps: Sequence[torch.Tensor]) -> bool:
    """Counts of steps; of fake ones it is not known, and where a step is foreseen, they are the first."""
    return len({step.item() for step in steps if type(step) is torch.Tensor}) <= 1


def _path(group: Group) -> str:
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None and group.get("fused") is None:  # torch decides: lists of tensors on CUDA, a loop on the CPU
        foreach = all(p.device.type == "cuda" for p in group["params"])
    return "foreach" if foreach else "single"


def _fits_one_kernel(slices: Sequence[_Updated]) -> bool:
    """What torch's kernels that update in one pass ask for: tensors of a parameter that are alike, and counts of steps
    that are one number."""
    for s in slices:
        alike = (s.parameter, s.grad, *(r for name, r in s.states.items() if name != "step"))
        if not s.parameter.dtype.is_floating_point or not s.parameter.packed:
            return False
        if any(
            (r.dtype, r.shape, r.stride) != (s.parameter.dtype, s.parameter.shape, s.parameter.stride) for r in alike
        ):
            return False
    return _are_equal([s.step for s in slices if s.step is not None])


def _write_group(
    w: UpdateWriter, kind: str, group: Group, slices: Sequence[_Updated], decoupled: bool, one_by_one: bool
) -> None:
    parts: dict[object, list[_Updated]] = {}
    for i, s in enumerate(slices):
        parts.setdefault(i if one_by_one else s.parameter.dtype, []).append(s)
    path = _path(group)
    if path != "fused" and w.one_kernel and _fits_one_kernel(slices):
        w.took_another_path = True
        count = _counted_on(w, slices) if kind == "adam" else None
        for part in parts.values():
            _sgd_fused(w, group, part, decoupled) if count is None else _adam_kernel(w, group, part, decoupled, count)
    elif path == "single":
        for s in slices:
            _sgd_single(w, group, s) if kind == "sgd" else _adam_single(w, group, s, decoupled)
    else:
        writer = {
            "sgdforeach": _sgd_foreach,
            "sgdfused": _sgd_fused,
            "adamforeach": _adam_foreach,
            "adamfused": _adam_fused,
        }[kind + path]
        for part in parts.values():
            writer(w, group, part, decoupled)


# -- SGD ---------------------------------------------------------------------------------------------------------


def _sgd_single(w: UpdateWriter, group: Group, s: _Updated) -> None:
    grad = s.grad
    if group["weight_decay"] != 0:
        grad = w.make(aten.add.Tensor, grad, s.parameter, alpha=_named(w, "weight_decay"))
    if group["momentum"] != 0:
        buf = s.states["momentum_buffer"]
        w.write(aten.mul_.Tensor, buf, _named(w, "momentum"))
        w.write(
            aten.add_.Tensor,
            buf,
            grad,
            alpha=w.scalar("1 - dampening", lambda g, _: 1 - g["dampening"]),
        )
        if group["nesterov"]:
            grad = w.make(aten.add.Tensor, grad, buf, alpha=_named(w, "momentum"))
        else:
            grad = buf
    w.write(aten.add_.Tensor, s.parameter, grad, alpha=w.scalar("-lr", lambda g, _: -g["lr"]))


def _sgd_foreach(w: UpdateWriter, group: Group, slices: Sequence[_Updated], _: bool) -> None:
    parameters = tuple(s.parameter for s in slices)
    grads: tuple[Region, ...] = tuple(s.grad for s in slices)
    if group["weight_decay"] != 0:
        grads = w.make(aten._foreach_add.List, grads, parameters, alpha=_named(w, "weight_decay"))
    if group["momentum"] != 0:
        bufs = tuple(s.states["momentum_buffer"] for s in slices)
        w.write(aten._foreach_mul_.Scalar, bufs, _named(w, "momentum"))
        damped = w.scalar("1 - dampening", lambda g, _: 1 - g["dampening"])
        w.write(aten._foreach_add_.List, bufs, grads, alpha=damped)
        if group["nesterov"]:
            w.write(aten._foreach_add_.List, grads, bufs, alpha=_named(w, "momentum"))
        else:
            grads = bufs
    w.write(aten._foreach_add_.List, parameters, grads, alpha=w.scalar("-lr", lambda g, _: -g["lr"]))


def _sgd_fused(w: UpdateWriter, group: Group, slices: Sequence[_Updated], _: bool) -> None:
    parameters = tuple(s.parameter for s in slices)
    bufs = tuple(s.states["momentum_buffer"] for s in slices) if group["momentum"] != 0 else ()
    grads = tuple(s.grad for s in slices)
    kwargs = {
        "weight_decay": _named(w, "weight_decay"),
        "momentum": _named(w, "momentum"),
        "lr": _named(w, "lr"),
        "dampening": _named(w, "dampening"),
        "nesterov": group["nesterov"],
        "maximize": False,
        "is_first_step": False,
        **w.scaled,
    }
    # torch marks the gradients as written too: the kernel scales them in place when there is a grad_scale.
    written = tuple(r.buffer for r in (*parameters, *grads, *bufs))
    w.ops.append(Op(aten._fused_sgd_.default, (parameters, grads, bufs), kwargs, (), written, Phase.UPDATE))


# -- Adam and AdamW ----------------------------------------------------------------------------------------------


def _named(w: UpdateWriter, name: str) -> HyperScalar:
    return w.scalar(name, lambda g, _: g[name])


def _beta(w: UpdateWriter, i: int) -> HyperScalar:
    return w.scalar(f"beta{i + 1}", lambda g, _: g["betas"][i])


def _one_minus_beta(w: UpdateWriter, i: int) -> HyperScalar:
    return w.scalar(f"1 - beta{i + 1}", lambda g, _: 1 - g["betas"][i])


def _decay(w: UpdateWriter) -> HyperScalar:
    return w.scalar("1 - lr * weight_decay", lambda g, _: 1 - g["lr"] * g["weight_decay"])


def _root_correction(w: UpdateWriter, step: torch.Tensor | None) -> HyperScalar:
    return w.scalar("sqrt(1 - beta2^t)", lambda g, t: (1 - g["betas"][1] ** t) ** 0.5, step)


def _adam_single(w: UpdateWriter, group: Group, s: _Updated, decoupled: bool) -> None:
    grad = s.grad
    m, v = s.states["exp_avg"], s.states["exp_avg_sq"]
    w.write(aten.add_.Tensor, s.states["step"], 1)
    if group["weight_decay"] != 0:
        if decoupled:
            w.write(aten.mul_.Tensor, s.parameter, _decay(w))
        else:
            grad = w.make(aten.add.Tensor, grad, s.parameter, alpha=_named(w, "weight_decay"))
    w.write(aten.lerp_.Scalar, m, grad, _one_minus_beta(w, 0))
    w.write(aten.mul_.Tensor, v, _beta(w, 1))
    w.write(aten.addcmul_.default, v, grad, grad, value=_one_minus_beta(w, 1))
    root = w.make(aten.sqrt.default, v)
    scaled = w.make(aten.div.Tensor, root, _root_correction(w, s.step))
    w.write(aten.add_.Tensor, scaled, _named(w, "eps"))
    size = w.scalar("-lr / (1 - beta1^t)", lambda g, t: -(g["lr"] / (1 - g["betas"][0] ** t)), s.step)
    w.write(aten.addcdiv_.default, s.parameter, m, scaled, value=size)


def _adam_foreach(w: UpdateWriter, group: Group, slices: Sequence[_Updated], decoupled: bool) -> None:
    parameters = tuple(s.parameter for s in slices)
    grads: tuple[Region, ...] = tuple(s.grad for s in slices)
    m = tuple(s.states["exp_avg"] for s in slices)
    v = tuple(s.states["exp_avg_sq"] for s in slices)
    steps = tuple(s.states["step"] for s in slices)
    one = w.borrow(torch.tensor(1.0, device="cpu"), Role.CONSTANT, "one")
    w.write(aten._foreach_add_.Tensor, steps, one, alpha=1.0)
    if group["weight_decay"] != 0:
        if decoupled:
            w.write(aten._foreach_mul_.Scalar, parameters, _decay(w))
        else:
            grads = w.make(aten._foreach_add.List, grads, parameters, alpha=_named(w, "weight_decay"))
    w.write(aten._foreach_lerp_.Scalar, m, grads, _one_minus_beta(w, 0))
    w.write(aten._foreach_mul_.Scalar, v, _beta(w, 1))
    w.write(aten._foreach_addcmul_.Scalar, v, grads, grads, _one_minus_beta(w, 1))
    sizes = tuple(
        w.scalar("-lr / (1 - beta1^t)", lambda g, t: (g["lr"] / (1 - g["betas"][0] ** t)) * -1, s.step) for s in slices
    )
    roots = w.make(aten._foreach_sqrt.default, v)
    corrections = tuple(_root_correction(w, s.step) for s in slices)
    w.write(aten._foreach_div_.ScalarList, roots, corrections)
    w.write(aten._foreach_add_.Scalar, roots, _named(w, "eps"))
    w.write(aten._foreach_addcdiv_.ScalarList, parameters, m, roots, sizes)


def _adam_fused(w: UpdateWriter, group: Group, slices: Sequence[_Updated], decoupled: bool) -> None:
    steps = tuple(s.states["step"] for s in slices)
    w.write(aten._foreach_add_.Scalar, steps, 1)
    _adam_kernel(w, group, slices, decoupled, *steps)
    if w.scaled:
        w.write(aten._foreach_sub_.List, steps, (w.scaled["found_inf"],) * len(steps))


def _counted_on(w: UpdateWriter, slices: Sequence[_Updated]) -> Region:
    """The count of this step, on the device, for an optimizer that counts on the host."""
    w.write(aten._foreach_add_.Scalar, tuple(s.states["step"] for s in slices), 1)
    w.together.append(tuple(s.step for s in slices if s.step is not None))
    return w.number(w.scalar("t", lambda _, t: t, slices[0].step))


def _adam_kernel(
    w: UpdateWriter, group: Group, slices: Sequence[_Updated], decoupled: bool, count: Region, *more: Region
) -> None:
    """`count`: of the steps, for all of them, or with `more` for each."""
    parameters = tuple(s.parameter for s in slices)
    grads = tuple(s.grad for s in slices)
    m = tuple(s.states["exp_avg"] for s in slices)
    v = tuple(s.states["exp_avg_sq"] for s in slices)
    steps = (count, *more) if more else (count,) * len(slices)
    kwargs = {
        "amsgrad": False,
        "lr": _named(w, "lr"),
        "beta1": _beta(w, 0),
        "beta2": _beta(w, 1),
        "weight_decay": _named(w, "weight_decay"),
        "eps": _named(w, "eps"),
        "maximize": False,
        **w.scaled,
    }
    target = aten._fused_adamw_.default if decoupled else aten._fused_adam_.default
    written = tuple(r.buffer for r in (*parameters, *grads, *m, *v))
    w.ops.append(Op(target, (parameters, grads, m, v, (), steps), kwargs, (), written, Phase.UPDATE))


# -- with a scaler -----------------------------------------------------------------------------------------------


def _for_kernels(w: UpdateWriter, program: Program, scaling: Scaling) -> dict[str, Region]:
    """What GradScaler.step sets on an optimizer whose kernels skip the update themselves."""
    assert program.found_inf is not None
    given: dict[str, Region] = {"found_inf": w.make(aten.add.Tensor, program.found_inf, 0)}
    if scaling.divides:
        scale = w.borrow(scaling.scale_tensor, Role.STATE, "scaler.scale")
        given["grad_scale"] = w.make(aten.mul.Tensor, scale, 1)
    return given


def lacks_state(optimizer: torch.optim.Optimizer, updated: Sequence[torch.nn.Parameter]) -> bool:
    """True if a state that `write_update` names is not there: no step of the optimizer has been run yet, because a
    scaler skipped it."""
    kind, ours = _kind(optimizer), {id(p) for p in updated}
    return any(
        optimizer.state.get(p, {}).get(name) is None
        for group in optimizer.param_groups
        for p in group["params"]
        for name in (_states(kind, group) if id(p) in ours else ())
    )


def missing_state_bytes(optimizer: torch.optim.Optimizer, updated: Sequence[torch.nn.Parameter]) -> int:
    """What the state will take that an optimizer's first step makes, as far as it is one that `write_update` knows."""
    kind, ours = _kind(optimizer), {id(p) for p in updated}
    return sum(
        p.nbytes
        for group in optimizer.param_groups
        for p in group["params"]
        for name in (_states(kind, group) if id(p) in ours else ())
        if name != "step" and optimizer.state.get(p, {}).get(name) is None
    )


# -- putting it together -----------------------------------------------------------------------------------------


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return "sgd" if type(optimizer) is torch.optim.SGD else "adam"


def _states(kind: str, group: Group) -> tuple[str, ...]:
    return _STATE_NAMES[kind] if kind == "adam" or group["momentum"] != 0 else ()


def write_update(
    program: Program,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    names: Mapping[int, str],
    *,
    one_by_one: bool = False,
    one_kernel: bool = False,
    scaling: Scaling | None = None,
    formulas: int = 0,
) -> tuple[Program, Update]:
    """The program with the optimizer's update appended. Call only if `own_step_reason` gave None. `one_by_one`: foreach
    and fused kernels are called for each parameter by itself, so that each update may run at a time of its own.
    `one_kernel`: where torch has one that updates in one pass, it is written, whatever path eager takes. `scaling`: the
    kernels that skip the update themselves are told of the program's `found_inf`. `formulas`: how many the updates
    written before have."""
    w = UpdateWriter(program, formulas, one_kernel=one_kernel)
    kind = _kind(optimizer)
    position = {id(p): i for i, p in enumerate(parameters)}
    if scaling is not None and scaling.in_kernel:
        w.scaled = _for_kernels(w, program, scaling)
    for index, group in enumerate(optimizer.param_groups):
        w.group = index
        slices: list[_Updated] = []
        for p in group["params"]:
            grad = program.grads.get(position[id(p)])
            if grad is None:
                continue
            table = optimizer.state.get(p, {})  # which is a defaultdict: to ask it for a state would make one
            states: dict[str, Region] = {}
            for name in _states(kind, group):
                w.watched.append((p, name, table[name]))
                states[name] = w.borrow(table[name], Role.STATE, f"{names[id(p)]}.{name}")
            parameter = w.borrow(p, Role.PARAMETER, names[id(p)])
            slices.append(_Updated(parameter, grad, states, table.get("step")))
        if slices:
            _write_group(w, kind, group, slices, bool(group.get("decoupled_weight_decay", False)), one_by_one)
    done = replace(program, ops=program.ops + tuple(w.ops), buffers=w.buffers, externals=w.externals)
    return done, Update(
        optimizer,
        tuple(w.formulas),
        tuple(w.watched),
        structure(optimizer),
        tuple(w.together),
        w.took_another_path,
    )
