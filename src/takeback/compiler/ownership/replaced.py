"""Ops in whose place a pass put others that give the same but for rounding: what of that can be proved with symbols.

In: the program before and after. That the new ops compute what the old ones did is not proved here: sums in another
order have no common symbol, so numbers must show it. All around them is proved: the new ops read nothing but what the
old ones read, with the same values in it, and everything else gives the same, if they give the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from takeback.compiler.ownership.contents import SymbolTable, WriteLayer
from takeback.compiler.ownership.symbol_walk import MeaningError, SymbolWalk
from takeback.compiler.program import BufferId, Op, Program, show_op


@dataclass(frozen=True)
class Replaced:
    """`old` are positions in `before`, `new` those in `after`; `kept` are the buffers that were to last to the end of
    the step then. A buffer that both programs have is the same value in both. `what` says it to the reader."""

    what: str
    before: Program
    after: Program
    kept: frozenset[BufferId]
    old: frozenset[int]
    new: frozenset[int]


def walk_around(replaced: Replaced) -> tuple[SymbolWalk, SymbolWalk]:
    """Both programs, walked: in the second, the new ops leave behind what the old ones left. Raises `MeaningError`."""
    table = SymbolTable()
    then, now = (SymbolWalk(table, program, fills=True) for program in (replaced.before, replaced.after))
    read, left = _walk_old(then, replaced)
    new = [replaced.after.ops[i] for i in sorted(replaced.new)]
    made = _written(new)
    for position, op in enumerate(replaced.after.ops):
        if position not in replaced.new:
            now.step(op)
            continue
        for region in op.inputs:
            b = region.buffer
            if b not in made and read.get(b) != now.contents.final(b):
                raise MeaningError(
                    f"{show_op(op, replaced.after.buffers)[:200]} reads what the replaced ops did not read"
                )
        if position == max(replaced.new):
            for b, layers in left.items():
                now.leave_(b, layers, varies=then.varies(b))
    return then, now


def _walk_old(
    then: SymbolWalk, replaced: Replaced
) -> tuple[dict[BufferId, object], dict[BufferId, tuple[WriteLayer, ...]]]:
    """What the old ops read of others, by buffer, and what they left behind."""
    made = _written([replaced.before.ops[i] for i in sorted(replaced.old)])
    read: dict[BufferId, object] = {}
    left: dict[BufferId, tuple[WriteLayer, ...]] = {}
    for position, op in enumerate(replaced.before.ops):
        if position in replaced.old:
            for region in op.inputs:
                b = region.buffer
                if b not in made and read.setdefault(b, then.contents.final(b)) != then.contents.final(b):
                    raise MeaningError(f"%{b} is not the same whenever the replaced ops read it")
        then.step(op)
        if position in replaced.old:
            left |= {r.buffer: then.contents.layers(r.buffer) for r in op.outputs}
    return read, left


def _written(ops: list[Op]) -> set[BufferId]:
    return {b for op in ops for b in (*(r.buffer for r in op.outputs), *op.mutates)}
