"""Runs the backward of cross-entropy in row chunks onto the log-probabilities: one vocabulary-sized buffer, not three.

    eager:   g = nll_loss_backward(...)              here:   for each chunk of rows:
             r = log_softmax_backward(g, logp)                   g = nll_loss_backward(chunk)
                                                                 logp[chunk] = log_softmax_backward(g, logp[chunk])

Both kernels treat every row by itself, so the bits are eager's. The chunk stays in cache, so it is faster, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from takeback.compiler.ownership.facts import geometry_refusal, out_overload
from takeback.compiler.ownership.lifetimes import Lifetime, lifetimes
from takeback.compiler.passes.draft import Draft, Refusal
from takeback.compiler.passes.rename import rename_in
from takeback.compiler.program import Buffer, BufferId, Op, Program, Region, Role

aten = torch.ops.aten

#: A chunk of this many bytes stays in a core's L2 cache between the two kernels.
CHUNK_BYTES = 1 << 20
#: A GPU wants work for all its threads: a large buffer is cut into this many chunks there, whatever their size.
CHUNKS_ON_GPU = 32


def chunk_loss(draft: Draft) -> Draft:
    """Rewrites every cross-entropy backward whose log-probabilities die there."""
    program = draft.program
    alive = lifetimes(program, draft.kept)
    kept = draft.kept | {r.buffer for r in program.returned}
    made_by = {
        r.buffer: (i, op)
        for i, op in enumerate(program.ops)
        for r in op.outputs
        if op.target is aten.nll_loss_backward.default
    }
    buffers = dict(program.buffers)
    table: dict[BufferId, BufferId] = {}
    replaced: dict[int, list[Op]] = {}
    refusals: list[Refusal] = []
    for position, op in enumerate(program.ops):
        if op.target is not aten._log_softmax_backward_data.default:
            continue
        grad, logp, result = op.args[0], op.args[1], op.results[0]
        assert isinstance(grad, Region)
        assert isinstance(logp, Region)
        assert isinstance(result, Region)
        if grad.buffer not in made_by:
            continue
        first, nll = made_by[grad.buffer]
        reason = _refusal(program, op, nll, position, alive, kept)
        size = program.buffers[result.buffer].size_bytes
        if reason is not None:
            refusals.append(Refusal("chunk_loss", op.name, result.buffer, size, reason, op.site))
            continue
        most = CHUNK_BYTES if program.device_type == "cpu" else max(CHUNK_BYTES, size // CHUNKS_ON_GPU)
        if size <= most:
            continue
        chunk = BufferId(len(buffers))
        rows = max(1, min(logp.shape[0], most // (logp.shape[1] * logp.dtype.itemsize)))
        buffers[chunk] = Buffer(chunk, rows * logp.shape[1] * logp.dtype.itemsize, Role.INTERNAL)
        replaced[first] = []
        replaced[position] = _chunks(nll, op, chunk, rows)
        table[result.buffer] = logp.buffer
    if not table:
        return replace(draft, refusals=draft.refusals + tuple(refusals))
    ops: list[Op] = []
    for position, op in enumerate(program.ops):
        ops.extend(replaced.get(position, [op]))
    rewritten = rename_in(draft, replace(program, ops=tuple(ops), buffers=buffers), table)
    return replace(rewritten, refusals=draft.refusals + tuple(refusals))


def _refusal(
    program: Program,
    op: Op,
    nll: Op,
    position: int,
    alive: Mapping[BufferId, Lifetime],
    kept: frozenset[BufferId],
) -> str | None:
    grad, logp, result = op.args[0], op.args[1], op.results[0]
    assert isinstance(grad, Region)
    assert isinstance(logp, Region)
    assert isinstance(result, Region)
    if nll.args[1] != logp:
        return "the two backward ops read different log-probabilities"
    if any(b in (grad.buffer, logp.buffer) for o in program.ops for b in o.mutates):
        return "the log-probabilities or their gradient are written in place"
    if len(logp.shape) != 2 or op.args[2] not in (1, -1):
        return "the log-probabilities are not rows of classes"
    if program.buffers[logp.buffer].role.borrowed or logp.buffer in kept or alive[logp.buffer].end > position + 1:
        return "the log-probabilities are read again later"
    if alive[grad.buffer].end > position + 1 or grad.buffer in kept:
        return "the gradient of the log-probabilities is read again later"
    geometry = geometry_refusal(op, result, logp, program.buffers)
    return None if geometry is None else str(geometry)


def _chunks(nll: Op, softmax: Op, chunk: BufferId, rows: int) -> list[Op]:
    nll_out = out_overload(aten.nll_loss_backward.default)
    softmax_out = out_overload(aten._log_softmax_backward_data.default)
    assert nll_out is not None
    assert softmax_out is not None
    upstream, logp, target, weight, reduction, ignored, total = nll.args
    assert isinstance(upstream, Region)
    assert isinstance(logp, Region)
    assert isinstance(target, Region)
    ops: list[Op] = []
    for start in range(0, logp.shape[0], rows):
        part = _rows(logp, start, rows)
        grad = Region(chunk, logp.dtype, part.shape, part.stride, 0)
        above = _rows(upstream, start, rows) if upstream.shape else upstream
        args = (above, part, _rows(target, start, rows), weight, reduction, ignored, total)
        ops.append(
            replace(
                nll,
                target=nll_out,
                args=args,
                kwargs={"grad_input": grad},
                results=(grad,),
                mutates=(chunk,),
                scratch=(),
            )
        )
        ops.append(
            replace(
                softmax,
                target=softmax_out,
                args=(grad, part, *softmax.args[2:]),
                kwargs={"out": part},
                results=(part,),
                mutates=(logp.buffer,),
                scratch=(),
            )
        )
    return ops


def _rows(region: Region, start: int, count: int) -> Region:
    count = min(count, region.shape[0] - start)
    return replace(region, shape=(count, *region.shape[1:]), offset=region.offset + start * region.stride[0])
