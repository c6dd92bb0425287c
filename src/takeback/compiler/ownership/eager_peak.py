"""What eager would have held alive: the recorded step as sizes, with the moments at which eager itself lets go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from takeback.compiler.program import BufferId, Op, Phase, Program


@dataclass(frozen=True)
class EagerPeak:
    """The most bytes of results and scratch that eager holds at one time, and the op where it does."""

    transient_bytes: int
    position: int
    curve: tuple[int, ...]  #: the most bytes alive during each op


def eager_peak(program: Program) -> EagerPeak:
    """`program` is the recorded one, before any pass has changed it."""
    death = _deaths(program)
    freed: dict[int, list[BufferId]] = {}
    for buffer, position in death.items():
        freed.setdefault(position, []).append(buffer)
    alive: dict[BufferId, int] = {}
    total = 0
    curve: list[int] = []
    for position, op in enumerate(program.ops):
        for buffer in freed.get(position, ()):
            total -= alive.pop(buffer, 0)
        new = [
            b
            for b in dict.fromkeys(r.buffer for r in op.outputs)
            if b not in alive and not program.buffers[b].role.borrowed and b not in op.mutates
        ]
        inside = total + _inside(op, program, new)
        for buffer in new:
            alive[buffer] = program.buffers[buffer].size_bytes
            total += alive[buffer]
        curve.append(max(inside, total))
    top = max(range(len(curve)), key=curve.__getitem__, default=0)
    return EagerPeak(curve[top] if curve else 0, top, tuple(curve))


def forward_peak_bytes(program: Program) -> int:
    """The most that eager's forward holds where nothing is kept for a backward: of the recorded program."""
    last = {r.buffer: i for i, op in enumerate(program.ops) if op.phase is Phase.FORWARD for r in op.inputs}
    alive: dict[BufferId, int] = {}
    held = most = 0
    for position, op in enumerate(program.ops):
        if op.phase is not Phase.FORWARD:
            continue
        new = [
            b
            for b in dict.fromkeys(r.buffer for r in op.outputs)
            if b not in alive and not program.buffers[b].role.borrowed and b not in op.mutates
        ]
        inside = held + _inside(op, program, new)
        for b in new:
            alive[b] = program.buffers[b].size_bytes
            held += alive[b]
        most = max(most, inside, held)
        for b in {*new, *(r.buffer for r in op.inputs)}:
            if last.get(b, -1) <= position:
                held -= alive.pop(b, 0)
    return most


def _inside(op: Op, program: Program, new: list[BufferId]) -> int:
    """The most that the op adds while it runs: its results and its scratch, in the order it asked for them."""
    counted = {s.result for s in op.scratch}
    level = sum(program.buffers[b].size_bytes for b in new if b not in counted)
    changes: list[tuple[int, int]] = []
    for s in op.scratch:
        changes.append((s.start, s.size_bytes))
        if s.end is not None:
            changes.append((s.end, -s.size_bytes))
    most = level
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


def _deaths(program: Program) -> Mapping[BufferId, int]:
    """When eager lets go. For the update's temporaries, which were not recorded: a Python variable holds its tensor
    until the next parameter's takes its name; what is consumed within one expression dies there."""
    death = dict(program.eager_death)
    made: dict[object, list[BufferId]] = {}
    for position, op in enumerate(program.ops):
        if op.phase is not Phase.UPDATE:
            continue
        fresh = [r.buffer for r in op.outputs if r.buffer not in op.mutates]
        if fresh:
            for before in made.get(op.target, ()):
                death.setdefault(before, position + 1)
            made[op.target] = fresh
            held = {b for each in made.values() for b in each}
            for region in op.inputs:
                if region.buffer in held:
                    death.setdefault(region.buffer, position + 1)
    return death
