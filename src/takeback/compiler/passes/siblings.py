"""Tells siblings: programs of one step for batches of different shapes, which call the same ops on the same buffers.

What was chosen for one is right for the other: a choice names ops and buffers by position, and neither positions nor
who reads what depend on sizes. Extents, strides and plain numbers may differ; each program has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from takeback.compiler.program import Argument, Cluster, Op, Phase, Program, Region, Special

aten = torch.ops.aten

#: Ops of which a pass makes more or fewer by size: the backward of a loss, and the chunks of it (passes/chunk_loss.py).
_CHUNKS = frozenset(
    (
        aten.nll_loss_backward.default,
        aten.nll_loss_backward.grad_input,
        aten._log_softmax_backward_data.default,
        aten._log_softmax_backward_data.out,
    )
)


def are_siblings(one: Program, other: Program) -> bool:
    """Whether both call the same ops on the same buffers, and give the same results. What neither reads nor writes does
    not count: the optimizer's state is there in all recordings but the first."""
    if len(one.ops) != len(other.ops):
        return False
    both = one.buffers.keys() & other.buffers.keys()
    met = {r.buffer for op in other.ops for r in (*op.inputs, *op.outputs)}
    if not met <= both or any(one.buffers[b].role is not other.buffers[b].role for b in met):
        return False
    if one.leaves != other.leaves or one.grads.keys() != other.grads.keys() or one.slices.keys() != other.slices.keys():
        return False
    mine, theirs = list(one.named_regions()), list(other.named_regions())
    if len(mine) != len(theirs):
        return False
    if any(a != b or not _alike(r, s) for (a, r), (b, s) in zip(mine, theirs, strict=True)):
        return False
    return all(map(_same_op, one.ops, other.ops))


def _same_op(a: Op, b: Op) -> bool:
    if a.target is not b.target or a.phase is not b.phase or a.grad_mode is not b.grad_mode or a.mutates != b.mutates:
        return False
    if not _alike(a.args, b.args) or not _alike(a.results, b.results):
        return False
    if (a.kwargs or b.kwargs) and (
        a.kwargs.keys() != b.kwargs.keys() or not all(_alike(v, b.kwargs[k]) for k, v in a.kwargs.items())
    ):
        return False
    # A generator is named by its object.
    return not isinstance(a.target, Special) or a.args == b.args


def _alike(a: Argument, b: Argument) -> bool:
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is Region:
        assert isinstance(a, Region)
        assert isinstance(b, Region)
        return a.buffer == b.buffer and a.dtype is b.dtype and len(a.shape) == len(b.shape)
    if kind is tuple:
        assert isinstance(a, tuple)
        assert isinstance(b, tuple)
        return len(a) == len(b) and all(map(_alike, a, b))
    if kind is bool or kind is str:
        return a == b
    return True


def knowing(program: Program, sibling: Program) -> Program:
    """The program with the scratch that its update's ops were seen to take in a sibling: parameters have one shape."""
    seen = [op for op in sibling.ops if op.phase is Phase.UPDATE]
    mine = [op for op in program.ops if op.phase is Phase.UPDATE]
    if [op.target for op in seen] != [op.target for op in mine]:
        return program
    known = {id(op): replace(op, scratch=other.scratch) for op, other in zip(mine, seen, strict=True) if other.scratch}
    if any(s.result is not None for op in known.values() for s in op.scratch):
        return program  # names buffers
    return replace(program, ops=tuple(known.get(id(op), op) for op in program.ops))


def aligned(of: Sequence[Op], to: Sequence[Op]) -> Mapping[int, int] | None:
    """For each position in the one list of ops where the same op is in the other; None where they are not the same.
    A loss may be cut into more chunks in one than in the other: the first chunk is where the first one is."""
    mine, theirs = _runs(of), _runs(to)
    if len(mine) != len(theirs) or any(_other(of[a], to[b]) for a, b in zip(mine, theirs, strict=True)):
        return None
    return dict(zip(mine, theirs, strict=True))


def _other(a: Op, b: Op) -> bool:
    if isinstance(a.target, Cluster) and isinstance(b.target, Cluster):
        return [op.target for op in a.target.ops] != [op.target for op in b.target.ops]
    return a.target is not b.target and not (a.target in _CHUNKS and b.target in _CHUNKS)


def _runs(ops: Sequence[Op]) -> list[int]:
    """Positions of all ops but the chunks after a first one."""
    found: list[int] = []
    inside = False
    for position, op in enumerate(ops):
        if not (inside and op.target in _CHUNKS):
            found.append(position)
        inside = op.target in _CHUNKS
    return found
