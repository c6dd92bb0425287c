"""Faults in what is rebuilt: an op runs again that draws random numbers, or on operands that are not what they were."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from mutant import Mutant, proposed
from plans_to_break import Subject

from takeback.compiler.passes.draft import Draft, Fresh, Overwrites, Placement
from takeback.compiler.program import BufferId, Op, Program, Special, renaming


def rebuild_wrong(subject: Subject, draw: Random) -> Mutant | None:
    draft = subject.layout.draft
    chances = _chances(draft.program)
    random_ones = [chance for chance in chances if draws(draft.program.ops[chance[0]])]
    if not chances:
        return None
    position, before = draw.choice(random_ones if random_ones and draw.random() < 0.8 else chances)
    return Mutant(
        proposed(subject.layout, again(draft, position, before)), f"op {position} runs again before op {before}"
    )


def again(draft: Draft, position: int, before: int) -> Draft:
    """The op at `position` once more just before another, into buffers of its own; whoever comes after reads those."""
    program = draft.program
    op = program.ops[position]
    buffers = dict(program.buffers)
    copies: dict[BufferId, BufferId] = {}
    for b in dict.fromkeys(r.buffer for r in op.outputs):
        copies[b] = BufferId(len(buffers))
        buffers[copies[b]] = replace(buffers[b], id=copies[b], name="")
    change = renaming(copies)
    in_place = renaming({b: copy for b, copy in copies.items() if b in op.mutates})
    ops = [
        *program.ops[:before],
        op.map(reads=in_place, writes=change),
        *(later.map(reads=change, writes=change) for later in program.ops[before:]),
    ]
    placements: dict[BufferId, Placement] = {**draft.placements, **{b: Fresh() for b in copies.values()}}
    for b, placement in draft.placements.items():
        if isinstance(placement, Overwrites) and placement.op >= before:
            onto = copies.get(placement.buffer, placement.buffer)
            placements[b] = Overwrites(onto, placement.op + 1)
    kept = frozenset(copies.get(b, b) for b in draft.kept)
    changed = replace(program, ops=tuple(ops), buffers=buffers).map_named(change)
    return replace(draft, program=changed, placements=placements, kept=kept)


def _chances(program: Program) -> list[tuple[int, int]]:
    """Ops that must not run again, each with an op that reads what it gives."""
    found: list[tuple[int, int]] = []
    ops = program.ops
    for position, op in enumerate(ops):
        mine = {r.buffer for r in op.outputs}
        if isinstance(op.target, Special) or not mine or op.expected is not None:
            continue
        if any(program.buffers[b].role.borrowed for b in mine):
            continue
        changed = _first_change(ops, position)
        for later in range(position + 1, len(ops)):
            if mine & {r.buffer for r in ops[later].inputs} and (draws(op) or op.mutates or changed < later):
                found.append((position, later))
    return found


def _first_change(ops: tuple[Op, ...], position: int) -> int:
    """Where something that the op reads is written again."""
    mine = {r.buffer for r in ops[position].inputs}
    return next((i for i in range(position + 1, len(ops)) if mine & set(ops[i].mutates)), len(ops))


def draws(op: Op) -> bool:
    if isinstance(op.target, Special):
        return False
    return torch.Tag.nondeterministic_seeded in op.target.tags and "scaled_dot_product" not in op.name
