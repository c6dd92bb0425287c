"""Writes results onto operands that die at the very op: the operand's bytes become the result's.

A result may take an operand's bytes if the op's kernel allows it (ownership/facts.py), nobody reads the operand
afterwards, it is not the caller's, and both have the same shape, strides and dtype over the whole buffer. Where the
device's own allocator places, the kernel must also be one that writes into given bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from takeback.compiler.ownership.curve import alive_bytes
from takeback.compiler.ownership.facts import Refused, bits_refusal, geometry_refusal, kernels_operands
from takeback.compiler.ownership.kinds import Kind, kind_of
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.passes.draft import Borrowed, Draft, Fresh, Home, Overwrites, Placement, Refusal, owner_of
from takeback.compiler.program import BufferId, Op, Region


def overwrite(draft: Draft) -> Draft:
    """Fills the placement table."""
    program = draft.program
    alive = lifetimes(program, draft.kept)
    returned = {r.buffer for r in program.returned} | draft.kept
    placements: dict[BufferId, Placement] = {
        b.id: Borrowed() if b.role.borrowed else Fresh() for b in program.buffers.values()
    }
    refusals: list[Refusal] = []

    def refused(op: Op, position: int, result: Region, operand: Region) -> Refused | None:
        if program.buffers[operand.buffer].role.borrowed:
            return Refused.BORROWED
        geometry = geometry_refusal(op, result, operand, program.buffers)
        if geometry is not None:
            return geometry
        if operand.buffer in returned:
            return Refused.RETURNED
        if alive[operand.buffer].end > position + 1:
            return Refused.READ_LATER
        bits = bits_refusal(op)
        if bits is not None:
            return bits
        if kind_of(op, overwrites=True) is not Kind.ALLOCATE:
            return None
        if draft.home is Home.ALLOCATOR:
            return Refused.OWN_RESULT
        return Refused.FILLED if _new_memory_is_filled() else None

    for position, op in enumerate(program.ops):
        operands = kernels_operands(op)
        result = op.results[0] if op.results else None
        if not operands or not isinstance(result, Region) or result.buffer not in alive:
            continue
        reasons: dict[Refused, None] = {}
        for index in operands:
            operand = op.args[index]
            if not isinstance(operand, Region):
                continue
            reason = refused(op, position, result, operand)
            if reason is None:
                placements[result.buffer] = Overwrites(operand.buffer, position)
                break
            reasons[reason] = None
        else:
            size = program.buffers[result.buffer].size_bytes
            for reason in reasons:
                refusals.append(Refusal("overwrite", op.name, result.buffer, size, reason, op.site))
    return replace(draft, placements=placements, refusals=draft.refusals + tuple(refusals))


def planned_curve(draft: Draft) -> list[int]:
    """Bytes alive at each op of a draft, once what may be overwritten is."""
    placed = overwrite(draft)
    owners = {b: owner_of(placed, b) for b in placed.placements}
    return alive_bytes(draft.program, owners, draft.kept)


def _new_memory_is_filled() -> bool:
    """A step that is called with another setting is recorded anew."""
    return torch.are_deterministic_algorithms_enabled() and bool(torch.utils.deterministic.fill_uninitialized_memory)
