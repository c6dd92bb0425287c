"""Lets a max pool keep, for its backward, which of its window's places was the largest: one byte, where eager keeps the
place in the whole image, eight bytes. Both directions are then generated kernels.

      y, places = max_pool(x)                  y, offsets = cluster(x)
      ...                                      ...
      dx = max_pool_backward(dy, x, places)    dx = cluster(dy, h, offsets)

The backward looks at no number of x: what has its geometry and is there anyway, such as what x was made of, stands in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from takeback.compiler.cluster import clustered
from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import Argument, Buffer, BufferId, Op, OpOverload, Phase, Program, Region, Role
from takeback.compiler.schema import max_pool_ops

aten = torch.ops.aten

_LARGEST_WINDOW = 25  #: places; beyond it Inductor has no kernel of its own


@dataclass(frozen=True)
class PooledPair:
    """A max pool of the forward, and its backward."""

    forward: int
    backward: int
    stand_in: Region


def pool(draft: Draft) -> Draft:
    """The draft with such max pools in their other form."""
    pools = list(_pools(draft))
    targets = max_pool_ops() if pools else None
    if targets is None:
        return draft
    program = draft.program
    buffers, ops = dict(program.buffers), list(program.ops)
    for each in pools:
        ahead, back = _rewritten(ops[each.forward], ops[each.backward], each.stand_in, targets, buffers)
        ops[each.forward], ops[each.backward] = ahead, back
    return replace(draft, program=replace(program, ops=tuple(ops), buffers=buffers))


def _rewritten(
    op: Op, back: Op, stand_in: Region, targets: tuple[OpOverload, OpOverload], buffers: dict[BufferId, Buffer]
) -> tuple[Op, Op]:
    x, y, places = op.args[0], op.results[0], op.results[1]
    assert isinstance(x, Region)
    assert isinstance(y, Region)
    assert isinstance(places, Region)

    def new(like: Region, dtype: torch.dtype) -> Region:
        ident = BufferId(max(buffers) + 1)
        buffers[ident] = Buffer(ident, like.numel * dtype.itemsize, Role.INTERNAL)
        return replace(like, buffer=ident, dtype=dtype)

    window, step, margin, spread = _geometry(op)
    offsets, found = new(places, torch.int8), new(places, torch.int64)
    plain = replace(op, kwargs={}, scratch=())
    ahead = replace(plain, target=targets[0], args=(x, window, step, margin, spread, _flag(op)), results=(y, offsets))
    again = replace(
        plain,
        target=targets[1],
        args=(offsets, window, x.shape[-2:], step, margin, spread),
        results=(found,),
        phase=back.phase,
    )
    args = (back.args[0], stand_in, *back.args[2:7], found)
    both = (again, replace(back, args=args, kwargs={}, scratch=()))
    made = {back.outputs[0].buffer}
    return (
        clustered((ahead,), buffers, {y.buffer, offsets.buffer}.__contains__),
        clustered(both, buffers, made.__contains__),
    )


def _pools(draft: Draft) -> Iterator[PooledPair]:
    program = draft.program
    readers: dict[BufferId, list[int]] = {}
    for position, op in enumerate(program.ops):
        for b in dict.fromkeys(r.buffer for r in op.inputs):
            readers.setdefault(b, []).append(position)
    named = {r.buffer for _, r in program.named_regions()} | draft.kept
    for position, op in enumerate(program.ops):
        if op.target is not aten.max_pool2d_with_indices.default or op.phase is not Phase.FORWARD:
            continue
        places = op.outputs[1]
        read = readers.get(places.buffer, [])
        if len(read) != 1 or places.buffer in named or not _fits(op):
            continue
        back = program.ops[read[0]]
        if back.target is not aten.max_pool2d_with_indices_backward.default or len(back.args) != 8:
            continue
        yield PooledPair(position, read[0], _stand_in(program, back, read[0], readers))


def _stand_in(program: Program, back: Op, position: int, readers: dict[BufferId, list[int]]) -> Region:
    """What has the geometry of the pool's operand, and is read after its backward in any case; else the operand."""
    given = back.args[1]
    assert isinstance(given, Region)
    maker = next((op for op in program.ops if any(r.buffer == given.buffer for r in op.outputs)), None)
    while maker is not None:
        alike = [r for r in maker.inputs if (r.dtype, r.shape, r.stride) == (given.dtype, given.shape, given.stride)]
        for region in alike:
            if any(at > position for at in readers.get(region.buffer, ())):
                return region
        source = alike[0].buffer if alike else None
        maker = next((op for op in program.ops if any(r.buffer == source for r in op.outputs)), None)
    return given


def _fits(op: Op) -> bool:
    x = op.args[0]
    window, _, _, spread = _geometry(op)
    dense = all(r.packed and not r.offset for r in op.outputs)
    whole = isinstance(x, Region) and len(x.shape) == 4 and x.dtype.is_floating_point
    return dense and whole and math.prod(window) <= _LARGEST_WINDOW and spread == (1, 1) and not op.kwargs


def _geometry(op: Op) -> tuple[tuple[int, ...], ...]:
    """Window, step, margin and spread, two numbers each."""
    window = _pair(op.args[1], (1, 1))
    given = (*op.args[2:5], *((),) * (3 - len(op.args[2:5])))
    return window, _pair(given[0], window), _pair(given[1], (0, 0)), _pair(given[2], (1, 1))


def _flag(op: Op) -> bool:
    return bool(op.args[5]) if len(op.args) > 5 else False


def _pair(arg: Argument, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    numbers = tuple(int(n) for n in arg) if isinstance(arg, tuple) else (int(arg),) if isinstance(arg, int) else ()
    return (numbers * 2)[:2] if len(numbers) == 1 else numbers or otherwise
