"""Faults in what is rebuilt: an op runs again that draws random numbers, or on operands that are not what they were."""

from __future__ import annotations

from random import Random

import torch
from mutant import Mutant, proposed
from plans_to_break import Subject

from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.draft import Choice, Draft, Rebuild
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.pack import pack
from takeback.compiler.program import Op, Special


def rebuild_wrong(subject: Subject, draw: Random) -> Mutant | None:
    draft = subject.unplaced
    chances = _chances(draft)
    if not chances:
        return None
    extra = draw.choice(chances)
    chosen = subject.layout.draft.chosen
    rebuilds = {*(chosen.choice.rebuilds if chosen is not None else ()), extra}
    placed = overwrite(apply(draft, Choice(tuple(sorted(rebuilds)))))
    if subject.settings.early is False:
        placed = pack(placed)
    return Mutant(proposed(placed), f"op {extra.op} runs again before op {extra.before}")


def _chances(draft: Draft) -> list[Rebuild]:
    """Ops that must not run again, each before an op that reads what it gives."""
    found: list[Rebuild] = []
    ops = draft.program.ops
    for position, op in enumerate(ops):
        if isinstance(op.target, Special) or not op.outputs or op.expected is not None:
            continue
        if "batch_norm" in op.name:
            continue  # has a form of its own to run again in
        changed = _first_change(ops, position)
        for later in range(position + 1, len(ops)):
            reads = {r.buffer for r in ops[later].inputs} & {r.buffer for r in op.outputs if r.buffer not in op.mutates}
            if reads and (_draws(op) or op.mutates or changed < later):
                found.append(Rebuild(later, position))
    return found


def _first_change(ops: tuple[Op, ...], position: int) -> int:
    """Where something that the op reads is written again."""
    mine = {r.buffer for r in ops[position].inputs}
    return next((i for i in range(position + 1, len(ops)) if mine & set(ops[i].mutates)), len(ops))


def _draws(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in op.target.tags and "scaled_dot_product" not in op.name
