"""The oracle: runs a layout with a tag for every byte in place of the byte, in the slow and obvious way.

In: a layout, whatever is wrong with it. Out: what a step by it leaves behind, as tags. A tag says how its byte came
about: which op wrote it, from which tags, in which order. So two layouts that leave the same tags compute the same, and
whoever reads a byte that is not the one that was meant leaves other tags. Nothing is shared with the checks, the passes
or the generated code: programs are plain data, and are run here as they stand. A cluster is run op by op on bytes of
its own: it reads its operands when it begins, and gives its results when it ends.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from takeback.compiler.layout import Layout
from takeback.compiler.program import Cluster, HyperScalar, Number, Op, Program, Region, Special

Tags = npt.NDArray[np.uint64]

_WEIGHTS: Tags = np.random.default_rng(7).integers(1, 1 << 63, size=1 << 22, dtype=np.uint64) | np.uint64(1)
#: Of a convolution's backward: what the gradients of input, weight and bias are made of, by place.
_READ_FOR = {"convolution_backward": ((0, 2), (0, 1), (0,))}
_EMPTY = ("empty.", "empty_like.", "empty_strided.", "empty_permuted.", "new_empty.", "new_empty_strided.")


class Broken(Exception):
    """A layout that cannot even be walked: something lies outside of everything."""


def left_behind(layout: Layout) -> dict[str, int]:
    """What a step by this layout leaves behind, by name, as one tag each."""
    return _Machine(layout).run()


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class _Machine:
    def __init__(self, layout: Layout) -> None:
        self.layout, self.program = layout, layout.program
        arena = layout.placed
        self.offsets = arena.offsets
        self.arena: Tags = _spread(_hash("unwritten"), arena.size_bytes)
        self.own: dict[int, Tags] = {}
        sizes = {b: buffer.size_bytes for b, buffer in self.program.buffers.items() if buffer.role.borrowed}
        for region in _all_regions(self.program):
            if region.buffer in sizes:
                sizes[region.buffer] = max(sizes[region.buffer], region.span_bytes[1])
        for b, size in sizes.items():
            self.own[b] = _spread(_hash("given", int(b)), size)
        self.random = _hash("random state")
        self.saved: dict[Any, int] = {}
        self.held: list[int] = []
        self.blank: set[int] = set()  # buffers that torch.empty gave, and that nothing has written yet
        self.flights: list[tuple[int, int, int, Tags, Tags]] = []

    def run(self) -> dict[str, int]:
        for position, op in enumerate(self.program.ops):
            self._clobber(position)
            self._step(op)
        program = self.program
        found = {f"buffer {b}": _digest(tags) for b, tags in self.own.items()}
        for i, region in enumerate(program.returned):
            found[f"returned {i}"] = self._read(region)
        for i, region in program.grads.items():
            if region.buffer in self.layout.draft.kept:
                found[f"gradient {i}"] = self._read(region)
        if program.found_inf is not None:
            found["found_inf"] = self._read(program.found_inf)
        found["random"] = self.random
        found["held"] = _hash(self.held)
        return found

    # -- memory ----------------------------------------------------------------------------------------------------

    def _look(self, region: Region) -> tuple[Tags, Any]:
        """Where a region's bytes are, and which they are."""
        if region.buffer in self.own:
            return self.own[region.buffer], self._bytes(region, 0)
        if region.buffer not in self.offsets:
            raise Broken(f"%{region.buffer} has no place")
        start = self.offsets[region.buffer]
        begin, end = region.span_bytes
        if start + begin < 0 or start + end > len(self.arena):
            raise Broken(f"%{region.buffer} lies outside of the arena")
        return self.arena, self._bytes(region, start)

    def _bytes(self, region: Region, start: int) -> Any:
        at = _bytes_of(region.dtype.itemsize, region.shape, region.stride)
        start += region.offset * region.dtype.itemsize
        return slice(at.start + start, at.stop + start) if isinstance(at, slice) else at + start

    def _read(self, region: Region) -> int:
        if region.numel == 0 or region.buffer in self.blank:
            return 0
        where, which = self._look(region)
        return _digest(where[which])

    def _write(self, region: Region, seed: int) -> None:
        self.blank.discard(region.buffer)
        if region.numel:
            where, which = self._look(region)
            where[which] = _spread(seed, region.numel * region.dtype.itemsize)

    def _clobber(self, position: int) -> None:
        """What an op takes for itself holds anything from then on; so does what it takes beyond a result's bytes."""
        for k, asked in enumerate(self.layout.placed.requests[position]):
            if asked.offset_bytes < 0:
                continue
            start = asked.offset_bytes
            if asked.result is not None:
                start += self.program.buffers[asked.result].size_bytes
            end = asked.offset_bytes + asked.size_bytes
            if end > len(self.arena):
                raise Broken("scratch outside of the arena")
            if start < end:
                self.arena[start:end] = _spread(_hash("scratch", position, k), end - start)

    # -- ops -------------------------------------------------------------------------------------------------------

    def _step(self, op: Op) -> None:
        if isinstance(op.target, Special):
            self._special(op)
        elif isinstance(op.target, Cluster):
            self._cluster(op, op.target)
        elif (op.name + ".").startswith(_EMPTY):
            self.blank.update(r.buffer for r in op.outputs)
        else:
            self._kernel(op)

    def _cluster(self, op: Op, cluster: Cluster) -> None:
        sizes = {b: buffer.size_bytes for b, buffer in cluster.buffers.items()}
        inside = [r for each in cluster.ops for r in (*each.inputs, *each.outputs)]
        for region in (*cluster.inputs, *cluster.results, *inside):
            sizes[region.buffer] = max(sizes[region.buffer], region.span_bytes[1])
        local = {b: _spread(_hash("inside", int(b)), size) for b, size in sizes.items()}
        if len(op.args) != len(cluster.inputs) or len(op.outputs) != len(cluster.results):
            raise Broken("a cluster with operands of another")
        for inner, outer in zip(cluster.inputs, op.args, strict=True):
            assert isinstance(outer, Region)
            self._pass_on(outer, inner, local)
        own, offsets, blank = self.own, self.offsets, self.blank
        self.own, self.offsets, self.blank = local, {}, set()
        try:
            for each in cluster.ops:
                self._step(each)
        finally:
            self.own, self.offsets, self.blank = own, offsets, blank
        written = [(cluster.inputs[i], op.args[i]) for i in cluster.writes]
        for inner, outer in (*zip(cluster.results, op.outputs, strict=True), *written):
            assert isinstance(outer, Region)
            if outer.numel:
                self.blank.discard(outer.buffer)
                where, which = self._look(outer)
                where[which] = local[inner.buffer][self._bytes(inner, 0)]

    def _pass_on(self, outer: Region, inner: Region, local: dict[int, Tags]) -> None:
        if (outer.dtype, outer.shape) != (inner.dtype, inner.shape):
            raise Broken("an operand of another geometry")
        if outer.numel:
            where, which = self._look(outer)
            local[inner.buffer][self._bytes(inner, 0)] = where[which]

    def _kernel(self, op: Op) -> None:
        # What out= names is written, and not read.
        outs = {a.name for a in op.target._schema.arguments if a.is_out}
        named = sorted((n, v) for n, v in op.kwargs.items() if n not in outs)
        operands = [self._static(a) for a in op.args] + [(n, self._static(v)) for n, v in named]
        made = _hash(str(op.target), operands)
        if _is_random(op):
            made = _hash(made, self.random)
            self.random = _hash("next", made)
        if op.expected is not None:
            self.held.append(made)
        written = list(op.outputs)
        written += [r for r in op.inputs if r.buffer in op.mutates and r not in written and self._writes(op, r)]
        if op.name in _READ_FOR:
            seeds = {r: self._gradient(op, i) for i, r in enumerate(op.results) if isinstance(r, Region)}
            for region in written:
                self._write(region, seeds[region])
            return
        for number, region in enumerate(written):
            self._write(region, _hash(made, number))

    def _gradient(self, op: Op, number: int) -> int:
        """A result of a backward, of which each needs some of the operands only, whatever else is asked for."""
        read = _READ_FOR[op.name][number]
        operands = [
            (str(a.dtype), a.shape) if isinstance(a, Region) and i not in read else self._static(a)
            for i, a in enumerate(op.args[:-1])
        ]
        return _hash(str(op.target), operands, number)

    def _writes(self, op: Op, region: Region) -> bool:
        """Whether an operand is one that the op writes: its schema says so, or says nothing of that buffer."""
        named = [a.name for a in op.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        given = dict(zip([a.name for a in op.target._schema.arguments], op.args, strict=False)) | dict(op.kwargs)
        declared = [r for name in named if name in given for r in _regions(given[name])]
        return region in declared or all(r.buffer != region.buffer for r in declared)

    def _static(self, argument: Any) -> object:
        if isinstance(argument, Region):
            return ("tensor", str(argument.dtype), argument.shape, self._read(argument))
        if isinstance(argument, tuple | list):
            return tuple(self._static(a) for a in argument)
        if isinstance(argument, HyperScalar):
            return ("scalar", argument.index)
        if isinstance(argument, Number | torch.Generator):
            return (type(argument).__name__,)
        return (type(argument).__name__, str(argument))

    def _special(self, op: Op) -> None:
        if op.target is Special.SAVE_RANDOM:
            self.saved[op.args[0]] = self.random
        elif op.target is Special.RESTORE_RANDOM:
            self.random = self.saved.get(op.args[0], 0)
        elif op.target is Special.REDUCE:
            self._send(op)
        else:
            self._arrive()

    def _send(self, op: Op) -> None:
        """A bucket leaves: from its first slice to its last, these bytes are the group's, to write at any time."""
        number, _, members = op.args
        held = list(_regions(members))
        start = self.offsets[held[0].buffer]
        end = self.offsets[held[-1].buffer] + held[-1].numel * held[-1].dtype.itemsize
        if not 0 <= start < end <= len(self.arena):
            raise Broken("a bucket outside of the arena")
        # Of the padding between slices nobody wants to know.
        sent = np.zeros(end - start, dtype=np.uint64)
        for region in held:
            at = self.offsets[region.buffer] - start
            size = region.numel * region.dtype.itemsize
            if not 0 <= at <= at + size <= len(sent):
                raise Broken("a slice outside of its bucket")
            sent[at : at + size] = self.arena[start + at : start + at + size]
        flying = _spread(_hash("on its way", number), end - start)
        self.arena[start:end] = flying
        self.flights.append((int(number), start, end, sent, flying))

    def _arrive(self) -> None:
        """All buckets are there. What was written over one on its way is lost, and ruins it."""
        for number, start, end, sent, flying in self.flights:
            average = (sent ^ _spread(_hash("average", number), end - start)) * _WEIGHTS[0]
            average[sent == 0] = 0
            ruined = self.arena[start:end] != flying
            average[ruined] += np.uint64(1)
            self.arena[start:end] = average
        self.flights = []


@functools.lru_cache(maxsize=4096)
def _bytes_of(item: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """The bytes of a region that begins at 0, in the order of its elements."""
    at = np.zeros(1, dtype=np.int64)
    for extent, step in zip(shape, stride, strict=True):
        at = (at[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
    places = (at[:, None] * item + np.arange(item)).reshape(-1)
    in_a_row = len(places) and (np.diff(places) == 1).all()
    return slice(int(places[0]), int(places[-1]) + 1) if in_a_row else places


def _is_random(op: Op) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.target.tags:
        return False
    if "scaled_dot_product" in op.name:
        names = [a.name for a in op.target._schema.arguments]
        place = names.index("dropout_p")
        return (op.args[place] if len(op.args) > place else op.kwargs.get("dropout_p", 0.0)) != 0.0
    return True


def _regions(tree: Any) -> Iterator[Region]:
    if isinstance(tree, Region):
        yield tree
    elif isinstance(tree, tuple | list):
        for leaf in tree:
            yield from _regions(leaf)


def _all_regions(program: Program) -> Iterator[Region]:
    for op in program.ops:
        yield from op.inputs
        yield from op.outputs
    yield from (region for _, region in program.named_regions())


def _spread(seed: int, count: int) -> Tags:
    """As many different tags as there are bytes."""
    return (_weights(count) ^ np.uint64(seed)) * _WEIGHTS[1]


def _digest(tags: Tags) -> int:
    return int((tags * _weights(len(tags))).sum(dtype=np.uint64))


def _weights(count: int) -> Tags:
    assert count <= len(_WEIGHTS), "a buffer is larger than the oracle was made for"
    return _WEIGHTS[:count]
