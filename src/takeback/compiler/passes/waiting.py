"""Ops of the backward that come later than eager ran them: which order that gives, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.overwrite import planned_curve
from takeback.compiler.program import Cluster, Op, Phase, Region, Special

aten = torch.ops.aten

NEAR = 12  #: ops; what comes later is not waited for
SMALL = 16  #: a value that is so many times smaller than another is read at no price
_TRIES = 4  #: with less room each time
_MASK = 10  #: the place of `output_mask` among the operands of a convolution's backward


@dataclass(frozen=True)
class Order:
    """A run of ops in another order: what waits is `behind` the last op of `ahead`."""

    ahead: tuple[Op, ...]
    behind: tuple[Op, ...]


def may_wait(op: Op) -> bool:
    """Whether an op may come later as far as it is concerned."""
    target = op.target
    if op.phase is Phase.FORWARD or isinstance(target, Special) or op.may_send_back:
        return False
    return isinstance(target, Cluster) or torch.Tag.nondeterministic_seeded not in target.tags


def order(run: Sequence[Op], alike: Iterable[Region] = ()) -> Order | None:
    """The ops of `run` with the first one, and what needs its results, behind the last; None if that cannot be. The
    backward of a convolution is split where one of `alike`, which are there, can stand in for its input."""
    first, *between, last = run
    ahead: list[Op] = []
    behind = [first]
    if first.target is aten.convolution_backward.default:
        ahead, behind = _split(first, alike)
    for op in (*between, last):
        needs = depends(op, behind)
        if op is last and needs:
            return None
        if needs:
            behind.append(op)
        elif any(depends(one, [op]) for one in behind):
            return None  # it would come before what it must come after
        else:
            ahead.append(op)
    return Order(tuple(ahead), tuple(behind)) if all(map(may_wait, behind)) else None


def depends(op: Op, before: Sequence[Op]) -> bool:
    """Whether an op reads or writes what one of these writes, or writes what one of them reads."""
    read, written = {r.buffer for r in op.inputs}, {r.buffer for r in op.outputs} | set(op.mutates)
    for other in before:
        made = {r.buffer for r in other.outputs} | set(other.mutates)
        if made & (read | written) or written & {r.buffer for r in other.inputs}:
            return True
    return False


def _split(op: Op, alike: Iterable[Region]) -> tuple[list[Op], list[Op]]:
    """The backward of a convolution as the gradient of its input, and that of its weight and bias. The first looks at
    no number of the input: what has its geometry stands in for it. Else it stays whole."""
    mask, given = op.args[_MASK], op.args[1]
    assert isinstance(mask, tuple)
    assert isinstance(given, Region)
    found = [r for r in alike if (r.dtype, r.shape, r.stride) == (given.dtype, given.shape, given.stride)]
    if not found or not (mask[0] and (mask[1] or mask[2])):
        return [], [op]

    def part(x: Region, kept: tuple[bool, ...]) -> Op:
        results = tuple(r if keep else None for r, keep in zip(op.results, kept, strict=True))
        made = {r.buffer for r in results if isinstance(r, Region)}
        mine = tuple(s for s in op.scratch if s.result is None or s.result in made)
        args = (op.args[0], x, *op.args[2:_MASK], kept, *op.args[_MASK + 1 :])
        return replace(op, args=args, results=results, scratch=mine)

    return [part(found[0], (True, False, False))], [part(given, (False, bool(mask[1]), bool(mask[2])))]


class Headroom:
    """How many bytes there are below the planned peak at every op of a draft; `spare` of them are not to be used."""

    def __init__(self, draft: Draft, spare: int = 0) -> None:
        curve = planned_curve(draft)
        self.peak = max(curve, default=0)
        self._most = self.peak - spare
        self._curve = {id(op): level for op, level in zip(draft.program.ops, curve, strict=True)}
        self._end = {b: life.end for b, life in lifetimes(draft.program, draft.kept).items()}
        self._at = {id(op): position for position, op in enumerate(draft.program.ops)}
        self._sizes = draft.program.buffers

    def for_(self, run: Sequence[Op], more_bytes: int = 0) -> bool:
        """Whether what the first op of a run reads may live until its last one, and so many bytes besides."""
        last = max((self._at[id(op)] for op in run if id(op) in self._at), default=-1)
        read = dict.fromkeys(r.buffer for r in run[0].inputs)
        if not read.keys() <= self._sizes.keys():  # made since the draft was looked at: how long it lives is not known
            return False
        mine = [b for b in read if not self._sizes[b].role.borrowed and self._end.get(b, 0) <= last]
        longer = more_bytes + sum(self._sizes[b].size_bytes for b in mine)
        return all(self._curve[id(op)] + longer <= self._most for op in run[1:] if id(op) in self._curve)


def no_higher(draft: Draft, change: Callable[[Draft, Headroom], Draft]) -> Draft:
    """What `change` makes of a draft, with no higher peak. It is told what room there is, by a draft that it changes in
    several places: where these come to more together, less of the room is offered, and in the end nothing changes."""
    spare = 0
    for _ in range(_TRIES):
        room = Headroom(draft, spare)
        after = change(draft, room)
        grown = max(planned_curve(after), default=0) - room.peak
        if grown <= 0:
            return after
        spare += grown
    return draft
