"""Lets clusters of the backward make again what the forward made by moving memory, so that less is kept for them.

A fused kernel that reads `h` can make `h.float()` or `gelu(h)` on its way, at no price. Which values to keep, so that
all that the backward's clusters read can be made of them, is a smallest cut: between what only the forward can make (a
product, a random mask) and what the backward reads, with the sizes of values as capacities. What an op outside of
clusters reads in the backward is kept anyway, and costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from takeback.compiler.geometry import path
from takeback.compiler.ownership.facts import COPY, FILL
from takeback.compiler.passes.fusible import why_not
from takeback.compiler.passes.partial import is_layer_norm, rebuilt_layer_norm
from takeback.compiler.program import Buffer, BufferId, Op, Phase, Program, Region, Special, renaming
from takeback.compiler.schema import schema_of

#: Ops beyond the pointwise ones, copies and fills that cost no more than reading their operands, inside of a kernel.
#: Not `cat`, which asks in each place whose it is, once for every reader.
_CHEAP = frozenset(
    (
        *("native_layer_norm", "_fused_rms_norm", "slice_backward", "select_backward", "constant_pad_nd"),
        *("repeat", "flip", "embedding", "arange", "tril", "triu"),
    )
)
_LONGEST = 48  #: ops that one cluster makes again
_SMALL = 1000  #: times the size of the largest value: what is smaller is kept
_MOST_READ = 1.25  #: so many bytes may be read to make one


@dataclass(frozen=True)
class BackwardGroup:
    """A group of ops of the backward that may run as a cluster: its ops, and where it runs."""

    ops: tuple[Op, ...]
    at: int


def made_again(
    program: Program, kept: frozenset[BufferId], readers: Sequence[BackwardGroup], buffers: dict[BufferId, Buffer]
) -> list[tuple[Op, ...]]:
    """For each reader its ops, after those that make again what it reads; these get new buffers. What is to be kept
    for them is read as before."""
    plan = _LeastKept(program, kept, readers)
    return [plan.with_makers(reader, buffers) for reader in readers]


class _LeastKept:
    """Which values of the forward are kept."""

    def __init__(self, program: Program, kept: frozenset[BufferId], readers: Sequence[BackwardGroup]) -> None:
        self._program = program
        self._maker: dict[BufferId, Op] = {}
        self._whole: dict[BufferId, Region] = {}
        self._find_makers(max((r.at for r in readers), default=-1))
        inside = {id(op) for reader in readers for op in reader.ops}
        self._beside: dict[BufferId, set[BufferId]] = {}  # what all readers of a value read, too
        wanted, needed = self._reads(readers, inside)
        named = {r.buffer for _, r in program.named_regions()} | kept
        largest = max((b.size_bytes for b in program.buffers.values() if not b.role.borrowed), default=0)
        small = {b for b in wanted if program.buffers[b].size_bytes * _SMALL < largest}
        self._there = needed | named | small  # in bytes when the backward begins
        self._forbid_long_ways()
        self._kept = self._there | self._cheapest(wanted - self._there)

    def _find_makers(self, last: int) -> None:
        """What an op of the forward makes of operands that stay as they are."""
        ops = self._program.ops
        written: dict[BufferId, list[int]] = {}
        for position, op in enumerate(ops):
            for b in op.mutates:
                written.setdefault(b, []).append(position)
        for position, op in enumerate(ops):
            if op.phase is not Phase.FORWARD or not _is_cheap(op) or why_not(op, self._program) is not None:
                continue
            if any(r.buffer in self._whole and path(self._whole[r.buffer], r) is None for r in op.inputs):
                continue
            touched = {r.buffer for r in (*op.inputs, *op.outputs)}
            if any(position <= w <= last for b in touched for w in written.get(b, ())):
                continue
            for r in op.outputs:
                self._maker[r.buffer], self._whole[r.buffer] = op, r

    def _reads(self, readers: Sequence[BackwardGroup], inside: set[int]) -> tuple[set[BufferId], set[BufferId]]:
        """What readers want, and what is needed in bytes by others of the backward."""
        wanted: set[BufferId] = set()
        needed: set[BufferId] = set()
        for reader in readers:
            own = {r.buffer for op in reader.ops for r in op.outputs}
            given = [r for op in reader.ops for r in op.inputs if r.buffer not in own]
            beside = {r.buffer for r in given}
            for r in given:
                whole = self._whole.get(r.buffer)
                if whole is not None and path(whole, r) is not None:
                    wanted.add(r.buffer)
                    self._beside[r.buffer] = self._beside.get(r.buffer, beside) & beside
                else:
                    needed.add(r.buffer)
        for op in self._program.ops:
            if op.phase is not Phase.FORWARD and id(op) not in inside:
                needed |= {r.buffer for r in op.inputs}
        return wanted, needed

    def _cheapest(self, wanted: set[BufferId]) -> set[BufferId]:
        """The values that are kept besides: a smallest cut between what is wanted and what nobody can make again."""
        import networkx  # type: ignore[import-untyped]  # mode exact does without

        graph = networkx.DiGraph()
        source, sink = "wanted", "made once"
        graph.add_nodes_from((source, sink))
        front = [b for b in wanted if self._counts(b)]
        graph.add_edges_from((source, ("in", b)) for b in front)
        seen = set(front)
        while front:
            b = front.pop()
            graph.add_edge(("in", b), ("out", b), capacity=self._program.buffers[b].size_bytes)
            maker = self._maker.get(b)
            if maker is None:
                graph.add_edge(("out", b), sink)
                continue
            for operand in dict.fromkeys(r.buffer for r in maker.inputs):
                if not self._counts(operand) or operand in self._there:
                    continue
                graph.add_edge(("out", b), ("in", operand))
                if operand not in seen:
                    seen.add(operand)
                    front.append(operand)
        if not graph.in_degree(sink):
            return set()
        _, (near, _) = networkx.minimum_cut(graph, source, sink)
        return {b for b in seen if ("in", b) in near and ("out", b) not in near}

    def _forbid_long_ways(self) -> None:
        """What is made of much more than it is itself is not made again: a long sum would be read term by term. What is
        there anyway takes no bytes, but a reader who does not want it for itself would have to read it."""
        sizes = self._program.buffers
        leaves: dict[BufferId, frozenset[BufferId]] = {}
        for b, op in list(self._maker.items()):  # in the order of the program
            read = {r.buffer for r in op.inputs if self._counts(r.buffer)}
            mine = frozenset().union(*(leaves.get(operand, frozenset((operand,))) for operand in read))
            free = self._beside.get(b, self._there)
            if sum(sizes[leaf].size_bytes for leaf in mine - free) > _MOST_READ * sizes[b].size_bytes:
                del self._maker[b]
            else:
                leaves[b] = mine

    def _counts(self, b: BufferId) -> bool:
        """Whether keeping it takes bytes: not where it is the caller's."""
        return not self._program.buffers[b].role.borrowed

    def with_makers(self, reader: BackwardGroup, buffers: dict[BufferId, Buffer]) -> tuple[Op, ...]:
        own = {r.buffer for op in reader.ops for r in op.outputs}
        copies: dict[BufferId, BufferId] = {}
        made: list[Op] = []

        def copy(b: BufferId) -> bool:
            """Makes a value again, unless it is kept; False if the reader would become too long."""
            if b in copies or b in self._kept or b not in self._maker or b in own:
                return True
            op = self._maker[b]
            if not all(copy(r.buffer) for r in op.inputs):
                return False
            if len(made) >= _LONGEST:
                return False
            ops = [op]
            if is_layer_norm(op) and b == op.outputs[0].buffer:
                ops = rebuilt_layer_norm(op, self._kept, buffers) or ops
            for one in ops:
                renamed: dict[BufferId, BufferId] = {}
                for r in one.outputs:
                    ident = BufferId(len(buffers))
                    assert ident not in buffers
                    buffers[ident] = replace(buffers[r.buffer], id=ident, name="")
                    renamed[r.buffer] = ident
                again = one.map(reads=renaming(copies), writes=renaming(renamed))
                made.append(replace(again, scratch=(), phase=Phase.BACKWARD))
                copies.update(renamed)
            return True

        for op in reader.ops:
            for r in op.inputs:
                if not copy(r.buffer):
                    return reader.ops
        if not made:
            return reader.ops
        change = renaming(copies)
        return (*made, *(op.map(reads=change) for op in reader.ops))


def _is_cheap(op: Op) -> bool:
    target = op.target
    if isinstance(target, Special) or op.mutates:
        return False
    return torch.Tag.pointwise in target.tags or target in COPY or target in FILL or schema_of(target).name in _CHEAP
