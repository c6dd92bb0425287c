"""Runs the last product of a model, its loss and the loss's backward for some rows at a time: logits are never whole.

    recorded:  logits = x @ W.T                        here:   for each part of the rows:
               loss = cross_entropy(logits, targets)               logits = x[part] @ W.T
               grad = backward of that                             loss += of the part, grad = of the part
               dx, dW = grad @ W, grad.T @ x                       dx[part] = grad @ W, dW += grad.T @ x[part]

Nothing here knows of cross-entropy: any product is taken whose rows are treated one by one until they are added up or
multiplied (row_loop.py). What is computed for a row is what was recorded; sums over rows are added up in another order,
and in float32 where they were narrower. So results are not eager's bits, and mode exact does without this pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from takeback.compiler.ownership.lifetimes import lifetimes
from takeback.compiler.ownership.replaced import Replaced
from takeback.compiler.passes.chunk_ops import parts_of, write_loop, written_fill
from takeback.compiler.passes.draft import Draft, Refusal
from takeback.compiler.passes.row_loop import NoLoopError, RowLoop, find_loop, is_last
from takeback.compiler.passes.rowwise import PRODUCTS, name_of
from takeback.compiler.program import BufferId, Op, Phase, Program, Region

#: Logits are worth cutting if they are at least this share of the peak.
SHARE = 0.02
#: So many ways to group rows are tried, the finest first.
GROUPINGS = 4
#: So many parts at most on a GPU, and none of fewer bytes or rows than these: its products want work for all of it, and
#: every part reads and writes the weight's gradient once.
PARTS, PART_BYTES, PART_ROWS = 16, 32 << 20, 2048
PARTS_ON_CPU = 8
#: A GPU's products like numbers of rows that their tiles divide.
TILE_ROWS = 64


def chunk_head(draft: Draft, *, chunks: int | None = None) -> Draft:
    """Rewrites every such product; `chunks`: into so many parts."""
    program = draft.program
    least = SHARE * _peak_bytes(program, draft.kept)
    for buffer in [r.buffer for r in _candidates(program) if program.buffers[r.buffer].size_bytes >= least]:
        draft = _rewrite(draft, buffer, chunks)
    return draft


def _candidates(program: Program) -> Iterator[Region]:
    for op in program.ops:
        if op.phase is Phase.FORWARD and name_of(op) in PRODUCTS and not op.mutates:
            result = op.results[0]
            if isinstance(result, Region) and len(result.shape) >= 2 and result.shape[-2] > 1:
                yield result


def _rewrite(draft: Draft, buffer: BufferId, chunks: int | None) -> Draft:
    program = draft.program
    seed = next(i for i, op in enumerate(program.ops) if any(r.buffer == buffer for r in op.outputs))
    op, size = program.ops[seed], program.buffers[buffer].size_bytes
    refused: NoLoopError | None = None
    for groups in _groups(program, seed):
        try:
            loop = find_loop(program, draft.kept, seed, groups)
        except NoLoopError as error:
            refused = refused or error
            continue
        return _written(draft, loop, chunks or _count(program, size, op.outputs[0].shape[-2]))
    if refused is None or not is_last(program, seed):
        return draft
    refusal = Refusal("chunk_head", op.name, buffer, size, refused.reason, refused.op.site or op.site)
    return replace(draft, refusals=(*draft.refusals, refusal))


def _groups(program: Program, seed: int) -> list[int]:
    """Into how many groups the rows may fall: one each, or those of a leading dimension under which the loss looks at
    something (the sequences of a batch)."""
    rows = program.ops[seed].outputs[0].shape[-2]
    forward = [op for op in program.ops[seed:] if op.phase is Phase.FORWARD]
    looks = {r.shape[0] for op in forward for r in op.inputs if len(r.shape) > 1}
    fewer = sorted((n for n in looks if 1 < n < rows and rows % n == 0), reverse=True)
    return [rows, *fewer[:GROUPINGS]]


def _count(program: Program, size_bytes: int, rows: int) -> int:
    if program.device_type == "cpu":
        return PARTS_ON_CPU
    if size_bytes < 2 * PART_BYTES:
        return 1
    return max(2, min(PARTS, size_bytes // PART_BYTES, rows // PART_ROWS))


def _written(draft: Draft, loop: RowLoop, chunks: int) -> Draft:
    program = draft.program
    parts = tuple(parts_of(loop.groups, chunks, 1 if program.device_type == "cpu" else TILE_ROWS))
    if len(parts) < 2:
        return draft
    done = write_loop(program, draft.kept, loop, parts)
    hoisted = set(loop.before)
    before: list[Op] = []
    after: list[Op] = []
    for position, op in enumerate(program.ops):
        if position in loop.cuts or position in done.dropped:
            continue
        if position in loop.numbers:
            op = written_fill(program, op)
        (before if position < loop.seed or position in hoisted else after).append(op)
    ops = (*before, *done.ops, *after)
    new = replace(program, ops=ops, buffers=done.buffers)
    seed = program.ops[loop.seed]
    size = program.buffers[seed.outputs[0].buffer].size_bytes
    replaced = Replaced(
        f"{seed.name}: {size:,} bytes of results exist in {len(parts)} parts, one at a time",
        program,
        new,
        draft.kept,
        frozenset((*loop.cuts, *done.dropped)),
        frozenset(range(len(before), len(before) + len(done.ops))),
    )
    return replace(draft, program=new, replaced=(*draft.replaced, replaced))


def _peak_bytes(program: Program, kept: frozenset[BufferId]) -> int:
    """The most bytes of values that are alive at one time."""
    change = [0] * (len(program.ops) + 1)
    for buffer, life in lifetimes(program, kept).items():
        change[life.start] += program.buffers[buffer].size_bytes
        change[life.end] -= program.buffers[buffer].size_bytes
    most = alive = 0
    for difference in change:
        alive += difference
        most = max(most, alive)
    return most
