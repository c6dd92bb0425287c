"""What a step changes besides its own buffers: the user's tensors before the update, and the generators it draws from.

Facts about a program. Whoever runs one saves these first, so that a step which does not end can be taken back.
"""

from __future__ import annotations

import torch

from takeback.compiler.capture.randomness import default_generators, generator_key
from takeback.compiler.program import BufferId, Program, Role


def written_before_update(program: Program) -> list[BufferId]:
    """What the forward and backward write of the user's, in order: running statistics, counters. Gradients that have
    waited for this update are dropped with it, whether it succeeds or not."""
    others = (Role.CONSTANT, Role.GRADIENT)
    return [b for b in program.mutated if program.buffers[b].role.borrowed and program.buffers[b].role not in others]


def undo_bytes(program: Program) -> int:
    """What the saved copies of these take, outside of the plan."""
    return sum(program.buffers[b].size_bytes for b in written_before_update(program))


def generators_of(program: Program) -> tuple[torch.Generator, ...]:
    """The generators that the step draws from."""
    found: dict[int, torch.Generator] = {}
    for op in program.drawing:
        own = op.kwargs.get("generator")
        drawn = (own,) if isinstance(own, torch.Generator) else default_generators(program.device)
        for each in drawn:
            found.setdefault(generator_key(each), each)
    return tuple(found.values())
