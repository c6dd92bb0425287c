"""Faults in clusters: one writes a result onto an operand that it still reads, draws random numbers that an op outside
of it has drawn, or is handed the operands, or the kernel, of another."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from break_rebuilds import draws
from mutant import Mutant, proposed, size_of, with_ops
from plans_to_break import Subject

from takeback.compiler.cluster import clustered, expanded
from takeback.compiler.passes.draft import Draft, Fresh, Overwrites, Packed
from takeback.compiler.program import BufferId, Cluster, Op, Region, renaming
from takeback.compiler.run.cluster_ops import eagerly

_ELEMENTS = 10  #: of an operand, that are changed to see what depends on them


def _clusters(draft: Draft) -> list[int]:
    return [i for i, op in enumerate(draft.program.ops) if isinstance(op.target, Cluster)]


def overwrite_in_cluster(subject: Subject, draw: Random) -> Mutant | None:
    """A cluster writes one of its results onto one of its operands."""
    draft, layout = subject.layout.draft, subject.layout
    positions = _clusters(draft)
    if not positions:
        return None
    position = draw.choice(positions)
    op = draft.program.ops[position]
    results = [r for r in op.outputs if r.buffer in layout.alive and r.buffer not in op.mutates and r.numel]
    operands = [r for r in op.inputs if r.buffer in layout.alive and r.numel and size_of(layout, r.buffer)]
    pairs = [(a, b) for a in results for b in operands if size_of(layout, b.buffer) >= size_of(layout, a.buffer)]
    pairs = [(a, b) for a, b in pairs if not isinstance(draft.placements.get(a.buffer), Overwrites)]
    last = [(a, b) for a, b in pairs if layout.alive[b.buffer].end == position + 1]
    if not pairs:
        return None
    result, operand = draw.choice(last if last and draw.random() < 0.8 else pairs)
    placements = {**draft.placements, result.buffer: Overwrites(operand.buffer, position)}
    if isinstance(draft.placements.get(result.buffer), Packed):
        placements = {b: Fresh() if isinstance(p, Packed) else p for b, p in placements.items()}
    broken = proposed(layout, replace(draft, placements=placements))
    what = f"cluster {position} writes %{result.buffer} onto its operand %{operand.buffer}"
    return Mutant(broken, what, lambda: depends_elsewhere(op, result, operand))


def depends_elsewhere(op: Op, result: Region, operand: Region) -> str | None:
    """Whether a kernel that writes the result as it goes could read a byte that it has overwritten: found by changing
    elements of the operand one by one, and looking at which elements of the results are others then. Any but the one
    that lies on the changed bytes may be computed after those were written."""
    cluster = op.target
    assert isinstance(cluster, Cluster)
    if sum(r.buffer == operand.buffer for r in op.args if isinstance(r, Region)) > 1:
        return "it reads the operand in two ways"
    which, mine = op.args.index(operand), op.outputs.index(result)
    made = torch.Generator().manual_seed(5)
    given = [_drawn(r, made) for r in cluster.inputs]
    before = eagerly(cluster)([t.clone() for t in given])
    elements = range(operand.numel)
    for element in Random(3).sample(elements, min(_ELEMENTS, len(elements))):
        for change in (float("nan"), 3.0, -2.0):
            others = [t.clone() for t in given]
            changed = others[which].reshape(-1)
            changed[element] = change if others[which].is_floating_point() else int(change == 3.0)
            others[which] = changed.reshape(given[which].shape)
            after = eagerly(cluster)(others)
            for number, (then, now) in enumerate(zip(before, after, strict=True)):
                new = [i for i in range(then.numel()) if not _same(then.reshape(-1)[i], now.reshape(-1)[i])]
                here = {_byte(operand, element)}
                if new and (number != mine or {_byte(result, i) for i in new} - here):
                    return f"element {new[0]} of a result depends on bytes that are overwritten"
    return None


def _drawn(region: Region, made: torch.Generator) -> torch.Tensor:
    if region.dtype.is_floating_point:
        return torch.rand(region.shape, generator=made, dtype=torch.float32).to(region.dtype)
    return torch.randint(0, 2, region.shape, generator=made).to(region.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a == b) or (bool(a != a) and bool(b != b))


def _byte(region: Region, element: int) -> tuple[int, int]:
    """Where an element lies in its buffer, and how many bytes it has."""
    at = region.offset
    for extent, step in zip(reversed(region.shape), reversed(region.stride), strict=True):
        element, index = divmod(element, extent)
        at += index * step
    return at * region.dtype.itemsize, region.dtype.itemsize


def draw_in_cluster(subject: Subject, draw: Random) -> Mutant | None:
    """A cluster draws again what it is to read: the numbers are others, and so are all that come after."""
    draft = subject.layout.draft
    ops = draft.program.ops
    drawers = [i for i, op in enumerate(ops) if draws(op) and not op.mutates and op.outputs]
    chances = [
        (i, j)
        for i in drawers
        for j in _clusters(draft)
        if j > i and {r.buffer for r in ops[i].outputs} & {r.buffer for r in ops[j].inputs}
    ]
    if not chances:
        return None
    position, reader = draw.choice(chances)
    buffers = dict(draft.program.buffers)
    inside = list(expanded(ops[reader], buffers))
    copies: dict[BufferId, BufferId] = {}
    for b in dict.fromkeys(r.buffer for r in ops[position].outputs):
        copies[b] = BufferId(max(buffers) + 1)
        buffers[copies[b]] = replace(buffers[b], id=copies[b], name="")
    change = renaming(copies)
    again = replace(ops[position], phase=ops[reader].phase, scratch=()).map(writes=change)
    results = {r.buffer for r in ops[reader].outputs}
    whole = clustered((again, *(op.map(reads=change) for op in inside)), buffers, results.__contains__)
    changed = list(ops)
    changed[reader] = whole
    program = replace(draft.program, ops=tuple(changed))
    broken = proposed(subject.layout, replace(draft, program=program))
    return Mutant(broken, f"cluster {reader} draws again what op {position} has drawn")


def hand_over(subject: Subject, draw: Random) -> Mutant | None:
    """A cluster gets its operands in another order, one of another cluster's, or another's kernel."""
    draft = subject.layout.draft
    positions = _clusters(draft)
    if not positions:
        return None
    kind = draw.choice((_exchanged, _borrowed, _borrowed, _other_kernel))
    found = kind(draft, draw, draw.choice(positions), positions)
    if found is None:
        return None
    ops, what = found
    placements = {b: Fresh() if isinstance(p, Overwrites) else p for b, p in draft.placements.items()}
    return Mutant(proposed(subject.layout, replace(with_ops(draft, ops), placements=placements)), what)


def _exchanged(draft: Draft, draw: Random, position: int, positions: list[int]) -> tuple[tuple[Op, ...], str] | None:
    op = draft.program.ops[position]
    pairs = [(i, j) for i in range(len(op.args)) for j in range(i) if _alike(op.args[i], op.args[j])]
    if not pairs:
        return None
    i, j = draw.choice(pairs)
    args = list(op.args)
    args[i], args[j] = args[j], args[i]
    return _with(
        draft, position, replace(op, args=tuple(args))
    ), f"operands {j} and {i} of cluster {position} change places"


def _borrowed(draft: Draft, draw: Random, position: int, positions: list[int]) -> tuple[tuple[Op, ...], str] | None:
    op = draft.program.ops[position]
    written = {b for b, buffer in draft.program.buffers.items() if buffer.role.borrowed}
    written |= {r.buffer for each in draft.program.ops[:position] for r in each.outputs}
    others = [r for p in positions if p != position for r in draft.program.ops[p].inputs if r.buffer in written]
    pairs = [(i, r) for i, mine in enumerate(op.args) for r in others if _alike(mine, r) and r not in op.args]
    pairs = [(i, r) for i, r in pairs if i not in op.target.writes]
    if not pairs:
        return None
    i, other = draw.choice(pairs)
    args = (*op.args[:i], other, *op.args[i + 1 :])
    return _with(draft, position, replace(op, args=args)), f"cluster {position} reads %{other.buffer} of another"


def _other_kernel(draft: Draft, draw: Random, position: int, positions: list[int]) -> tuple[tuple[Op, ...], str] | None:
    op = draft.program.ops[position]
    others = [draft.program.ops[p] for p in positions if p != position]
    fitting = [o for o in others if _takes(o.target, op) and o.target.key != op.target.key]
    if not fitting:
        return None
    return _with(
        draft, position, replace(op, target=draw.choice(fitting).target)
    ), f"cluster {position} runs another's kernel"


def _takes(cluster: Cluster, op: Op) -> bool:
    mine = op.target
    return (
        len(cluster.inputs) == len(mine.inputs)
        and len(cluster.results) == len(mine.results)
        and cluster.writes == mine.writes
        and all(map(_alike, cluster.inputs, mine.inputs))
        and all(map(_alike, cluster.results, mine.results))
    )


def _alike(one: object, other: object) -> bool:
    """Whether one kernel takes both, and they are not the same."""
    if not isinstance(one, Region) or not isinstance(other, Region):
        return False
    return (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)


def _with(draft: Draft, position: int, op: Op) -> tuple[Op, ...]:
    return (*draft.program.ops[:position], op, *draft.program.ops[position + 1 :])
