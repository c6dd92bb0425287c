"""The program of a step for a batch on which it was not run: seen through fake tensors, and joined with what a real
recording of the same step on an excerpt of the batch has shown.

In: the recording of the excerpt. Out: a `Capture` as if the whole batch had been recorded. What fake tensors show is
believed as far as it was right before: for the excerpt they must show the very program that was recorded (ops, numbers,
geometry, constants), and for the whole batch the same ops on the same buffers. What they cannot show is the
recording's: the user's tensors, what was read in Python, values that were read into Python (compared in each replay),
random states that are set, and what kernels take inside (in proportion). Anything else is a `CaptureError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.batch import map_tensors, tensors_of
from takeback.compiler.capture.fakes import FakeWorld
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.randomness import default_generators
from takeback.compiler.capture.record_step import Capture, capture
from takeback.compiler.capture.site import at
from takeback.compiler.capture.subject import Subject
from takeback.compiler.program import Argument, Buffer, BufferId, Op, Program, Region, Role, Scratch, Special
from takeback.errors import CaptureError


def foresee(
    subject: Subject, excerpt: tuple[tuple[Any, ...], dict[str, Any]], got: Capture, batch: tuple[Any, dict[str, Any]]
) -> Capture:
    """The capture of `batch`. `got`: the recording of `excerpt`, which has been taken back."""
    if subject.scaling is not None:
        raise CaptureError("there is a scaler, whose scale fake tensors do not have.")
    small = _faked(subject, excerpt, got)
    reason = _first_unlike(got.program, small.program)
    if reason is not None:
        raise CaptureError(f"on fake tensors the step does something else than on real ones: {reason}.")
    if not _equal(got.aux_form, small.aux_form):
        raise CaptureError(
            "what loss_fn returns besides the loss holds other values with fake tensors than with real ones."
        )
    whole = _faked(subject, batch, got)
    if whole.has_aux != got.has_aux:
        raise CaptureError("loss_fn returns something else for the whole batch than for an excerpt of it.")
    return replace(
        got,
        program=_joined(got.program, small.program, whole.program),
        aux_form=whole.aux_form,
        rewind_=lambda: None,
        statistics=(),
        random_ends={},
    )


def _faked(subject: Subject, batch: tuple[Any, dict[str, Any]], got: Capture) -> Capture:
    """The step on fakes of the model and the batch."""
    device = next((p.device for p in subject.parameters), torch.device("cpu"))
    states = [(g, g.get_state()) for g in default_generators(device)]
    answers = [op for op in got.program.ops if op.expected is not None]
    try:
        with FakeWorld(unnoticed=True) as world:
            nothing = Optimizers((), ())
            model, _, loss_fn = world.copy(subject.model, nothing, subject.loss_fn)
            args, kwargs = map_tensors(batch, world.fake)
            fake = subjects.build(
                model,
                loss_fn,
                nothing,
                tensors_of((args, kwargs)),
                accumulate=subject.accumulate,
                clip_norm=subject.clip_norm,
                updates=subject.updates,
                exact=subject.exact,
            )
            return capture(fake, args, kwargs, real=False, answers=answers)
    except CaptureError:
        raise
    except Exception as error:  # of copying the user's objects, of a kernel that knows no fakes, of the user's own code
        raise CaptureError(f"it cannot be run on fake tensors ({type(error).__name__}: {error}).") from None
    finally:
        for generator, state in states:
            generator.set_state(state)


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # objects of the user's may compare as they like
        return False


# -- fakes beside the recording ----------------------------------------------------------------------------------------


def _first_unlike(real: Program, fake: Program) -> str | None:
    """What the fake program has otherwise, in words; None if nothing."""
    reason = _other_ops(real, fake, _same)
    if reason is not None:
        return reason
    met = {r.buffer for op in fake.ops for r in (*op.inputs, *op.outputs)}
    for b in met:
        if real.buffers[b].role is not fake.buffers[b].role:
            return f"a {real.buffers[b].role.value} is a {fake.buffers[b].role.value}"
        if real.buffers[b].role is Role.CONSTANT and not _same_bits(real.externals[b], fake.externals[b]):
            return "a tensor that it makes of numbers holds others"
    return None


def _other_ops(one: Program, other: Program, same: Callable[[Argument, Argument], bool]) -> str | None:
    """The first kernel of the other program that is not that of the one, or is given what is not the same."""
    kernels = [op for op in one.ops if not isinstance(op.target, Special)]
    for mine, theirs in zip(kernels, other.ops, strict=False):
        if mine.target is not theirs.target:
            return f"{theirs.name}{at(theirs.site)} runs where {mine.name} did"
        alike = mine.phase is theirs.phase and mine.grad_mode is theirs.grad_mode and mine.mutates == theirs.mutates
        given = (mine.args, mine.kwargs, mine.results), (theirs.args, theirs.kwargs, theirs.results)
        if not alike or not same(*given):
            return f"{mine.name}{at(theirs.site or mine.site)} is given something else"
    if len(kernels) != len(other.ops):
        return f"it is made of {len(other.ops):,} ops instead of {len(kernels):,}"
    mine_named, their_named = list(one.named_regions()), list(other.named_regions())
    if [name for name, _ in mine_named] != [name for name, _ in their_named] or not all(
        same(a, b) for (_, a), (_, b) in zip(mine_named, their_named, strict=True)
    ):
        return "it gives other results"
    return None


def _same(mine: Argument, theirs: Argument) -> bool:
    if isinstance(mine, Region) and isinstance(theirs, Region):
        alike = mine.buffer == theirs.buffer and mine.dtype is theirs.dtype and mine.shape == theirs.shape
        steps = zip(mine.shape, mine.stride, theirs.stride, strict=True)
        # Where there is one element, or none, the step to the next one is arbitrary.
        return alike and (
            mine.numel == 0 or (mine.offset == theirs.offset and all(n == 1 or a == b for n, a, b in steps))
        )
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return mine.keys() == theirs.keys() and all(_same(value, theirs[key]) for key, value in mine.items())
    if isinstance(mine, torch.Generator):
        return isinstance(theirs, torch.Generator)
    if isinstance(mine, float) and isinstance(theirs, float):
        return mine.hex() == theirs.hex()
    return type(mine) is type(theirs) and _equal(mine, theirs)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return bool(
        torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))
    )


# -- the whole batch's program -----------------------------------------------------------------------------------------


def _joined(real: Program, small: Program, whole: Program) -> Program:
    """The ops that were recorded, with the geometry and the numbers that fakes of the whole batch have."""
    reason = _not_siblings(small, whole)
    if reason is not None:
        raise CaptureError(f"for the whole batch the step does something else than for an excerpt of it: {reason}.")
    buffers = {b: _sized(buffer, small, whole) for b, buffer in real.buffers.items()}
    theirs = iter(whole.ops)
    ops: list[Op] = []
    places: list[int] = []
    for op in real.ops:
        if not isinstance(op.target, Special):
            places.append(len(ops))
            mine, op = op, _grown(op, next(theirs))
            times = _times(mine, op)
            for scratch in op.scratch:
                if scratch.result is not None:  # a few kernels make a result in more bytes than it has
                    extra = scratch.size_bytes > small.buffers[scratch.result].size_bytes
                    size = max(buffers[scratch.result].size_bytes, int(scratch.size_bytes * times) if extra else 0)
                    buffers[scratch.result] = replace(buffers[scratch.result], size_bytes=size)
            op = replace(op, scratch=tuple(_scaled(s, times, buffers) for s in op.scratch))
        ops.append(op)
    places.append(len(ops))
    externals = {
        b: whole.externals[b] if real.buffers[b].role is Role.CONSTANT else tensor
        for b, tensor in real.externals.items()
    }
    return replace(
        real,
        ops=tuple(ops),
        buffers=buffers,
        externals=externals,
        loss=whole.loss,
        aux=whole.aux,
        grads=dict(whole.grads),
        grad_norm=whole.grad_norm,
        eager_death={b: places[p] for b, p in whole.eager_death.items()},
    )


def _not_siblings(small: Program, whole: Program) -> str | None:
    """What differs besides extents, strides, offsets and plain numbers."""
    reason = _other_ops(small, whole, _alike)
    if reason is not None:
        return reason
    roles = {b: buffer.role for b, buffer in small.buffers.items()}
    if roles != {b: buffer.role for b, buffer in whole.buffers.items()} or small.leaves != whole.leaves:
        return "it uses other tensors"
    return None


def _alike(mine: Argument, theirs: Argument) -> bool:
    if isinstance(mine, Region) and isinstance(theirs, Region):
        return mine.buffer == theirs.buffer and mine.dtype is theirs.dtype and len(mine.shape) == len(theirs.shape)
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return mine.keys() == theirs.keys() and all(_alike(value, theirs[key]) for key, value in mine.items())
    numbers = isinstance(mine, int | float) and not isinstance(mine, bool)
    return type(mine) is type(theirs) and (numbers or isinstance(mine, torch.Generator) or _equal(mine, theirs))


def _sized(buffer: Buffer, small: Program, whole: Program) -> Buffer:
    """What is the user's has its size; the batch and what the step makes have that of the fakes."""
    if buffer.role not in (Role.INTERNAL, Role.BATCH, Role.CONSTANT) or buffer.id not in whole.buffers:
        return buffer
    return replace(buffer, size_bytes=whole.buffers[buffer.id].size_bytes)


def _grown(mine: Op, theirs: Op) -> Op:
    """The recorded op with the operands of the fake one; a generator is the recorded one's."""

    def take(own: Argument, other: Argument) -> Argument:
        if isinstance(own, tuple) and isinstance(other, tuple):
            return tuple(map(take, own, other))
        return own if isinstance(own, torch.Generator) else other

    args = tuple(map(take, mine.args, theirs.args))
    kwargs = {name: take(value, theirs.kwargs[name]) for name, value in mine.kwargs.items()}
    return replace(mine, args=args, kwargs=kwargs, results=theirs.results)


def _times(mine: Op, grown: Op) -> float:
    """How many times as many bytes the op moves."""
    before, after = (sum(r.numel * r.dtype.itemsize for r in (*op.inputs, *op.outputs)) for op in (mine, grown))
    return after / before if before else 1.0


def _scaled(scratch: Scratch, times: float, buffers: Mapping[BufferId, Buffer]) -> Scratch:
    if scratch.result is not None:
        return replace(scratch, size_bytes=buffers[scratch.result].size_bytes)
    return replace(scratch, size_bytes=int(scratch.size_bytes * times))
