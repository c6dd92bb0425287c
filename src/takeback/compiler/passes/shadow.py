"""Lets a cluster of the backward make, on its way, what was made of what it reads: then the forward need not keep it.

An activation z is read in the backward by a weight's gradient alone, and was made of x; a cluster reads x for the
backward of the norm or the activation. Where the weight's gradient can wait for it, the cluster writes z beside its own
results, and nothing is read for it. If the cluster reads z itself, it does so no more.

      h, z = cluster(...)                          h, z = cluster(...)             z dies in the forward
      ...                                          ...
      dw   = mm(dy, z)                             dh, z' = cluster(dz, h)
      dh   = cluster(dz, h)                        dw     = mm(dy, z')
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from takeback.compiler.passes.choice import fixed_buffers
from takeback.compiler.passes.cost import again_s
from takeback.compiler.passes.draft import Draft
from takeback.compiler.passes.fuse import MOST_OPS
from takeback.compiler.passes.gather import length_of, one_of, seen_whole
from takeback.compiler.passes.partial import making
from takeback.compiler.passes.recompute import planned_peak
from takeback.compiler.passes.waiting import NEAR, SMALL, Headroom, no_higher, order
from takeback.compiler.program import BufferId, Cluster, Op, Phase, renaming

_LEAST_SHARE = 0.0005  #: of the largest value; smaller ones are kept


def shadow(
    draft: Draft,
    *,
    seconds: Callable[[Op], float] | None = None,
    share: float | None = None,
    worth: float = 0.0,
    room_bytes: int | None = None,
    only: Collection[int] | None = None,
) -> Draft:
    """The draft with what clusters can make on their way made by them. To write it takes time, so there are limits: a
    `share` of the time that the ops take in `seconds`, of which a percent must buy `worth` percent of the peak; or the
    first ones, until the planned peak is within `room_bytes`, if not the fewest; or just what `only` says, in the
    numbers that `Draft.shadows` has."""
    price = None
    if share is not None and seconds is not None:
        step_s = sum(map(seconds, draft.program.ops))
        price = _Price(seconds, share * step_s, worth * planned_peak(draft) / max(step_s, 1e-12))

    def made(numbers: Collection[int] | None) -> Draft:
        return no_higher(draft, lambda before, room: _Shadows(before, room, numbers, price).draft)

    found = made(only)
    if room_bytes is None or planned_peak(found) > room_bytes:
        return found
    low, high, numbers = 0, len(found.shadows), found.shadows
    while low < high:  # with more of them the peak is lower, but for a few bytes here and there
        middle = (low + high) // 2
        fewer = made(numbers[:middle])
        if planned_peak(fewer) <= room_bytes:
            found, high = fewer, middle
        else:
            low = middle + 1
    return found


@dataclass(frozen=True)
class _Price:
    """What may be spent, and how many bytes a second of it must free."""

    seconds: Callable[[Op], float]
    most_s: float
    bytes_per_s: float

    def of(self, op: Op, made: BufferId) -> float:
        return again_s((op,), {made}, self.seconds)


class _Shadows:
    """One walk over the clusters of the backward."""

    def __init__(
        self,
        draft: Draft,
        room: Headroom,
        only: Collection[int] | None = None,
        price: _Price | None = None,
    ) -> None:
        self._program = draft.program
        self._only, self._price, self._spent_s = only, price, 0.0
        self._is_over = False  # the next value is more than what is left to spend
        self._room = room
        self._buffers = dict(draft.program.buffers)
        self._ops = list(draft.program.ops)
        self._fixed = fixed_buffers(draft) | {r.buffer for _, r in draft.program.named_regions()}
        self._maker: dict[BufferId, Op] = {}
        self._made_at: dict[BufferId, int] = {}
        self._read_by: dict[BufferId, list[Op]] = {}  # of what the forward reads and makes: who made something of it
        self._note_makers_()
        sizes = [b.size_bytes for b in self._buffers.values() if not b.role.borrowed]
        self._least = max(sizes, default=0) * _LEAST_SHARE
        backward = (i for i, op in enumerate(self._ops) if op.phase is not Phase.FORWARD)
        self._turn = next(backward, len(self._ops))
        self._read_at: dict[BufferId, list[int]] | None = None
        rebuilt: set[BufferId] = set(draft.rebuilt)
        offers = itertools.count()
        taken: list[int] = []
        position = 0
        while position < len(self._ops) and not self._is_over:
            op = self._ops[position]
            if isinstance(op.target, Cluster) and op.phase is Phase.BACKWARD and not op.mutates:
                for z in self._candidates(op):
                    again = self._again(op, z) if self._may_wait(position, z) else None
                    offer = next(offers) if again is not None else None
                    if again is None or offer is None or (only is not None and offer not in only):
                        continue
                    moved = self._made_here(position, z, again)
                    if moved is not None:
                        position, made = moved
                        rebuilt.add(made)
                        taken.append(offer)
                    if self._is_over:
                        break
            position += 1
        program = replace(self._program, ops=tuple(self._ops), buffers=self._buffers)
        self.draft = replace(draft, program=program, rebuilt=frozenset(rebuilt), shadows=tuple(taken))

    def _note_makers_(self) -> None:
        """Of the ops as they are now: in a later microbatch, the forward reads what an earlier backward makes."""
        self._maker, self._made_at = {}, {}
        for position, op in enumerate(self._ops):
            if isinstance(op.target, Cluster) and op.phase is Phase.FORWARD:
                made = [r.buffer for r in op.outputs if r.buffer not in op.mutates]
                self._maker |= dict.fromkeys(made, op)
                self._made_at |= dict.fromkeys(made, position)
        self._read_by = {}
        for op in {id(op): op for op in self._maker.values()}.values():
            for r in (*op.inputs, *op.outputs):
                self._read_by.setdefault(r.buffer, []).append(op)

    def _candidates(self, cluster: Op) -> Iterator[BufferId]:
        """Values of the forward that clusters made beside, or of, what a cluster reads."""
        read = {r.buffer for r in cluster.inputs}
        makers = {id(op): op for b in read for op in self._read_by.get(b, ())}
        for maker in makers.values():
            for z in dict.fromkeys(r.buffer for r in maker.outputs if r.buffer in self._maker):
                size = self._buffers[z].size_bytes
                if z not in self._fixed and size > self._least:
                    yield z

    def _again(self, cluster: Op, z: BufferId) -> Op | None:
        """The op that makes a value of what the cluster reads; None if there is none."""
        read = {r.buffer for r in cluster.inputs}
        again = making(self._maker[z], z, read)
        if again is None or again.mutates:
            return None
        size = self._buffers[z].size_bytes
        large = [r.buffer for r in again.inputs if self._buffers[r.buffer].size_bytes * SMALL > size]
        return again if all(b in read and b != z for b in large) else None

    def _may_wait(self, position: int, z: BufferId) -> bool:
        """Whether z is there already, of this microbatch or an earlier one, and is read in the backward, by nobody long
        before this. Asked first: to find out how it could be made again takes a thousand times as long."""
        readers = self._readers().get(z)
        return self._made_at[z] < position and readers is not None and readers[0] >= position - NEAR

    def _readers(self) -> dict[BufferId, list[int]]:
        """Who reads what in the backward, in order."""
        if self._read_at is None:
            self._read_at = {}
            for i in range(self._turn, len(self._ops)):
                for b in {r.buffer for r in self._ops[i].inputs}:
                    self._read_at.setdefault(b, []).append(i)
        return self._read_at

    def _made_here(self, position: int, z: BufferId, again: Op) -> tuple[int, BufferId] | None:
        """Where the cluster then is, and the copy of z that it makes; None if readers of z cannot wait for it."""
        ops, cluster = self._ops, self._ops[position]
        assert isinstance(cluster.target, Cluster)
        early = [i for i in self._readers().get(z, ()) if i < position]
        if len(cluster.target.ops) + length_of(again) > MOST_OPS or not seen_whole(again, ops[position:]):
            return None
        new, at = list(ops), position
        for i in reversed(early):  # the last one first: those before it stay where they are
            run = new[i : at + 1]
            found = order(run, again.inputs)
            if found is None or (self._only is None and not self._room.for_(run, self._buffers[z].size_bytes)):
                return None
            new[i : at + 1] = [*found.ahead, *found.behind]
            at = i + len(found.ahead) - 1
        if any(_reads(op, z) for op in new[self._turn : at]) or self._changed(again, z, new[:at]):
            return None
        copy = BufferId(max(self._buffers) + 1)
        buffers = {**self._buffers, copy: replace(self._buffers[z], id=copy, name="")}
        change = renaming({z: copy})
        made = again.map(writes=change)
        new[at:] = [op.map(reads=change) if _reads(op, z) else op for op in new[at:]]
        results = {copy, *(r.buffer for r in cluster.outputs)}
        outside = {r.buffer for op in new[at + 1 :] for r in op.inputs if r.buffer in results}
        new[at] = one_of((made, new[at]), buffers, outside | self._fixed)
        if self._price is not None:
            cost_s = self._price.of(new[at], copy)
            self._is_over = self._spent_s + cost_s > self._price.most_s
            if self._is_over or buffers[z].size_bytes < self._price.bytes_per_s * cost_s:
                return None
            self._spent_s += cost_s
        self._ops, self._buffers, self._read_at = new, buffers, None
        self._note_makers_()
        return at, copy

    def _changed(self, again: Op, z: BufferId, before: Sequence[Op]) -> bool:
        """Whether something that z was made of has been written since, such as a buffer of the model in the forward or
        a parameter that is updated early."""
        maker, read = self._maker[z], {r.buffer for r in again.inputs}
        since = itertools.dropwhile(lambda op: op is not maker, before)
        written = (b for op in since for b in (*op.mutates, *(r.buffer for r in op.outputs if op is not maker)))
        return any(b in read for b in written)


def _reads(op: Op, buffer: BufferId) -> bool:
    return any(r.buffer == buffer for r in op.inputs)
