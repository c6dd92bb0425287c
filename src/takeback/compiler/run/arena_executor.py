"""Runs a layout inside one arena: binds it to the arena's bytes, and replays it under the native allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from takeback.compiler.layout import Layout, asks_for_results, lay_out
from takeback.compiler.program import BufferId, Region, Scratch, Special, regions
from takeback.compiler.run.allocator import ALLOC, Cell, Native, Script
from takeback.compiler.run.arena import SharedArena
from takeback.compiler.run.codegen import Code, Compute, HeldValueChanged, Update, generate, look, place, same_value
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.kernels import Kernels
from takeback.parallel import Reducer


class ArenaExecutor(Executor):
    """A layout in the arena, ready to run on one thread at a time."""

    def __init__(
        self,
        layout: Layout,
        arena: SharedArena,
        native: Native | None,
        *,
        poison: bool = False,
        reducer: Reducer | None = None,
        codes: dict[str, CodeType] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(layout, reducer, kernels)
        self.code: Code = generate(layout, poison=poison, codes=codes)
        self._arena = arena
        self._native = native
        self._cell = Cell()
        self._generation = -1
        self._script: Script | None = None
        self._compute: Compute | None = None
        self._update: Update | None = None
        #: Of ops whose results came in another order: whose place was taken by which of them.
        self._lies_at: dict[int, dict[BufferId | None, BufferId]] = {}
        # Bytes are reserved where it runs: without room for them that step is taken back, and this one has been made.

    @property
    def serves_ops(self) -> bool:
        return self._native is not None

    def tensor(self, region: Region, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of a region as they are now."""
        if self.program.buffers[region.buffer].role.handed:
            leaf = leaves[self.program.leaves[region.buffer]]
            return look(leaf, region.dtype, region.shape, region.stride, region.offset)
        return place(
            region,
            self.layout,
            self._arena.tensor,
            self._arena.tensor.storage_offset(),
            self.program.externals,
        )

    def _prepare_(self, *, log: bool) -> None:
        self._arena.reserve_(self.layout.placed.size_bytes)
        if self._generation == self._arena.generation:
            return
        extra: dict[str, object] = {
            **self._clusters(self.code.constants),
            "cell": self._cell.view,
            "grad_mode": torch._C._set_grad_enabled,  # checked on 2.11 and 2.13
            "land": self._land,
            "land_all": self._land_all,
            "look": look,
            "same_value": same_value,
            "changed": HeldValueChanged,
            "reduce": self._reduce(self._arena.tensor) if self._reducer is not None else None,
            "whole": self._arena.tensor[: self.layout.placed.size_bytes],
        }
        self._compute, self._update, _ = self.code.bind(self._arena.tensor, self.layout, self.program.externals, extra)
        if self._native is not None and self._arena.mapped is not None:
            first, sizes, offsets = [0], [], []
            for entries in self.layout.placed.requests:
                for e in entries:
                    if e.size_bytes:
                        sizes.append(e.size_bytes)
                        offsets.append(e.offset_bytes)
                first.append(len(sizes))
            self._script = self._native.script(first, sizes, offsets, self._arena.mapped, self._cell)
        self._generation = self._arena.generation

    def _reduce(self, arena: torch.Tensor) -> Callable[[int], None]:
        """Hands over bucket i: the slices lie side by side in the arena, so each bucket is one tensor."""
        reducer, buckets = self._reducer, []
        assert reducer is not None
        for op in self.program.ops:
            if op.target is Special.REDUCE:
                _, numel, members = op.args
                held = tuple(regions(members))
                first, last = held[0], held[-1]
                start, dtype = arena.storage_offset() + self.layout.placed.offsets[first.buffer], first.dtype
                end = arena.storage_offset() + self.layout.placed.offsets[last.buffer] + last.numel * dtype.itemsize
                assert end - start == numel * dtype.itemsize, "the group expects a bucket of another size"
                flat = torch.empty(0, dtype=dtype, device="cpu")
                buckets.append([flat.set_(arena.untyped_storage(), start // dtype.itemsize, (numel,), (1,))])
        return lambda index: reducer.ready(index, buckets[index])

    def _land(self, result: torch.Tensor, home: torch.Tensor) -> None:
        home.copy_(result)
        self.counters.landed += 1
        self.counters.landed_bytes += result.numel() * result.element_size()

    def _land_all(self, results: Sequence[torch.Tensor], homes: Sequence[torch.Tensor]) -> None:
        """Each result into its place. A cluster may have asked for them in another order than was expected: then one
        lies where another belongs, until a rehearsal has put that right."""
        position, self._cell.view[0] = int(self._cell.view[0]), -1  # what is copied is nothing that the op asks for
        made = [r.buffer for r in regions(self.program.ops[position].results)]
        owner = {home.data_ptr(): b for home, b in zip(homes, made, strict=True)}
        self._lies_at[position] = {owner.get(r.data_ptr()): b for r, b in zip(results, made, strict=True)}
        moved = [
            (result.clone(), home)
            for result, home in zip(results, homes, strict=True)
            if result.data_ptr() != home.data_ptr()
        ]
        for result, home in moved:
            self._land(result, home)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What is allocated in here is nothing that the step asks for."""
        position, self._cell.view[0] = self._cell.view[0], -1
        try:
            yield
        finally:
            self._cell.view[0] = position

    def _enter_(self, *, log: bool) -> None:
        self._cell.view[0] = -1
        if self._script is not None:
            self._script.enter(log=log)

    def _leave_(self) -> None:
        script = self._script
        if script is None:
            return
        script.leave()
        native = script.counters
        self.counters.served, self.counters.passed = native.served, native.passed
        self.counters.misses, self.counters.missed_bytes = native.misses, native.missed_bytes
        self.counters.worker_new = native.worker_new + native.worker_passed

    def _compute_(self, batch: list[torch.Tensor]) -> None:
        assert self._compute is not None
        self._compute(batch)

    def _update_(self, batch: list[torch.Tensor], scalars: Sequence[float]) -> None:
        assert self._update is not None
        self.commits_()
        self._update(batch, scalars)

    def rehearsed(self) -> Layout | None:
        """After a run with `log=True`: a layout by what the kernels really asked for, if that was not as expected."""
        if self._script is None:
            return None
        observed = observe(self._script.events, self.layout)
        for position, owners in self._lies_at.items():
            if set(owners) == set(owners.values()):  # each lies where another one belongs
                observed[position] = tuple(replace(s, result=owners.get(s.result)) for s in observed[position])
        changed = {
            position: seen
            for position, seen in observed.items()
            if [_outline(s) for s in seen] != [_outline(s) for s in expected(self.layout, position)]
        }
        if not changed:
            return None
        ops = tuple(
            replace(op, scratch=changed[position]) if position in changed else op
            for position, op in enumerate(self.program.ops)
        )
        draft = replace(self.layout.draft, program=replace(self.program, ops=ops))
        return lay_out(draft, near=self.layout, like=self.layout.placed.placing)


def _outline(scratch: Scratch) -> tuple[int, BufferId | None, bool]:
    return (scratch.size_bytes, scratch.result, scratch.end is None)


def expected(layout: Layout, position: int) -> tuple[Scratch, ...]:
    """What the script has for an op: its scratch, less the results that it does not ask for."""
    asks = asks_for_results(layout.kinds[position])
    scratch = layout.draft.program.ops[position].scratch
    return tuple(s for s in scratch if s.size_bytes and (asks or s.result is None))


def observe(events: Any, layout: Layout) -> dict[int, tuple[Scratch, ...]]:
    """What every op asked of the allocator in a logged replay, results told from scratch."""
    program = layout.draft.program
    per_op: dict[int, dict[int, Scratch]] = {position: {} for position in range(len(program.ops))}
    clock = [0] * len(program.ops)
    served = [e.result for entries in layout.placed.requests for e in entries if e.size_bytes]
    for event in events:
        op, block, entry = int(event["op"]), int(event["id"]), int(event["entry"])
        if op < 0:
            continue
        mine = per_op[op]
        if event["kind"] == ALLOC:
            mine[block] = Scratch(int(event["size_bytes"]), clock[op], None, served[entry] if entry >= 0 else None)
        elif block in mine:
            mine[block] = replace(mine[block], end=clock[op], result=None)  # released inside: no result after all
        clock[op] += 1
    return {op: tuple(_claim(op, list(mine.values()), layout)) for op, mine in per_op.items()}


def _claim(position: int, seen: list[Scratch], layout: Layout) -> list[Scratch]:
    """A result that was not served as planned is a block of its size that outlived the op."""
    found = {s.result for s in seen}
    for s in expected(layout, position):
        if s.result is not None and s.result not in found:
            for k, other in enumerate(seen):
                if other.result is None and other.end is None and other.size_bytes == s.size_bytes:
                    seen[k] = replace(other, result=s.result)
                    break
    return seen
