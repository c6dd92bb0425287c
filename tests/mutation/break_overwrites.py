"""Faults in overwriting: a result is written onto an operand that its kernel still reads, that somebody else reads
later, or that is laid out in another way."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutant import Mutant, proposed, size_of
from plans_to_break import Subject

from takeback.compiler.passes.draft import Fresh, Overwrites, Packed
from takeback.compiler.program import Region, Special


def overwrite_wrong(subject: Subject, draw: Random) -> Mutant | None:
    draft = subject.layout.draft
    program, layout = draft.program, subject.layout
    position = draw.randrange(len(program.ops))
    op = program.ops[position]
    result = op.results[0] if op.results else None
    if isinstance(op.target, Special) or op.mutates or not isinstance(result, Region) or not result.numel:
        return None
    if result.buffer not in layout.alive or isinstance(draft.placements.get(result.buffer), Overwrites):
        return None
    operands = [
        r
        for r in op.inputs
        if r.buffer in layout.alive and r.numel and size_of(layout, r.buffer) and r.buffer != result.buffer
    ]
    if draw.random() < 0.8:  # the likely mistake: as large, or larger
        operands = [r for r in operands if size_of(layout, r.buffer) >= size_of(layout, result.buffer)]
    if not operands:
        return None
    operand = draw.choice(operands)
    placements = {**draft.placements, result.buffer: Overwrites(operand.buffer, position)}
    if isinstance(draft.placements.get(result.buffer), Packed):
        placements = {b: Fresh() if isinstance(p, Packed) else p for b, p in placements.items()}
    mutated = proposed(subject.layout, replace(draft, placements=placements))
    return Mutant(mutated, f"op {position} ({op.name}) writes %{result.buffer} onto %{operand.buffer}")
