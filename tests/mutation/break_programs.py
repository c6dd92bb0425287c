"""Faults in the program, as a broken pass would leave them: an op reads another operand, or ops stand in another order.
The program is placed anew, so that everything fits: only its meaning is another one.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutant import Mutant, proposed, with_ops
from plans_to_break import Subject

from takeback.compiler.passes.draft import Draft, Overwrites
from takeback.compiler.program import Argument, Op, Program, Region, Special


def redirect(subject: Subject, draw: Random) -> Mutant | None:
    """An operand is read from another buffer, or from another place of its own."""
    draft = subject.layout.draft
    program = draft.program
    position = draw.randrange(len(program.ops))
    op = program.ops[position]
    operands = [r for r in op.inputs if r.buffer not in op.mutates and r.numel]
    if not operands or isinstance(op.target, Special):
        return None
    operand = draw.choice(operands)
    others = _others(program, position, operand)
    if not others:
        return None
    other = draw.choice(others)
    ops = (*program.ops[:position], _reading(op, operand, other), *program.ops[position + 1 :])
    changed = replace(with_ops(draft, ops), placements=_without(draft, position, operand))
    return Mutant(
        proposed(subject.layout, changed), f"op {position} reads %{other.buffer} instead of %{operand.buffer}"
    )


def _others(program: Program, position: int, operand: Region) -> list[Region]:
    """Regions of the same shape that something is in by then."""
    written = {b for b, buffer in program.buffers.items() if buffer.role.borrowed}
    for op in program.ops[:position]:
        written |= {r.buffer for r in op.outputs}
    found: dict[Region, None] = {}
    for op in program.ops:
        for r in (*op.inputs, *op.outputs):
            same = r.dtype == operand.dtype and r.shape == operand.shape
            if same and r != operand and r.buffer in written:
                found[r] = None
    return list(found)


def _reading(op: Op, operand: Region, other: Region) -> Op:
    def changed(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(changed(part) for part in argument)
        return other if argument == operand and isinstance(argument, Region) else argument

    return replace(op, args=tuple(map(changed, op.args)), kwargs={k: changed(v) for k, v in op.kwargs.items()})


def _without(draft: Draft, position: int, operand: Region) -> dict[object, object]:
    """Placements without an overwriting of an operand that is not read any more."""
    from takeback.compiler.passes.draft import Fresh

    return {
        b: Fresh() if isinstance(p, Overwrites) and p.op == position and p.buffer == operand.buffer else p
        for b, p in draft.placements.items()
    }


def reorder(subject: Subject, draw: Random) -> Mutant | None:
    """Two ops change places."""
    draft = subject.layout.draft
    count = len(draft.program.ops)
    one = draw.randrange(count - 1)
    other = min(count - 1, one + draw.choice((1, 1, 2, 3, 5, 8, 20)))
    if one == other:
        return None
    return Mutant(proposed(subject.layout, swapped(draft, one, other)), f"ops {one} and {other} have changed places")


def swapped(draft: Draft, one: int, other: int) -> Draft:
    """What was decided about each op goes with it."""
    ops = list(draft.program.ops)
    ops[one], ops[other] = ops[other], ops[one]
    at = {one: other, other: one}
    placements = {
        b: replace(p, op=at.get(p.op, p.op)) if isinstance(p, Overwrites) else p for b, p in draft.placements.items()
    }
    return replace(with_ops(draft, tuple(ops)), placements=placements)


def shifted(draft: Draft, source: int, target: int) -> Draft:
    """The op at `source` runs at `target`; those between move up or down by one."""
    order = list(range(len(draft.program.ops)))
    order.insert(target, order.pop(source))
    at = {old: new for new, old in enumerate(order)}
    placements = {b: replace(p, op=at[p.op]) if isinstance(p, Overwrites) else p for b, p in draft.placements.items()}
    return replace(with_ops(draft, tuple(draft.program.ops[i] for i in order)), placements=placements)
