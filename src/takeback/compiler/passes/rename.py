"""Gives one buffer's uses to another: the rewriting that `move` and `chunk_loss` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import BufferId, Op, Program, Region, map_regions


def rename_in(draft: Draft, program: Program, table: Mapping[BufferId, BufferId]) -> Draft:
    """The draft with `program` in place of its own, renamed; what must be kept is renamed with it."""
    kept = frozenset(_final(b, table) for b in draft.kept)
    return replace(draft, program=rename(program, table), kept=kept)


def _final(buffer: BufferId, table: Mapping[BufferId, BufferId]) -> BufferId:
    while buffer in table:
        buffer = table[buffer]
    return buffer


def rename(program: Program, table: Mapping[BufferId, BufferId]) -> Program:
    """The program with every buffer of `table` replaced, everywhere it is read, written or returned."""
    if not table:
        return program

    def change(region: Region) -> Region:
        target = _final(region.buffer, table)
        return region if target == region.buffer else replace(region, buffer=target)

    def change_op(op: Op) -> Op:
        touched = any(r.buffer in table for r in (*op.inputs, *op.outputs)) or any(b in table for b in op.mutates)
        if not touched:
            return op
        args, results = map_regions(op.args, change), map_regions(op.results, change)
        assert isinstance(args, tuple)
        assert isinstance(results, tuple)
        kwargs = {k: map_regions(v, change) for k, v in op.kwargs.items()}
        mutates = tuple(dict.fromkeys(_final(b, table) for b in op.mutates))
        # What was a result of its own may be no result of this op any more, so its scratch names change too.
        scratch = tuple(replace(s, result=_final(s.result, table)) if s.result is not None else s for s in op.scratch)
        return replace(op, args=args, kwargs=kwargs, results=results, mutates=mutates, scratch=scratch)

    return replace(
        program,
        ops=tuple(change_op(op) for op in program.ops),
        loss=change(program.loss),
        aux=tuple(change(r) for r in program.aux),
        grads={i: change(r) for i, r in program.grads.items()},
        grad_norm=change(program.grad_norm) if program.grad_norm else None,
        found_inf=change(program.found_inf) if program.found_inf else None,
    )
