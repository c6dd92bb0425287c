"""Leaves out reads that can only ever give the same: a value that Python reads, and that follows from numbers alone.

A model that looks whether its positions count up from zero asks this of an arange it has just made; in every step the
answer costs a wait for the device, and on a GPU a step that waits is no CUDA graph. What led to such a read, and to
nothing else, goes with it. What depends on the batch, on a parameter or on random numbers is read as before.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from takeback.compiler.ownership.facts import EMPTY
from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import BufferId, Cluster, Number, Op, Special


def unread(draft: Draft) -> Draft:
    """The draft without them."""
    program = draft.program
    fixed: set[BufferId] = set()  # what holds the same in every step
    idle: set[int] = set()
    for position, op in enumerate(program.ops):
        written = {*op.mutates, *(r.buffer for r in op.outputs)}
        if all(r.buffer in fixed for r in op.inputs) and fixed.issuperset(op.mutates) and _repeats(op):
            fixed |= written
            if op.expected is not None:
                idle.add(position)
        else:
            fixed -= written
    if not idle:
        return draft
    return replace(draft, program=replace(program, ops=_without(program.ops, idle, _named(draft))))


def _repeats(op: Op) -> bool:
    """Whether an op gives the same on the same operands, in every step."""
    target = op.target
    if isinstance(target, Special | Cluster) or target.namespace != "aten" or target in EMPTY:
        return False
    reads = any(isinstance(a, Number) for a in (*op.args, *op.kwargs.values()))
    return not reads and torch.Tag.nondeterministic_seeded not in target.tags


def _named(draft: Draft) -> set[BufferId]:
    return {region.buffer for _, region in draft.program.named_regions()} | draft.kept


def _without(ops: tuple[Op, ...], idle: set[int], needed: set[BufferId]) -> tuple[Op, ...]:
    """The ops that are left when these go, and what only they read. `needed`: what is read after the last one."""
    dropped = set(idle)
    feeds = {r.buffer for position in idle for r in ops[position].inputs}
    for position in range(len(ops) - 1, -1, -1):
        op = ops[position]
        if position in idle:
            continue
        written = {*op.mutates, *(r.buffer for r in op.outputs)}
        if written and written <= feeds and not written & needed and _repeats(op):
            dropped.add(position)
            feeds |= {r.buffer for r in op.inputs}
        else:
            needed |= {r.buffer for r in (*op.inputs, *op.outputs)} | set(op.mutates)
    return tuple(op for position, op in enumerate(ops) if position not in dropped)
