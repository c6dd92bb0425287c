"""Makes clusters: runs of ops that move memory become one op each, and what only they read has no bytes any more.

A group of ops is open until an op outside of it reads what it makes, or writes what it reads. Whoever may be part of a
cluster joins the open groups that make its operands. A group runs where its last op ran, so that nothing is made later
than before; what it read before then lives as long. A small result of what a group made, such as the sum of a
gradient over its rows, joins it afterwards, when all that it reads is there.

      h = mm(x, w)                        h = mm(x, w)
      a = h + b         } one group       z = cluster(h, b)         a has no bytes
      z = gelu(a)       }                 y = mm(z, v)
      y = mm(z, v)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from takeback.compiler.cluster import clustered
from takeback.compiler.geometry import path
from takeback.compiler.ownership.facts import COPY, FILL
from takeback.compiler.passes.draft import Draft, Refusal
from takeback.compiler.passes.fusible import why_not
from takeback.compiler.passes.thin import BackwardGroup, made_again
from takeback.compiler.program import BufferId, Cluster, Op, Phase, Program, Region, Special

MOST_OPS = 96  #: of one cluster; larger ones take long to compile and gain nothing
_SOON = 8  #: ops; over fewer nothing is gained by not waiting
_SMALL = 8  #: a result that is so many times smaller than what it is made of lives longer at no price


@dataclass
class OpGroup:
    """Positions of ops that run as one, at the position `at`."""

    members: list[int] = field(default_factory=list)
    made: set[BufferId] = field(default_factory=set)
    reads: set[BufferId] = field(default_factory=set)
    writes: set[BufferId] = field(default_factory=set)
    is_open: bool = True
    at: int = -1

    def add_(self, position: int, op: Op) -> None:
        self.members.append(position)
        self.made |= {r.buffer for r in op.outputs if r.buffer not in op.mutates}
        self.reads |= {r.buffer for r in op.inputs}
        self.writes |= set(op.mutates)
        if self.is_open:
            self.at = position


def fuse(draft: Draft) -> Draft:
    """The draft with clusters in place of runs of ops that move memory. Refusals say what stayed out of them."""
    program = draft.program
    found = _Grouping(program).found
    ops = {group.at: tuple(program.ops[i] for i in sorted(group.members)) for group in found}
    buffers = dict(program.buffers)
    readers = [BackwardGroup(mine, at) for at, mine in ops.items() if program.ops[at].phase is Phase.BACKWARD]
    for reader, again in zip(readers, made_again(program, draft.kept, readers, buffers), strict=True):
        ops[reader.at] = again
    backward = (op for op in program.ops if op.phase is Phase.BACKWARD and why_not(op, program) is None)
    read_again = {r.buffer for op in backward for r in op.inputs}
    ops = {at: mine for at, mine in ops.items() if len(mine) > 1 or _is_activation(mine[0], read_again)}
    inside = {position: group.at for group in found if group.at in ops for position in group.members}
    refusals = tuple(_refusals(program, inside))
    made = _in_place(replace(program, buffers=buffers), draft.kept, ops, inside)
    return replace(draft, program=made, refusals=draft.refusals + refusals)


def _is_activation(op: Op, read_again: Container[BufferId]) -> bool:
    """Whether an op of the forward computes one number of one, as an activation between two products does, and its own
    backward reads what it was made of: GELU's does, and ReLU's its result. Alone it is no faster in a cluster, but
    later passes know how clusters are made again beside others."""
    target = op.target
    assert not isinstance(target, Special | Cluster)
    if op.phase is not Phase.FORWARD or torch.Tag.pointwise not in target.tags or target in COPY or target in FILL:
        return False
    if len(op.inputs) != 1 or len(op.outputs) != 1 or op.inputs[0].buffer not in read_again:
        return False
    return op.inputs[0].numel == op.outputs[0].numel


def _in_place(
    program: Program, kept: frozenset[BufferId], clusters: Mapping[int, tuple[Op, ...]], inside: Mapping[int, int]
) -> Program:
    """The program with one op in place of each cluster's ops. `inside` says where the cluster of an op runs."""
    runs: list[tuple[Op, ...]] = []
    clusters_at: set[int] = set()  #: among them
    for position, op in enumerate(program.ops):
        at = inside.get(position)
        if at is None:
            runs.append((op,))
        elif at == position:
            clusters_at.add(len(runs))
            runs.append(clusters[at])
    named = {r.buffer for _, r in program.named_regions()} | kept
    readers: dict[BufferId, set[int]] = {}
    for number, run in enumerate(runs):
        for op in run:
            for r in op.inputs:
                readers.setdefault(r.buffer, set()).add(number)
    ops: list[Op] = []
    for number, run in enumerate(runs):
        if number not in clusters_at:
            ops.append(run[0])
            continue
        made = {r.buffer for op in run for r in op.outputs}
        leaving = {b for b in made if b in named or readers.get(b, set()) - {number}}
        if leaving or any(op.mutates for op in run):  # else nobody asks for anything of it
            ops.append(clustered(run, program.buffers, leaving.__contains__))
    return replace(program, ops=tuple(ops))


class _Grouping:
    """One walk over the ops."""

    def __init__(self, program: Program) -> None:
        self._ops = program.ops
        self._bytes: Mapping[BufferId, int] = {
            b.id: b.size_bytes for b in program.buffers.values() if not b.role.borrowed
        }
        self._of: dict[BufferId, OpGroup] = {}  # who made a buffer
        self._whole: dict[BufferId, Region] = {}  # the region in which it was made
        self._made_at: dict[BufferId, int] = {}
        self._written_at: dict[BufferId, int] = {}
        self._groups: list[OpGroup] = []
        self._open: list[OpGroup] = []  # those of them that may be
        self._written_inside: set[BufferId] = set()  # in place, by any group
        for position, op in enumerate(program.ops):
            reason = why_not(op, program)
            if reason is None:
                self._fusible(position, op)
            else:
                self._outside(position, op)
            for b in op.mutates:
                self._written_at[b] = position
        self.found = [group for group in self._groups if group.members]

    def _outside(self, position: int, op: Op) -> None:
        self._after_writes(op)
        for r in op.inputs:
            self._close_maker(r.buffer)
        self._before_write(op.mutates, None)
        for r in op.outputs:
            self._made_at.setdefault(r.buffer, position)

    def _close_maker(self, b: BufferId) -> None:
        group = self._of.get(b)
        if group is not None:
            group.is_open = False

    def _after_writes(self, op: Op) -> None:
        """What writes in place what an op reads comes before it."""
        read = {r.buffer for r in op.inputs}
        if read & self._written_inside:
            for group in self._still_open():
                group.is_open = not group.writes & read

    def _still_open(self) -> list[OpGroup]:
        self._open = [group for group in self._open if group.is_open]
        return self._open

    def _before_write(self, written: Iterable[BufferId], mine: OpGroup | None) -> None:
        """What reads or writes these buffers comes before whoever writes them now."""
        written = set(written)
        if written:
            for group in self._still_open():
                if group is not mine and (group.reads & written or group.writes & written):
                    group.is_open = False

    def _fusible(self, position: int, op: Op) -> None:
        self._after_writes(op)
        sources: dict[int, OpGroup] = {}
        for r in op.inputs:
            maker = self._of.get(r.buffer)
            if maker is None or not maker.is_open:
                continue
            if r.buffer in op.mutates:
                maker.is_open = False  # what is written in place has bytes
                continue
            if path(self._whole[r.buffer], r) is None:
                maker.is_open = False
            else:
                sources[id(maker)] = maker
        joined = self._joined([g for g in sources.values() if g.is_open], position, op)
        if joined is None:
            joined = self._late(op)
        if joined is None:
            joined = OpGroup()
            self._groups.append(joined)
            self._open.append(joined)
        self._before_write(op.mutates, joined)
        self._written_inside.update(op.mutates)
        joined.add_(position, op)
        for r in op.outputs:
            if r.buffer not in op.mutates:
                self._of[r.buffer], self._whole[r.buffer] = joined, r
                self._made_at[r.buffer] = position

    def _joined(self, sources: list[OpGroup], position: int, op: Op) -> OpGroup | None:
        """The open groups that make an op's operands, as one; those that would make it too large are left."""
        fitting: list[OpGroup] = []
        total = 1
        for group in sorted(sources, key=lambda g: -g.at):
            if total + len(group.members) <= MOST_OPS and not self._over_the_turn(group, position, op):
                fitting.append(group)
                total += len(group.members)
            else:
                group.is_open = False
        if not fitting:
            return None
        first, *others = fitting
        for other in others:
            first.members += other.members
            first.made |= other.made
            first.reads |= other.reads
            first.writes |= other.writes
            for b in other.made:
                self._of[b] = first
            other.members, other.is_open = [], False
        return first

    def _over_the_turn(self, group: OpGroup, position: int, op: Op) -> bool:
        """Whether a group of the forward would wait long for the backward, with more bytes than it makes."""
        if op.phase is Phase.FORWARD or self._ops[group.at].phase is not Phase.FORWARD:
            return False
        if position - group.at <= _SOON:
            return False
        return self._size(group.reads - group.made) > self._size(group.made)

    def _size(self, buffers: Iterable[BufferId]) -> int:
        return sum(self._bytes.get(b, 0) for b in buffers)

    def _late(self, op: Op) -> OpGroup | None:
        """A closed group that an op with a small result joins: all that it reads is there, as it was."""
        read = {r.buffer for r in op.inputs}
        makers = {id(g): g for g in (self._of.get(b) for b in read) if g is not None and not g.is_open}
        if len(makers) != 1 or op.mutates or read & self._written_inside:
            return None
        [group] = makers.values()
        if len(group.members) >= MOST_OPS or self._ops[group.at].phase is not op.phase:
            return None
        taken, given = max((_bytes(r) for r in op.inputs), default=0), sum(_bytes(r) for r in op.outputs)
        if given * _SMALL > taken:
            return None
        for r in op.inputs:
            b = r.buffer
            if self._written_at.get(b, -1) > group.at:
                return None
            if b in group.made:
                if path(self._whole[b], r) is None:
                    return None
                continue
            maker = self._of.get(b)
            if (maker.at if maker is not None else self._made_at.get(b, -1)) >= group.at:
                return None
        return group


def _bytes(region: Region) -> int:
    return int(region.numel * region.dtype.itemsize)


def _refusals(program: Program, inside: Container[int]) -> Iterable[Refusal]:
    """What could be part of a cluster by what it does, and is not."""
    for position, op in enumerate(program.ops):
        if position in inside or op.phase is Phase.UPDATE or not op.outputs:
            continue
        reason = why_not(op, program) or "no op beside it reads or makes what it makes or reads"
        first = op.outputs[0].buffer
        yield Refusal("fuse", op.name, first, program.buffers[first].size_bytes, reason, op.site)
