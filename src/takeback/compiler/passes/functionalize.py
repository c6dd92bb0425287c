"""Gives every write its own value: an in-place pointwise op over a whole buffer becomes the functional op.

The user's `relu_()` or `+=` overwrites because he said so; as a functional op it is one more candidate for overwriting
(and takes the same bytes again, since its operand dies there), but now both values have a name and can be rebuilt.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from takeback.compiler.ownership.facts import inplace_overload, out_overload
from takeback.compiler.passes.draft import Draft
from takeback.compiler.program import Buffer, BufferId, Op, OpOverload, Phase, Region, Role, Special, map_regions
from takeback.compiler.schema import schema_of


def functionalize(draft: Draft) -> Draft:
    """Rewrites what can be rewritten; the update's writes into the user's tensors stay as they are."""
    program = draft.program
    buffers = dict(program.buffers)
    current: dict[BufferId, BufferId] = {}
    ops: list[Op] = []

    def change(region: Region) -> Region:
        target = current.get(region.buffer)
        return region if target is None else replace(region, buffer=target)

    for op in program.ops:
        args, kwargs = map_regions(op.args, change), {k: map_regions(v, change) for k, v in op.kwargs.items()}
        assert isinstance(args, tuple)
        target = _functional(op, buffers)
        if target is not None:
            [mutated] = op.mutates
            fresh = BufferId(len(buffers))
            buffers[fresh] = Buffer(fresh, buffers[mutated].size_bytes, Role.INTERNAL)
            current[mutated] = fresh
            results = map_regions(op.results, change)
            assert isinstance(results, tuple)
            ops.append(replace(op, target=target, args=args, kwargs=kwargs, results=results, mutates=()))
            continue
        results = map_regions(op.results, change)
        assert isinstance(results, tuple)
        mutates = tuple(current.get(b, b) for b in op.mutates)
        scratch = tuple(
            replace(s, result=current.get(s.result, s.result)) if s.result is not None else s for s in op.scratch
        )
        ops.append(replace(op, args=args, kwargs=kwargs, results=results, mutates=mutates, scratch=scratch))
    done = replace(
        program,
        ops=tuple(ops),
        buffers=buffers,
        loss=change(program.loss),
        aux=tuple(change(r) for r in program.aux),
        grads={i: change(r) for i, r in program.grads.items()},
        grad_norm=change(program.grad_norm) if program.grad_norm else None,
        found_inf=change(program.found_inf) if program.found_inf else None,
    )
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
    # An in-place op keeps the dtype of its operand, a functional one may promote.
    if any(isinstance(a, Region) and a.dtype != onto.dtype for a in op.args[1:]):
        return None
    return found if out_overload(found) is not None or inplace_overload(found) is not None else None
