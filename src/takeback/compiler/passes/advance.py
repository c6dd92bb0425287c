"""Moves each parameter's update up to where its gradient is complete and nobody reads the parameter any more.

    end:     dw3 .. dw2 .. dw1 .. update 3, 2, 1          all gradients are alive at once
    early:   dw3, update 3 .. dw2, update 2 .. dw1, ..    each lives only until its update

Nothing else is reordered. No update moves before the last value that the step reads into Python or the last change of
the random state: up to there the step can still be taken back.
"""

from __future__ import annotations

from dataclasses import replace

from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import BufferId, Op, Phase, Special


def advance(draft: Draft) -> Draft:
    """The draft with every update op as early as the data allow."""
    program = draft.program
    touched: dict[BufferId, int] = {}  # by buffer: the last op before the update that reads or writes it
    barrier = -1
    for position, op in enumerate(program.ops):
        if op.phase is Phase.UPDATE:
            continue
        if isinstance(op.target, Special) or op.may_send_back:
            barrier = position
        for buffer in _touches(op):
            touched[buffer] = position
    after: dict[int, list[Op]] = {}
    for together in _parts([op for op in program.ops if op.phase is Phase.UPDATE]):
        where = max([barrier, *(touched.get(b, -1) for op in together for b in _touches(op))])
        after.setdefault(where, []).extend(together)
    ops: list[Op] = list(after.get(-1, ()))
    for position, op in enumerate(program.ops):
        if op.phase is not Phase.UPDATE:
            ops += [op, *after.get(position, ())]
    return replace(draft, program=replace(program, ops=tuple(ops)))


def _parts(update: list[Op]) -> list[list[Op]]:
    """The update in parts that share nothing they write: one for each parameter, or for each call of a fused kernel.
    A part stays together: weight decay alone could come sooner, and then nothing that reads the weight could be
    rebuilt after it."""
    parts: list[tuple[set[BufferId], list[Op]]] = []
    for op in update:
        mine = {*(r.buffer for r in op.outputs), *op.mutates}
        reads = {r.buffer for r in op.inputs}
        linked = [p for p in parts if p[0] & (mine | reads)]
        written, ops = (linked[0][0], linked[0][1]) if linked else (set(), [])
        for other in linked[1:]:
            written |= other[0]
            ops += other[1]
            parts.remove(other)
        if not linked:
            parts.append((written, ops))
        written |= mine
        ops.append(op)
    return [ops for _, ops in parts]


def _touches(op: Op) -> list[BufferId]:
    return [*(r.buffer for r in (*op.inputs, *op.outputs)), *op.mutates]
