"""Compares a compiled step with eager, bit for bit: once for every new plan, and every n-th step if asked to.

`eager_digest` runs forward and backward in eager and takes them back; what it saw is kept as checksums, so that it
costs time once and no memory. `verified` runs whole steps both ways and compares every tensor.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.capture.record_step import Capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.program import Program
from takeback.compiler.run.commit import Gate
from takeback.compiler.run.eager import eager_gradients, eager_step
from takeback.compiler.run.replay import Replay, generators_of, written_before_update
from takeback.compiler.run.steadiness import steadiness
from takeback.errors import CaptureError, VerifyError

_SEEN = (
    "Either the step reads something that takeback cannot see (a clock, a file, Python state out of its sight), or "
    "this is a bug of takeback's: please report it with str(step.report())."
)


_FOUND_INF = "the scaler's found_inf"


def _advice(program: Program) -> str:
    return steadiness(program) + _SEEN


@dataclass(frozen=True)
class Recipe:
    """What eager needs to run the same step."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    accumulate: int = 1
    clip_norm: float | None = None
    scaling: Scaling | None = None


def checksum(tensor: torch.Tensor, *, one_nan: bool = False) -> int:
    """Equal bits have equal checksums, and different bits almost never do. `one_nan`: any NaN equals any other."""
    flat = tensor.detach().contiguous().reshape(-1)
    if one_nan and flat.is_floating_point() and bool(flat.isnan().any()):
        flat = torch.where(flat.isnan(), torch.nan, flat)
    flat = flat.view(torch.uint8)
    if flat.device.type != "cpu":
        return _checksum_there(flat)
    return zlib.crc32(flat.numpy().data)


def _sums(program: Program) -> Callable[[torch.Tensor], int]:
    """With a scaler steps with NaNs are right ones, and which NaN it is may depend on where it lies."""
    return functools.partial(checksum, one_nan=program.found_inf is not None)


_CHUNK_BYTES = 1 << 20  #: so that a checksum on the device takes a few tens of MiB at most
_MIX = (-7046029254386353131, 2685821657736338717)  #: odd numbers of 64 bits


def _checksum_there(flat: torch.Tensor) -> int:
    """The same where the tensor lies: whole numbers add up to the same sum in any order."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(min(_CHUNK_BYTES, flat.numel()), device=flat.device)
    places = (places * _MIX[0]) ^ (places >> 7)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        part = flat[start : start + _CHUNK_BYTES]
        mixed = (part.to(torch.int64) + 1) * (places[: part.numel()] * 2 + 1)
        total = total * _MIX[1] + (mixed ^ (mixed >> 29)).sum()
    return int(total.item())


@contextlib.contextmanager
def taken_back(executor: Replay, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Puts back what a forward and backward write besides gradients: statistics, the batch, random states."""
    program = executor.program
    live = [program.externals[b] for b in written_before_update(program) if b in program.externals]
    live += [leaves[i].detach() for i in executor.written_leaves]
    saved = [t.clone() for t in live]
    states = [(g, g.get_state()) for g in generators_of(program)]
    with Gate() as gate:
        try:
            gate.open = True
            yield
            gate.open = False
        finally:
            gate.open = False
            with torch.no_grad():
                for t, before in zip(live, saved, strict=True):
                    t.copy_(before)
            for generator, state in states:
                generator.set_state(state)


def _gradients(recipe: Recipe) -> torch.Tensor:
    """Eager's forward and backward, as far as a plan computes before its update: with a scaler, gradients are unscaled
    and clipped."""
    scaling = recipe.scaling
    if scaling is not None:
        scaling.begin_()
    loss = eager_gradients(
        recipe.model, recipe.loss_fn, recipe.args, recipe.kwargs, accumulate=recipe.accumulate, scaler=scaling
    )
    if scaling is not None:
        scaling.unscale_()
        if recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(recipe.model.parameters(), recipe.clip_norm)
    return loss


def eager_digest(recipe: Recipe, executor: Replay, leaves: Sequence[torch.Tensor]) -> dict[str, int]:
    """Checksums of eager's loss, gradients and statistics for this step, which is then taken back."""
    parameters = list(recipe.model.parameters())
    try:
        with taken_back(executor, leaves), torch.enable_grad():
            sum_of = _sums(executor.program)
            found = {"loss": sum_of(_gradients(recipe))}
            found |= {f"grad{i}": sum_of(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
            if recipe.scaling is not None:
                found[_FOUND_INF] = sum_of(recipe.scaling.found_inf)
            return found | _statistics(executor)
    finally:
        for p in parameters:
            p.grad = None


def compare(
    expected: Mapping[str, int], executor: Replay, leaves: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Raises `VerifyError` if the step that has just been computed differs from what eager's digest says."""
    program = executor.program
    sum_of = _sums(program)
    found = {"loss": sum_of(executor.tensor(program.loss, leaves))}
    found |= {f"grad{i}": sum_of(executor.tensor(r, leaves)) for i, r in program.grads.items() if executor.holds(r)}
    if program.found_inf is not None:
        found[_FOUND_INF] = sum_of(executor.tensor(program.found_inf, leaves))
    found |= _statistics(executor)
    gone = {f"grad{i}" for i, r in program.grads.items() if not executor.holds(r)}
    for key in dict.fromkeys((*expected, *found)):
        if key not in gone and expected.get(key) != found.get(key):
            what = f"the gradient of {names[int(key[4:])]}" if key.startswith("grad") else key
            raise VerifyError(
                f"a new plan's first step was compared with eager, and {what} has other bits. The step was taken back: "
                f"model and optimizer are as before it. {_advice(executor.program)}"
            )


def prove_recording(recipe: Recipe, got: Capture, *, unclipped: bool = False) -> None:
    """Runs the recorded forward and backward again without the recorder, and compares. Eager's results are what stays;
    `unclipped`: its gradients as they were before they were clipped, for whoever has to average them first.

    torch's own formulas ask whether somebody is looking (at::isTensorSubclassLike), and some then take another way.
    """
    parameters = list(recipe.model.parameters())
    sum_of = _sums(got.program)

    def digest(loss: torch.Tensor) -> dict[str, int]:
        found = {"loss": sum_of(loss)}
        found |= {f"grad{i}": sum_of(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
        return found | {f"statistic {i}": sum_of(t) for i, t in enumerate(got.statistics)}

    def again() -> dict[str, int]:
        got.rewind_()
        with torch.enable_grad():
            loss = _gradients(recipe)
        if recipe.clip_norm is not None and recipe.scaling is None:
            if unclipped:
                raw.update({p: p.grad.clone() for p in parameters if p.grad is not None})
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        torch.clear_autocast_cache()
        return digest(loss)

    raw: dict[torch.nn.Parameter, torch.Tensor] = {}
    recorded = digest(got.loss)
    try:
        plain = again()
        different = [key for key in dict.fromkeys((*plain, *recorded)) if plain.get(key) != recorded.get(key)]
        if different:
            names = [name for name, _ in recipe.model.named_parameters()]
            what = ", ".join(
                f"the gradient of {names[int(k[4:])]}" if k.startswith("grad") else k for k in different[:3]
            )
            shaky = steadiness(got.program, seen=got.program.device_type == "cuda" and again() != plain)
            raise CaptureError(
                f"the step gives other bits each time it runs, or when it is recorded: {what}. Nothing has been "
                f"changed. {shaky}A step whose results depend on more than its inputs (Python "
                f"state, a clock) cannot be replayed; and torch computes a few gradients another way while it is "
                f"recorded (prod, cross_entropy with weight and label_smoothing), where mode 'exact' could not keep "
                f"eager's bits."
            )
        for p, grad in raw.items():
            p.grad = grad
    except BaseException:
        got.rewind_()
        for p in parameters:
            p.grad = None
        raise


def _statistics(executor: Replay) -> dict[str, int]:
    program = executor.program
    written = [b for b in written_before_update(program) if b in program.externals]
    sum_of = _sums(program)
    return {program.buffers[b].name: sum_of(program.externals[b]) for b in written}


def verified(step: Callable[[], Any], recipe: Recipe, executor: Replay, leaves: Sequence[torch.Tensor]) -> Any:
    """The result of `step()`, after eager gave the same from the same state. Eager's state is what stays."""
    model, optimizer, scaling = recipe.model, recipe.optimizer, recipe.scaling
    with torch.no_grad():
        before = [(t.detach(), t.detach().clone()) for _, t in _tensors(recipe)]
        with taken_back(executor, leaves):
            out = step()
            grads = {p: p.grad for p in model.parameters()}
            compiled = {name: t.detach().clone() for name, t in _tensors(recipe)}
        for live, old in before:
            live.copy_(old)
    del before
    try:
        with torch.enable_grad():
            expected = eager_step(
                model,
                recipe.loss_fn,
                optimizer,
                recipe.args,
                recipe.kwargs,
                accumulate=recipe.accumulate,
                clip_norm=recipe.clip_norm,
                scaler=scaling.scaler if scaling is not None else None,
            )
    except BaseException:
        if scaling is not None:
            scaling.forget_()
        raise
    for p, grad in grads.items():
        p.grad = grad
    loss = out[0] if isinstance(out, tuple) else out
    advice = _KEPT + _advice(executor.program)
    if not same_bits(loss, expected):
        raise VerifyError(f"the compiled step's loss is {loss.item()!r}, eager's {expected.item()!r}. {advice}")
    for name, now in _tensors(recipe):
        if not same_bits(compiled[name], now.detach()):
            worst = (compiled[name].double() - now.detach().double()).abs().max().item()
            raise VerifyError(f"after the step {name} differs from eager's by up to {worst:g}. {advice}")
    return out


_KEPT = "The model and optimizer hold eager's result. "


def _tensors(recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    model, optimizer = recipe.model, recipe.optimizer
    names = {id(p): n for n, p in model.named_parameters()}
    yield from model.named_parameters()
    yield from model.named_buffers()
    for p, table in optimizer.state.items():
        for key, value in table.items():
            if isinstance(value, torch.Tensor):
                yield f"{names.get(id(p), 'parameter')}.{key}", value
    if recipe.scaling is not None:
        yield from recipe.scaling.tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal, with NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
