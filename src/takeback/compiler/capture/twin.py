"""Proves a written-out update on a twin: an optimizer of the same kind and settings over a few small parameters.

The twin takes a step under the recorder. What torch did must be, op for op and number for number, what
`capture/update.py` writes; the first difference is returned in words. Where the update is written as one kernel,
whatever path eager takes, two twins must come to the same numbers but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from takeback.compiler.capture.recorder import Recorder
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.update import write_update
from takeback.compiler.capture.update_writer import UpdateWriter
from takeback.compiler.program import Argument, Buffer, BufferId, HyperScalar, Op, Phase, Program, Region, Role

aten = torch.ops.aten
_DEFAULTS = (("alpha", 1.0), ("value", 1.0))
_ROUNDINGS = 16  #: of the largest number, that three steps may differ by


def disproof(
    optimizer: torch.optim.Optimizer, scaling: Scaling | None = None, twin_on: str | None = None
) -> str | None:
    """Runs the twin. None if torch did exactly what `write_update` writes, else the first difference. `scaling`: the
    step is taken through a scaler. `twin_on`: a device in place of that of the parameters."""
    twin = _twin(optimizer, twin_on)
    grads = [p for group in twin.param_groups for p in group["params"]]
    names = {id(p): f"p{g}.{i}" for g, group in enumerate(twin.param_groups) for i, p in enumerate(group["params"])}
    for p in grads:
        p.grad = torch.full_like(p, 0.5)
    for _ in range(2):
        twin.step()
    known: dict[torch.Tensor, tuple[Role, str]] = {}
    for p in grads:
        known[p] = (Role.PARAMETER, names[id(p)])
        known[p.grad] = (Role.CLOSURE, f"{names[id(p)]}.grad")
        for name, value in twin.state[p].items():
            if isinstance(value, torch.Tensor):
                known[value] = (Role.STATE, f"{names[id(p)]}.{name}")
    twin_scaling = scaling.twin(twin) if scaling is not None else None
    found_inf = torch.zeros((), device=grads[0].device)
    known[found_inf] = (Role.CLOSURE, "found_inf")
    if twin_scaling is not None:
        known[twin_scaling.scale_tensor] = (Role.STATE, "scaler.scale")
    empty = Program((), {}, {}, {}, Region(BufferId(0), torch.float32, (), (), 0))
    recorder = Recorder(known, ())
    base = UpdateWriter(empty)
    regions = {i: base.borrow(p.grad, Role.CLOSURE, f"{names[id(p)]}.grad") for i, p in enumerate(grads)}
    checked = base.borrow(found_inf, Role.CLOSURE, "found_inf")
    empty = replace(empty, buffers=base.buffers, externals=base.externals, grads=regions, found_inf=checked)
    written, update = write_update(empty, twin, grads, names, scaling=twin_scaling)
    scalars = update.scalars()
    recorder.phase = Phase.UPDATE
    with recorder:
        if twin_scaling is not None:
            twin_scaling.optimize_(found_inf)
        else:
            twin.step()
    ours = _canonical(written.ops, written.buffers, scalars)
    # torch.tensor(1.0) inside the optimizer is a constant here, and a copy of one to the recorder.
    lifted = {
        op.outputs[0].buffer
        for op in recorder.ops
        if op.target is aten.clone.default and recorder.table.buffers[op.inputs[0].buffer].role is Role.CONSTANT
    }
    buffers = {
        b: replace(buffer, role=Role.CONSTANT) if b in lifted else buffer
        for b, buffer in recorder.table.buffers.items()
    }
    real = [op for op in recorder.ops if op.expected is None and not any(r.buffer in lifted for r in op.outputs)]
    theirs = _canonical(real, buffers, scalars)
    for mine, torchs in zip(ours, theirs, strict=False):
        if mine != torchs:
            return f"torch {torch.__version__} updates with {torchs} where takeback wrote {mine}"
    if len(ours) != len(theirs):
        return f"torch {torch.__version__} updates with {len(theirs)} ops where takeback wrote {len(ours)}"
    return None


def differs_in_one_kernel(optimizer: torch.optim.Optimizer, twin_on: str | None = None) -> str | None:
    """None if torch's kernel for this kind of update comes to the numbers that the optimizer's own path does, in a few
    steps of a twin; else what does not."""
    try:
        plain, fused = _twin(optimizer, twin_on), _twin(optimizer, twin_on, fused=True, foreach=False)
        for number in range(3):
            for twin in (plain, fused):
                for i, p in enumerate(p for group in twin.param_groups for p in group["params"]):
                    p.grad = torch.linspace(-1, 1, p.numel(), device=p.device).mul(0.3 + i + number).to(p.dtype)
                twin.step()
    except RuntimeError as error:  # not on this device, or not for this dtype
        return f"{type(error).__name__}: {error}"
    pairs = zip(plain.param_groups, fused.param_groups, strict=True)
    for theirs, ours in ((a, b) for one, other in pairs for a, b in zip(one["params"], other["params"], strict=True)):
        for name, value in {"parameter": theirs.data, **plain.state[theirs]}.items():
            found = ours.data if name == "parameter" else fused.state[ours][name]
            if isinstance(value, torch.Tensor):
                off = float((found.double().cpu() - value.double().cpu()).abs().max())
                if off > _ROUNDINGS * torch.finfo(value.dtype).eps * max(1.0, float(value.abs().max())):
                    return f"its {name} differs by {off:.2g}"
    return None


def _twin(optimizer: torch.optim.Optimizer, on: str | None, **otherwise: object) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings, or with some `otherwise`, over two small parameters of each dtype."""
    groups: list[dict[str, object]] = []
    left_out = ("params", "initial_lr", "decoupled_weight_decay")
    for group in optimizer.param_groups:
        device = on or next((p.device for p in group["params"]), None)
        dtypes = list(dict.fromkeys(p.dtype for p in group["params"]))
        twins = [torch.nn.Parameter(torch.ones(3, dtype=d, device=device)) for d in dtypes for _ in range(2)]
        groups.append({k: v for k, v in group.items() if k not in left_out} | {"params": twins} | otherwise)
    settings = {k: v for k, v in optimizer.defaults.items() if k != "decoupled_weight_decay"}
    return type(optimizer)(groups, **settings)


def _canonical(
    ops: Sequence[Op], buffers: Mapping[BufferId, Buffer], scalars: Sequence[float]
) -> list[tuple[object, ...]]:
    """Ops as comparable data: borrowed buffers by name, internal ones by the order in which they are made."""
    order: dict[BufferId, int] = {}

    def show(arg: Argument) -> object:
        if isinstance(arg, Region):
            buffer = buffers[arg.buffer]
            name = buffer.name
            if buffer.role in (Role.INTERNAL, Role.CONSTANT):
                name = f"{buffer.role.value}{order.setdefault(arg.buffer, len(order))}"
            return (name, arg.dtype, arg.shape, arg.stride)
        if isinstance(arg, HyperScalar):
            return float(scalars[arg.index])
        if isinstance(arg, tuple):
            return tuple(show(a) for a in arg)
        return float(arg) if isinstance(arg, int | float) and not isinstance(arg, bool) else arg

    def show_named(op: Op) -> tuple[tuple[str, object], ...]:
        shown = ((name, show(arg)) for name, arg in op.kwargs.items())
        # The dispatcher drops arguments that have their default value.
        return tuple(sorted((n, v) for n, v in shown if v is not None and (n, v) not in _DEFAULTS))

    found: list[tuple[object, ...]] = []
    for op in ops:
        found.append((str(op.target), tuple(show(a) for a in op.args), show_named(op)))
        show(op.results)
    return found
