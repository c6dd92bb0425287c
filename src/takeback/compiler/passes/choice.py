"""What is rebuilt, as data: a `Choice` is a set of "rebuild op i just before op j", and nothing else.

    keep:     v = gelu(h) ............ v is alive over the peak ............ mm(dy, v)
    rebuild:  v = gelu(h) .. v dies ..         (h is alive anyway)     .. v' = gelu(h); mm(dy, v')

Everything else follows from it: a read means the newest copy of a value, and what is not read again dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from takeback.compiler.passes.draft import Choice, Draft
from takeback.compiler.passes.rebuildable import rebuild, rebuild_gives
from takeback.compiler.program import Buffer, BufferId, Op, renaming


def fixed_buffers(draft: Draft) -> frozenset[BufferId]:
    """Buffers that are never replaced by a copy: what outlives the step, and what is written more than once."""
    program = draft.program
    written = {b for op in program.ops for b in op.mutates}
    return draft.kept | written | {r.buffer for r in (*program.returned, *program.grads.values())}


def apply(draft: Draft, choice: Choice) -> Draft:
    """The program with the chosen ops rebuilt, and their later readers reading the new results."""
    program = draft.program
    fixed = fixed_buffers(draft)
    buffers: dict[BufferId, Buffer] = dict(program.buffers)
    todo: dict[int, list[int]] = {}
    for each in sorted(choice.rebuilds):
        todo.setdefault(each.before, []).append(each.op)
    newest: dict[BufferId, BufferId] = {}
    rebuilt: set[BufferId] = set()
    out: list[Op] = []
    for position, op in enumerate(program.ops):
        for earlier in todo.get(position, ()):
            source = program.ops[earlier]
            made, copies = rebuild(source, program.device_type, buffers)
            out += [_reading(one, newest) for one in made]
            rebuilt |= {r.buffer for one in made for r in one.outputs}
            newest |= {
                old: copies[old]
                for old in (r.buffer for r in rebuild_gives(source, program.device_type))
                if old not in fixed
            }
        out.append(_reading(op, newest))
    return replace(
        draft,
        program=replace(program, ops=tuple(out), buffers=buffers),
        rebuilt=draft.rebuilt | frozenset(rebuilt),
    )


def _reading(op: Op, newest: Mapping[BufferId, BufferId]) -> Op:
    """The op, reading the newest copy of each of its operands."""
    return op.map(reads=renaming(newest))
