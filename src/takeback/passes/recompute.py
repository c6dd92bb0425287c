"""Drops values that are cheap to rebuild from what is alive anyway, and rebuilds them just before they are read again.

    keep:     v = gelu(h) ............ v is alive over the peak ............ mm(dy, v)
    rebuild:  v = gelu(h) .. v dies ..         (h is alive anyway)     .. v' = gelu(h); mm(dy, v')

Only pure, deterministic ops that read and write each element about once are run again (pointwise ops, norms, copies),
with eager's bits. Everything that is alive at the peak and can be
rebuilt is dropped together, because chains pay only together; then the next peak is looked at, until it stops falling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from takeback.capture.program import (
    Argument,
    Buffer,
    BufferId,
    Op,
    Phase,
    Region,
    Role,
    Scratch,
    Special,
    map_regions,
    regions,
)
from takeback.ownership.curve import alive_bytes
from takeback.ownership.facts import COPY
from takeback.ownership.lifetimes import Lifetime, lifetimes
from takeback.passes.draft import Draft, slot_of
from takeback.passes.overwrite import overwrite

aten = torch.ops.aten

_NORMS = frozenset((aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default))
_MOST_OPS_PER_VALUE = 4
_MOST_ROUNDS = 12
_LEAST_GAIN = 0.002  #: of the peak; less is not worth running anything twice
_LEAST_SHARE = 0.0005  #: of the peak; smaller values are left alone


@dataclass(frozen=True)
class _Rebuild:
    """`value` dies after its last use before the peak; `ops` make it again just before the op at `before`."""

    value: BufferId
    before: int
    ops: tuple[int, ...]  #: positions of the ops to run again, in order


def recompute(draft: Draft) -> Draft:
    """Lowers the peak as far as cheap rebuilding goes."""
    best, (best_peak, _) = draft, _peak(draft)
    for _ in range(_MOST_ROUNDS):
        rebuilds = _candidates(best, _peak(best)[1], int(best_peak * _LEAST_SHARE))
        if not rebuilds:
            break
        changed = _apply(best, rebuilds)
        peak, _ = _peak(changed)
        if peak > best_peak * (1 - _LEAST_GAIN):
            break
        best, best_peak = changed, peak
    return best


def _peak(draft: Draft) -> tuple[int, int]:
    """(The most bytes alive, the op where they are), once dying operands are overwritten."""
    placed = overwrite(draft)
    slots = {b: slot_of(placed, b) for b in placed.placements}
    curve = alive_bytes(draft.program, slots, draft.kept)
    at = max(range(len(curve)), key=curve.__getitem__)
    return curve[at], at


# -- which values ------------------------------------------------------------------------------------------------


def _cheap(op: Op) -> bool:
    target = op.target
    if isinstance(target, Special) or op.holds is not None or op.phase is not Phase.FORWARD:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target is aten.native_batch_norm.default:
        return bool(op.args[5]) and _norm_keeps_bits(op)
    if op.mutates:
        return False
    return target in _NORMS or target in COPY or torch.Tag.pointwise in target.tags


def _norm_keeps_bits(op: Op) -> bool:
    """`_norm_again` has the bits of training in single and double precision, on rows or channels that lie together."""
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


class _View:
    """What the choice needs to know of a program."""

    def __init__(self, draft: Draft) -> None:
        program = self.program = draft.program
        self.alive: Mapping[BufferId, Lifetime] = lifetimes(program, draft.kept)
        self.kept = draft.kept | {r.buffer for r in (*program.returned, *program.grads.values())}
        self.made: dict[BufferId, int] = {}
        self.uses: dict[BufferId, list[int]] = {}
        self.written: dict[BufferId, list[int]] = {}
        for position, op in enumerate(program.ops):
            for buffer in dict.fromkeys(r.buffer for r in op.inputs):
                self.uses.setdefault(buffer, []).append(position)
            for buffer in op.mutates:
                self.written.setdefault(buffer, []).append(position)
            for buffer in dict.fromkeys(r.buffer for r in op.outputs):
                if buffer not in op.mutates:
                    self.made.setdefault(buffer, position)

    def available(self, buffer: BufferId, made: int, at: int) -> bool:
        """True if the bytes that the op at `made` read are still the same, and still there, at `at`."""
        if any(made <= w < at for w in self.written.get(buffer, ())):
            return False
        return self.program.buffers[buffer].role.borrowed or (buffer in self.alive and self.alive[buffer].end > at)


def _candidates(draft: Draft, at: int, least_bytes: int) -> list[_Rebuild]:
    view = _View(draft)
    program = draft.program
    found: list[_Rebuild] = []
    dropped: set[BufferId] = set()
    for buffer, life in view.alive.items():
        if not life.start < at < life.end - 1 or buffer in view.kept or buffer in view.written:
            continue
        if program.buffers[buffer].size_bytes < least_bytes or buffer not in view.made:
            continue
        uses = view.uses.get(buffer, [])
        later = [u for u in uses if u > at]
        if at in uses or not later:
            continue
        chain = _chain(view, buffer, later[0], dropped, _MOST_OPS_PER_VALUE)
        if chain is not None:
            found.append(_Rebuild(buffer, later[0], tuple(sorted(set(chain)))))
            dropped.add(buffer)
    return found


def _chain(view: _View, buffer: BufferId, at: int, dropped: set[BufferId], budget: int) -> list[int] | None:
    """The ops that make `buffer` again at `at` from what is alive there, or None if they are too many or too dear."""
    made = view.made.get(buffer)
    if made is None or budget == 0 or not _cheap(view.program.ops[made]):
        return None
    if view.written.get(buffer):
        return None
    op = view.program.ops[made]
    if op.target is aten.native_batch_norm.default and next(regions(op.results)).buffer != buffer:
        return None
    chain: list[int] = []
    for region in _read(op):
        if region.buffer not in dropped and view.available(region.buffer, made, at):
            continue
        if view.program.buffers[region.buffer].role.borrowed:
            return None
        inner = _chain(view, region.buffer, at, dropped, budget - 1 - len(chain))
        if inner is None:
            return None
        chain += [i for i in inner if i not in chain]
    return [*chain, made] if len(chain) < budget else None


def _read(op: Op) -> Iterator[Region]:
    """What is read to rebuild an op's first result."""
    if op.target is aten.native_batch_norm.default:
        yield from regions((*op.args[:3], *op.results[1:]))
        return
    for arg in op.args:
        yield from regions(arg)
    for arg in op.kwargs.values():
        yield from regions(arg)


# -- the new program ---------------------------------------------------------------------------------------------


def _apply(draft: Draft, rebuilds: list[_Rebuild]) -> Draft:
    program = draft.program
    buffers: dict[BufferId, Buffer] = dict(program.buffers)
    inserted: dict[int, list[Op]] = {}
    renamed: dict[int, dict[BufferId, BufferId]] = {}  # from which position on, which buffer is which
    rebuilt: set[BufferId] = set()
    for each in rebuilds:
        fresh: dict[BufferId, BufferId] = {}
        ops: list[Op] = []

        def new(like: Region, size_bytes: int) -> Region:
            ident = BufferId(len(buffers))
            assert ident not in buffers
            buffers[ident] = Buffer(ident, size_bytes, Role.INTERNAL)
            return replace(like, buffer=ident)

        for position in each.ops:
            op = program.ops[position]
            if op.target is aten.native_batch_norm.default:
                again = _norm_again(op, buffers, new)
                copies = {next(regions(op.results)).buffer: next(regions(again[-1].results)).buffer}
            else:
                outputs = {r.buffer: r for r in op.outputs}
                copies = {b: new(r, buffers[b].size_bytes).buffer for b, r in outputs.items()}
                again = [_again(op, copies)]
            ops += [_substitute(o, fresh, results=False) for o in again]
            fresh |= copies
        rebuilt |= {r.buffer for o in ops for r in o.outputs}
        inserted.setdefault(each.before, []).extend(ops)
        renamed.setdefault(each.before, {})[each.value] = fresh[each.value]
    out: list[Op] = []
    table: dict[BufferId, BufferId] = {}
    for position, op in enumerate(program.ops):
        for one in inserted.get(position, ()):
            out.append(_substitute(one, table))
        table.update(renamed.get(position, {}))
        out.append(_substitute(op, table) if table else op)
    return replace(
        draft,
        program=replace(program, ops=tuple(out), buffers=buffers),
        rebuilt=draft.rebuilt | rebuilt,
    )


def _again(op: Op, copies: Mapping[BufferId, BufferId]) -> Op:
    """The same op with results of its own."""
    scratch = tuple(
        replace(s, result=copies.get(s.result, s.result)) if s.result is not None else s for s in op.scratch
    )
    results = map_regions(op.results, lambda r: replace(r, buffer=copies[r.buffer]))
    assert isinstance(results, tuple)
    return replace(op, results=results, scratch=scratch)


def _norm_again(op: Op, buffers: Mapping[BufferId, Buffer], new: Callable[[Region, int], Region]) -> list[Op]:
    """A training batch norm's result, from the mean and inverse deviation it saved: one pass, no statistics, and the
    running ones untouched. With invstd * weight for a weight, 1 for a variance and 0 for eps, the kernel for
    evaluation scales by the very number that the one for training did (tests/passes/test_recompute.py)."""
    x, weight, bias = op.args[:3]
    out, mean, invstd = op.results
    assert isinstance(out, Region)
    assert isinstance(invstd, Region)
    size = buffers[invstd.buffer].size_bytes
    plain = replace(op, mutates=(), kwargs={}, scratch=(), grad_mode=False)
    ones = new(invstd, size)
    ops = [replace(plain, target=aten.ones_like.default, args=(invstd,), results=(ones,))]
    scale: Argument = invstd
    if isinstance(weight, Region):
        scale = new(invstd, size)
        ops.append(replace(plain, target=aten.mul.Tensor, args=(invstd, weight), results=(scale,)))
    result = new(out, buffers[out.buffer].size_bytes)
    nothing = [new(replace(invstd, shape=(0,), stride=(1,)), 0) for _ in range(2)]
    args = (x, scale, bias, mean, ones, False, 0.0, 0.0)
    scratch = (Scratch(buffers[out.buffer].size_bytes, 0, None, result.buffer),)
    ops.append(replace(plain, args=args, results=(result, *nothing), scratch=scratch))
    return ops


def _substitute(op: Op, table: Mapping[BufferId, BufferId], *, results: bool = True) -> Op:
    """The op with buffers replaced by others: in what it reads and, unless told not to, in what it gives."""

    def change(region: Region) -> Region:
        target = table.get(region.buffer)
        return region if target is None else replace(region, buffer=target)

    if not table or not any(r.buffer in table for r in (*op.inputs, *op.outputs)):
        return op
    args, given = map_regions(op.args, change), map_regions(op.results, change) if results else op.results
    assert isinstance(args, tuple)
    assert isinstance(given, tuple)
    return replace(op, args=args, results=given, kwargs={k: map_regions(v, change) for k, v in op.kwargs.items()})
