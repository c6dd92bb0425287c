"""Several ops become one op on a `Cluster`, and one on a cluster becomes its ops again: the two ways between a program
that is planned and the ops that were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from takeback.compiler.program import (
    Argument,
    Buffer,
    BufferId,
    Cluster,
    Op,
    Phase,
    Program,
    Region,
    Role,
    Scratch,
    map_regions,
)

ALIGNMENT_BYTES = 16  #: generated kernels read this many bytes at once where an operand begins at a multiple of it


def clustered(
    ops: tuple[Op, ...],
    buffers: Mapping[BufferId, Buffer],
    leaving: Callable[[BufferId], bool],
) -> Op:
    """One op in place of several, which are in order. `leaving`: whether a buffer that they make is read by others."""
    local: dict[BufferId, BufferId] = {}
    entering: dict[Region, BufferId] = {}
    table: dict[BufferId, Buffer] = {}
    made = dict.fromkeys(r.buffer for op in ops for r in op.outputs if r.buffer not in op.mutates)

    def enter(region: Region) -> None:
        if region.buffer not in made and region not in entering:
            ident = entering[region] = BufferId(len(table))
            table[ident] = replace(buffers[region.buffer], id=ident, name="")

    for op in ops:
        for region in op.inputs:
            enter(region)
    for b in made:
        ident = local[b] = BufferId(len(table))
        table[ident] = Buffer(ident, buffers[b].size_bytes, Role.INTERNAL)

    def look(region: Region) -> Region:
        if region.buffer in local:
            return replace(region, buffer=local[region.buffer])
        first = region.offset * region.dtype.itemsize % ALIGNMENT_BYTES // region.dtype.itemsize
        return replace(region, buffer=entering[region], offset=first)

    inside = tuple(
        replace(
            op,
            args=map_regions(op.args, look),
            kwargs={name: map_regions(value, look) for name, value in op.kwargs.items()},
            results=map_regions(op.results, look),
            mutates=tuple(entering[r] for r in op.inputs if r.buffer in op.mutates),
            scratch=(),
        )
        for op in ops
    )
    whole = {r.buffer: r for op in reversed(ops) for r in op.outputs if r.buffer in made}
    results = tuple(whole[b] for b in made if leaving(b))
    mutated = dict.fromkeys(b for op in ops for b in op.mutates)
    operands = tuple(entering)
    cluster = Cluster(
        inside,
        table,
        tuple(map(look, operands)),
        tuple(map(look, results)),
        tuple(i for i, r in enumerate(operands) if r.buffer in mutated),
    )
    last = ops[-1]
    phase = Phase.FORWARD if all(op.phase is Phase.FORWARD for op in ops) else Phase.BACKWARD
    op = Op(cluster, operands, {}, results, tuple(mutated), phase, False, last.site)
    return replace(op, scratch=results_asked(op, buffers))


def results_asked(op: Op, buffers: Mapping[BufferId, Buffer]) -> tuple[Scratch, ...]:
    """What a cluster asks for, whatever its kernel is: the bytes of its results, none of which it gives back. What else
    there is, and in which order, a replay shows; it is true of that kernel alone."""
    made = [r.buffer for r in op.outputs if r.buffer not in op.mutates]
    return tuple(Scratch(buffers[b].size_bytes, i, None, b) for i, b in enumerate(made))


def of_any_kernel(program: Program) -> Program:
    """The program with what its clusters ask for as if no replay had shown it."""
    ops = tuple(
        replace(op, scratch=results_asked(op, program.buffers)) if isinstance(op.target, Cluster) else op
        for op in program.ops
    )
    return replace(program, ops=ops)


def expanded(op: Op, buffers: dict[BufferId, Buffer]) -> Iterator[Op]:
    """The ops of a cluster over the regions of the program that it stands in. What has no bytes there gets buffers of
    its own, which are added to the table."""
    cluster = op.target
    assert isinstance(cluster, Cluster)
    operands = {local.buffer: region for local, region in zip(cluster.inputs, op.args, strict=True)}
    given = {local.buffer: r.buffer for local, r in zip(cluster.results, op.outputs, strict=True)}
    named: dict[BufferId, BufferId] = {}
    free = max(buffers, default=-1) + 1

    def look(region: Region) -> Argument:
        outer = operands.get(region.buffer)
        if outer is not None:
            return outer
        if region.buffer in given:
            return replace(region, buffer=given[region.buffer])
        if region.buffer not in named:
            ident = named[region.buffer] = BufferId(free + len(named))
            buffers[ident] = replace(cluster.buffers[region.buffer], id=ident)
        return replace(region, buffer=named[region.buffer])

    for inner in cluster.ops:
        written = [operands[b] for b in inner.mutates]
        yield replace(
            inner,
            args=map_regions(inner.args, look),
            kwargs={name: map_regions(value, look) for name, value in inner.kwargs.items()},
            results=map_regions(inner.results, look),
            mutates=tuple(r.buffer for r in written if isinstance(r, Region)),
        )


def unclustered(program: Program) -> Program:
    """The program with every cluster as the ops it is made of."""
    if not any(isinstance(op.target, Cluster) for op in program.ops):
        return program
    buffers = dict(program.buffers)
    ops: list[Op] = []
    for op in program.ops:
        ops.extend(expanded(op, buffers) if isinstance(op.target, Cluster) else (op,))
    return replace(program, ops=tuple(ops), buffers=buffers)
