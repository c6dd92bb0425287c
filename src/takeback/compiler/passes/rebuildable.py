"""Which ops may be rebuilt, that is run a second time with eager's bits, and what is then run.

An op is rebuilt only if it is pure and deterministic: an ATen kernel that writes nothing but its results and draws no
random numbers. The same kernel on the same operands gives the same bits wherever they lie. A training batch norm has
forms of its own, because its kernel would update the running statistics a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from takeback.compiler.ownership.facts import EMPTY
from takeback.compiler.passes.partial import partial, rebuilt_norm
from takeback.compiler.program import (
    Buffer,
    BufferId,
    Cluster,
    Op,
    Phase,
    Region,
    Scratch,
    Special,
    regions,
    renaming,
)
from takeback.compiler.schema import schema_of

aten = torch.ops.aten

_BATCH_NORMS = frozenset((aten.native_batch_norm.default, aten.cudnn_batch_norm.default))
#: Attention is tagged as random for the sake of its dropout; without dropout it draws nothing.
_ATTENTION = {
    getattr(aten, name).default: place
    for name, place in {
        "_scaled_dot_product_flash_attention_for_cpu": 3,
        "_scaled_dot_product_flash_attention": 3,
        "_scaled_dot_product_efficient_attention": 5,
        "_scaled_dot_product_cudnn_attention": 5,
    }.items()
}


def may_rebuild(op: Op, device: str) -> bool:
    """True if running the op once more, later in the step, has no effect but its results, with the same bits."""
    target = op.target
    if isinstance(target, Special) or op.may_send_back or op.phase is not Phase.FORWARD:
        return False
    if isinstance(target, Cluster):
        return partial(op) is not None
    if target.namespace != "aten" or target in EMPTY:
        return False
    if draws_random_numbers(op) or torch.Tag.nondeterministic_bitwise in target.tags:
        return False
    if target in _BATCH_NORMS:
        return bool(op.args[5]) and (device != "cpu" or _norm_keeps_bits(op))
    return not op.mutates and not schema_of(target).is_mutable and bool(op.outputs)


def _part(op: Op) -> Op:
    """Of a cluster, what makes its large results."""
    found = partial(op) if isinstance(op.target, Cluster) else op
    assert found is not None
    return found


def draws_random_numbers(op: Op) -> bool:
    assert not isinstance(op.target, Special)
    if torch.Tag.nondeterministic_seeded not in op.target.tags:
        return False
    place = _ATTENTION.get(op.target)
    if place is None:
        return True
    dropout = op.args[place] if len(op.args) > place else op.kwargs.get("dropout_p", 0.0)
    return dropout != 0.0


def _norm_keeps_bits(op: Op) -> bool:
    """`_rebuild_norm` has training's bits in single and double precision, on rows or channels that lie together."""
    x = op.args[0]
    assert isinstance(x, Region)
    order = (*range(2, len(x.shape)), 1) if len(x.shape) in (4, 5) else ()
    return x.dtype in (torch.float32, torch.float64) and (_dense(x, range(1, len(x.shape))) or _dense(x, order))


def _dense(x: Region, order: Sequence[int]) -> bool:
    """True if the elements lie one after the other, the last of `order` running fastest, dimension 0 slowest."""
    expected = 1
    for dim in (*reversed(order), 0):
        if x.shape[dim] != 1 and x.stride[dim] != expected:
            return False
        expected *= x.shape[dim]
    return bool(order)


def rebuild_reads(op: Op, device: str) -> Iterator[Region]:
    """What rebuilding the op reads."""
    op = _part(op)
    if op.target not in _BATCH_NORMS:
        yield from op.inputs
    elif device == "cpu":
        yield from regions((*op.args[:3], *op.results[1:]))
    else:
        yield from regions(op.args[:3])


def rebuild_gives(op: Op, device: str) -> tuple[Region, ...]:
    """What rebuilding the op gives: of a batch norm on the CPU the result alone, its statistics are read."""
    op = _part(op)
    return tuple(regions(op.results[0])) if op.target in _BATCH_NORMS and device == "cpu" else op.outputs


def stand_in(op: Op, device: str) -> Op:
    """An op that takes as long as rebuilding this one does."""
    op = _part(op)
    evaluates = op.target in _BATCH_NORMS and device == "cpu"
    return replace(op, args=(*op.args[:5], False, *op.args[6:])) if evaluates else op


def rebuild(op: Op, device: str, buffers: dict[BufferId, Buffer]) -> tuple[list[Op], dict[BufferId, BufferId]]:
    """The ops that make the results once more, into new buffers (added to `buffers`), and which those are."""

    def new(like: Region, size_bytes: int) -> Region:
        ident = BufferId(len(buffers))
        assert ident not in buffers
        buffers[ident] = replace(buffers[like.buffer], id=ident, size_bytes=size_bytes, name="")
        return replace(like, buffer=ident)

    op = _part(op)
    if op.target in _BATCH_NORMS:
        if device == "cpu":
            # One pass, no statistics, and the running ones untouched: the kernel for evaluation scales by the very
            # number that the one for training did (tests/passes/test_rebuildable.py).
            [old] = rebuild_gives(op, device)
            size = buffers[old.buffer].size_bytes
            made = new(old, size)
            *before, last = rebuilt_norm(replace(op, results=(made, *op.results[1:])), buffers)
            return [*before, replace(last, scratch=(Scratch(size, 0, None, made.buffer),))], {old.buffer: made.buffer}
        # The kernel for training once more, with no running statistics to update (checked on an H200, all layouts).
        op = replace(op, args=(*op.args[:3], None, None, *op.args[5:]), mutates=())
    outputs = {r.buffer: r for r in op.outputs}
    copies = {b: new(r, buffers[b].size_bytes).buffer for b, r in outputs.items()}
    return [op.map(writes=renaming(copies))], copies
