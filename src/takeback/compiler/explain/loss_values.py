"""A program in; which of its buffers are the loss's own out: what is made behind the model's last layer and read by no
module, and the gradients of that, down to the first module.
"""

from __future__ import annotations

from collections.abc import Iterable

from takeback.compiler.program import BufferId, Op, Phase, Program


def loss_values(program: Program) -> frozenset[BufferId]:
    """None where no op has a module: nobody can tell the loss from the model there."""
    forward = [op for op in program.ops if op.phase is Phase.FORWARD]
    if not any(map(_module, forward)):
        return frozenset()
    backward = [op for op in program.ops if op.phase is Phase.BACKWARD]
    return _behind(forward) | _before(backward)


def _behind(forward: Iterable[Op]) -> frozenset[BufferId]:
    """What ops of no module make, and no module needs."""
    needed: set[BufferId] = set()
    made: set[BufferId] = set()
    for op in reversed(list(forward)):
        written = {r.buffer for r in op.outputs}
        if _module(op) or written & needed:
            needed |= {r.buffer for r in op.inputs}
            made -= written
        else:
            made |= written
    return frozenset(made - needed)


def _before(backward: Iterable[Op]) -> frozenset[BufferId]:
    """What ops of no module make of nothing that the backward of a module has made."""
    deep: set[BufferId] = set()
    made: set[BufferId] = set()
    for op in backward:
        written = {r.buffer for r in op.outputs}
        if _module(op) or any(r.buffer in deep for r in op.inputs):
            deep |= written
        else:
            made |= written
    return frozenset(made - deep)


def _module(op: Op) -> str:
    return op.site.module if op.site else ""
