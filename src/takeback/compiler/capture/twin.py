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
_TIMES, _UNITS = 2.0, 0.25  #: how far a kernel may be from double precision: eager's distance, units in the last place
_LONG = 131  #: numbers: some vectors and a rest. torch 2.13's kernel for SGD in bfloat16 on the CPU is wrong in vectors


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
    """None if torch's kernel for this kind of update is as near to double precision as the optimizer's own path is, in
    a few steps of twins; else what is not."""
    try:
        true = _after_steps(_twin(optimizer, twin_on, numel=_LONG, wide=True))
        plain = _after_steps(_twin(optimizer, twin_on, numel=_LONG))
        fused = _after_steps(_twin(optimizer, twin_on, numel=_LONG, fused=True, foreach=False))
    except RuntimeError as error:  # not on this device, or not for this dtype
        return f"{type(error).__name__}: {error}"
    for (name, exact), (_, theirs), (_, ours) in zip(true, plain, fused, strict=True):
        theirs_off, ours_off = (float(torch.linalg.vector_norm(t.double() - exact)) for t in (theirs, ours))
        unit = torch.finfo(theirs.dtype).eps * float(torch.linalg.vector_norm(exact))
        if not ours_off <= _TIMES * theirs_off + _UNITS * unit:
            return (
                f"its {name} is {ours_off:.2g} from double precision, that of the optimizer's own path {theirs_off:.2g}"
            )
    return None


def _after_steps(twin: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Parameters and state after a few steps on gradients that are the same for all twins."""
    drawn = torch.Generator().manual_seed(0)
    parameters = [p for group in twin.param_groups for p in group["params"]]
    for _ in range(3):
        for p in parameters:
            values = torch.randn(p.shape, generator=drawn).bfloat16()  # the same number in every dtype
            p.grad = values.to(device=p.device, dtype=p.dtype)
        twin.step()
    found = [("parameter", p.detach()) for p in parameters]
    found += [(k, v) for p in parameters for k, v in twin.state[p].items() if isinstance(v, torch.Tensor)]
    return [(name, value.cpu()) for name, value in found]


def _twin(
    optimizer: torch.optim.Optimizer, on: str | None, numel: int = 3, *, wide: bool = False, **otherwise: object
) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings, or with some `otherwise`, over two small parameters of each dtype; in
    double precision if it is `wide`."""
    groups: list[dict[str, object]] = []
    left_out = ("params", "initial_lr", "decoupled_weight_decay")
    for group in optimizer.param_groups:
        device = on or next((p.device for p in group["params"]), None)
        dtypes = list(dict.fromkeys(p.dtype for p in group["params"]))
        twins = [torch.nn.Parameter(torch.ones(numel, dtype=d, device=device)) for d in dtypes for _ in range(2)]
        twins = [torch.nn.Parameter(p.detach().double()) for p in twins] if wide else twins
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
