"""Gives the gradients fixed places in one flat buffer for each dtype: slices in the order of the parameters, aligned.

    float32:  | bias 0 | weight 0      | bias 1 | weight 1    | ...      offsets relative to the flat buffer's start

No flat buffer exists as such: each slice lives from its first write to its update, and its bytes are free for others
before and after. Where all slices are alive, at the end of the backward, they are one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from takeback import flat
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.passes.draft import Draft, Packed, Placement, Refusal, owner_of
from takeback.compiler.program import BufferId, Phase, Region


def pack(draft: Draft) -> Draft:
    """Packs every gradient that is a whole buffer of its own and lives until the update."""
    program = draft.program
    alive = lifetimes(program, draft.kept)
    first_update = next((i for i, op in enumerate(program.ops) if op.phase is Phase.UPDATE), len(program.ops))
    placements: dict[BufferId, Placement] = dict(draft.placements)
    refusals: list[Refusal] = []
    packed: dict[BufferId, Region] = {}

    def refused(region: Region) -> str | None:
        buffer = program.buffers[region.buffer]
        if buffer.role.borrowed:
            return "the gradient is a tensor of the caller"
        if not region.packed or region.span_bytes != (0, buffer.size_bytes):
            return "the gradient is only a part of its buffer"
        if owner_of(draft, region.buffer) in packed:
            return "another gradient has the same bytes"
        if alive[region.buffer].end < first_update:
            return "nobody reads the gradient after the backward"
        return None

    regions = [region for _, region in sorted((program.slices or program.grads).items())]
    for region in regions if program.flags is None else (program.flags, *regions):
        size = program.buffers[region.buffer].size_bytes
        reason = refused(region)
        if reason is not None:
            assert program.flags is None, f"a group needs this slice, but {reason}"
            refusals.append(Refusal("pack", "gradient", region.buffer, size, reason))
            continue
        packed[owner_of(draft, region.buffer)] = region
    layout = flat.lay_out([(region.numel, region.dtype) for region in packed.values()])
    for i, (owner, region) in enumerate(packed.items()):
        if region.numel:
            placements[owner] = Packed(str(region.dtype).removeprefix("torch."), layout.start_bytes(i))
    return replace(draft, placements=placements, refusals=draft.refusals + tuple(refusals))
