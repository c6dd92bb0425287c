"""Gives every write its own value: an in-place pointwise op over a whole buffer becomes the functional op.

The user's `relu_()` or `+=` overwrites because he said so; as a functional op it is one more candidate for overwriting
(and takes the same bytes again, since its operand dies there), but now both values have a name and can be rebuilt.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from takeback.compiler.ownership.facts import bits_refusal, inplace_overload, out_overload
from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import Buffer, BufferId, Op, OpOverload, Phase, Region, Role, Special, renaming
from takeback.compiler.schema import schema_of


def functionalize(draft: Draft) -> Draft:
    """Rewrites what can be rewritten; the update's writes stay as they are, and what has other bits in place."""
    program = draft.program
    buffers = dict(program.buffers)
    current: dict[BufferId, BufferId] = {}
    ops: list[Op] = []
    change = renaming(current)  # by what `current` says at the time
    for op in program.ops:
        target = _functional(op, buffers)
        if target is None:
            ops.append(op.map(reads=change, writes=change))
            continue
        [mutated] = op.mutates
        fresh = BufferId(len(buffers))
        buffers[fresh] = Buffer(fresh, buffers[mutated].size_bytes, Role.INTERNAL)
        read = replace(op, target=target, mutates=()).map(reads=change)
        current[mutated] = fresh
        ops.append(read.map(writes=change))
    done = replace(program, ops=tuple(ops), buffers=buffers).map_named(change)
    return replace(draft, program=done, kept=frozenset(current.get(b, b) for b in draft.kept))


def _functional(op: Op, buffers: dict[BufferId, Buffer]) -> OpOverload | None:
    """The functional form of an op that overwrites a whole internal buffer, elementwise; or None."""
    target = op.target
    if isinstance(target, Special) or op.phase is Phase.UPDATE or len(op.mutates) != 1 or len(op.results) != 1:
        return None
    name = schema_of(target).name
    onto, result = op.args[0], op.results[0]
    if not name.endswith("_") or not isinstance(onto, Region) or result != onto:
        return None
    buffer = buffers[op.mutates[0]]
    if buffer.role.borrowed or onto.buffer != buffer.id or not onto.packed or onto.span_bytes != (0, buffer.size_bytes):
        return None
    found = getattr(getattr(torch.ops.aten, name[:-1], None), schema_of(target).overload, None)
    if found is None or torch.Tag.pointwise not in found.tags or torch.Tag.nondeterministic_seeded in found.tags:
        return None
    if schema_of(found).signature != schema_of(target).signature:
        return None  # pow_.Scalar has a number for an exponent, pow.Scalar one for a base
    # An in-place op keeps the dtype of its operand, a functional one may promote.
    if any(isinstance(a, Region) and a.dtype != onto.dtype for a in op.args[1:]):
        return None
    if bits_refusal(replace(op, target=found, mutates=())) is not None:
        return None
    return found if out_overload(found) is not None or inplace_overload(found) is not None else None
