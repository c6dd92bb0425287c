"""How many bytes are alive during each op, given whose bytes each buffer takes: the peak before anything is placed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from takeback.compiler.ownership.facts import COPY, FILL, out_overload
from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.program import BufferId, Op, Program, Special


def alive_bytes(program: Program, owners: Mapping[BufferId, BufferId], kept: Collection[BufferId] = ()) -> list[int]:
    """`owners` says for every internal buffer whose bytes it takes in the end; its own if it is not named."""
    windows: dict[BufferId, list[int]] = {}
    for buffer, life in lifetimes(program, kept).items():
        window = windows.setdefault(owners.get(buffer, buffer), [life.start, life.end])
        window[0], window[1] = min(window[0], life.start), max(window[1], life.end)
    change = [0] * (len(program.ops) + 1)
    for owner, (start, end) in windows.items():
        change[start] += program.buffers[owner].size_bytes
        change[end] -= program.buffers[owner].size_bytes
    level, curve = 0, []
    for position, op in enumerate(program.ops):
        level += change[position]
        curve.append(level + inside_bytes(op, owners))
    return curve


def inside_bytes(op: Op, owners: Mapping[BufferId, BufferId]) -> int:
    """How far the op's inside rises above its results and operands together: an op that allocates its own results
    may have released its scratch before it asks for them."""
    asks = isinstance(op.target, Special) or not (
        op.target in FILL or op.target in COPY or out_overload(op.target) is not None
    )
    events: list[tuple[int, int]] = []
    results = 0
    for s in op.scratch:
        if s.result is not None:
            if asks and owners.get(s.result, s.result) == s.result:
                events.append((s.start, s.size_bytes))
                results += s.size_bytes
        elif s.end is not None:
            events += [(s.start, s.size_bytes), (s.end, -s.size_bytes)]
    level = most = 0
    for _, step in sorted(events):
        level += step
        most = max(most, level)
    return max(most - results, 0)
