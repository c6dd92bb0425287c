"""From a recorded forward and backward to the program of a microbatch: each gradient is added to the one that waits for
the update, as soon as it is complete.

In: a program whose gradients are known. Out: the same with an addition for each, onto a buffer that is handed over with
the call after the batch's tensors. The additions are the program's update: once the first has begun, nothing can send
the call back any more. Where no gradient waits yet, the caller hands over -0.0: x + -0.0 has the bits of x. Not so of
complex numbers, whose addition multiplies as well: there a copy takes the addition's place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from takeback.compiler.capture.finish import Finished
from takeback.compiler.program import Buffer, BufferId, Op, Phase, Program, Region, Role

aten = torch.ops.aten


def finish_microbatch(
    program: Program,
    names: Sequence[str],
    *,
    strides: Mapping[int, tuple[int, ...]],
    copied: Collection[int],
    given: int,
) -> Finished:
    """`names` are the parameters'; `strides` those of the gradients that wait, by position among the parameters, where
    they are not the new gradient's; the gradients of `copied` are not added; `given` is how many tensors the batch
    has."""
    buffers, leaves, death = dict(program.buffers), dict(program.leaves), dict(program.eager_death)
    last = {r.buffer: p for p, op in enumerate(program.ops) for r in (*op.inputs, *op.outputs)}
    adds: dict[int, Region] = {}
    ops: list[Op] = []
    for i, grad in sorted(program.grads.items()):
        ident = BufferId(len(buffers))
        stride = strides.get(i, grad.stride if grad.packed else _contiguous(grad.shape))
        onto = Region(ident, grad.dtype, grad.shape, stride, 0)
        buffers[ident] = Buffer(ident, grad.numel * grad.dtype.itemsize, Role.GRADIENT, f"{names[i]}.grad")
        leaves[ident] = given + len(adds)
        target = aten.copy_.default if i in copied else aten.add_.Tensor
        ops.append(Op(target, (onto, grad), {}, (onto,), (ident,), Phase.UPDATE))
        adds[i] = onto
        death.setdefault(grad.buffer, last.get(grad.buffer, -1) + 1)  # eager lets go of it when it has been added
    done = replace(program, ops=program.ops + tuple(ops), buffers=buffers, leaves=leaves, eager_death=death)
    return Finished(done, None, frozenset(), (), adds=adds)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
