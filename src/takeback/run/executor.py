"""Runs a layout: binds it to the arena, replays it under the native allocator, and takes back what an abort left.

Contract: until `update` begins nothing of the user's has changed for good: what the forward and backward write into the
user's tensors (running statistics, counters) is saved first and put back if the step does not get that far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from takeback.capture.program import BufferId, Phase, Program, Region, Role, Scratch, Special
from takeback.capture.randomness import generator_key
from takeback.run.allocator import ALLOC, Cell, Native, Script
from takeback.run.arena import SharedArena
from takeback.run.codegen import Code, Compute, HeldValueChanged, Update, generate, look, place, same_value
from takeback.run.commit import Gate
from takeback.run.layout import Layout, asks_for_results, lay_out


@dataclass
class Counters:
    """What the last replay cost beyond its kernels."""

    served: int = 0  #: requests answered from the arena
    passed: int = 0  #: requests that were known to go to the ordinary allocator
    misses: int = 0  #: requests nobody expected: served by the ordinary allocator
    missed_bytes: int = 0
    landed: int = 0  #: results copied into their place because their op put them elsewhere
    landed_bytes: int = 0
    worker_new: int = 0  #: blocks the worker threads' free lists had to take anew


class Executor:
    """A layout, ready to run on one thread at a time."""

    def __init__(self, layout: Layout, arena: SharedArena, native: Native | None, *, poison: bool = False) -> None:
        self.layout = layout
        self.program: Program = layout.draft.program
        self.code: Code = generate(layout, poison=poison)
        self.counters = Counters()
        self._arena = arena
        self._native = native
        self._cell = Cell()
        self._generation = -1
        self._script: Script | None = None
        self._compute: Compute | None = None
        self._update: Update | None = None
        arena.reserve_(layout.arena_bytes)
        borrowed = written_before_update(self.program)
        self._written_leaves = [self.program.leaves[b] for b in borrowed if b in self.program.leaves]
        self._live = [_whole(self.program.externals[b]) for b in borrowed if b in self.program.externals]
        self._saved = [torch.empty_like(t) for t in self._live]
        holds = any(op.holds is not None for op in self.program.ops)
        self._rewound = generators_of(self.program) if holds else ()

    @property
    def written_leaves(self) -> Sequence[int]:
        """Positions of the batch tensors that the user's own code writes."""
        return self._written_leaves

    def tensor(self, region: Region, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of a region as they are now."""
        if self.program.buffers[region.buffer].role is Role.BATCH:
            leaf = leaves[self.program.leaves[region.buffer]]
            return look(leaf, region.dtype, region.shape, region.stride, region.offset)
        return place(
            region,
            self.layout,
            self._arena.tensor,
            self._arena.tensor.storage_offset(),
            self.program.externals,
        )

    def _bind_(self) -> None:
        self._arena.reserve_(self.layout.arena_bytes)
        if self._generation == self._arena.generation:
            return
        extra: dict[str, object] = {
            "cell": self._cell.view,
            "grad_mode": torch._C._set_grad_enabled,  # checked on 2.11 and 2.13
            "land": self._land,
            "look": look,
            "same_value": same_value,
            "changed": HeldValueChanged,
            "whole": self._arena.tensor[: self.layout.arena_bytes],
        }
        self._compute, self._update, _ = self.code.bind(self._arena.tensor, self.layout, self.program.externals, extra)
        if self._native is not None and self._arena.mapped is not None:
            first, sizes, offsets = [0], [], []
            for entries in self.layout.entries:
                for e in entries:
                    if e.size_bytes:
                        sizes.append(e.size_bytes)
                        offsets.append(e.offset_bytes)
                first.append(len(sizes))
            self._script = self._native.script(first, sizes, offsets, self._arena.mapped, self._cell)
        self._generation = self._arena.generation

    def _land(self, result: torch.Tensor, home: torch.Tensor) -> None:
        home.copy_(result)
        self.counters.landed += 1
        self.counters.landed_bytes += result.numel() * result.element_size()

    def run(
        self,
        leaves: Sequence[torch.Tensor],
        scalars: Sequence[float],
        finish: Callable[[], None] | None = None,
        *,
        inspect: Callable[[], None] | None = None,
        log: bool = False,
    ) -> None:
        """Forward, backward and update. `finish` is called inside the commit, after the planned update: an optimizer's
        own step(). `inspect` is called before it: what it raises takes the step back. Raises `HeldValueChanged`, with
        everything as before, if a held value is another one."""
        self._bind_()
        assert self._compute is not None
        assert self._update is not None
        self.counters = Counters()
        self._cell.view[0] = -1
        batch = [t.detach() for t in leaves]
        script, mode = self._script, torch.is_grad_enabled()
        states = [(g, g.get_state()) for g in self._rewound]
        autocast = torch.is_autocast_enabled("cpu")
        if autocast:  # the program holds the casts that autocast made; made again, they would be too many
            torch.set_autocast_enabled("cpu", False)
        undo = [(batch[i], batch[i].clone()) for i in self._written_leaves]
        if self._live:
            torch._foreach_copy_(self._saved, self._live)
        try:
            with Gate() as gate:
                try:
                    if script is not None:
                        script.enter(log=log)
                    gate.open = True
                    self._compute(batch)
                    if inspect is not None:
                        inspect()
                    gate.open = False
                    # From here on the step is being committed, and Ctrl-C waits.
                    self._update(batch, scalars)
                    if finish is not None:
                        if script is not None:
                            script.leave()
                        torch._C._set_grad_enabled(mode)
                        finish()
                except BaseException as error:
                    gate.open = False
                    torch._C._set_grad_enabled(False)
                    if self._live:
                        torch._foreach_copy_(self._live, self._saved)
                    for live, before in undo:
                        live.copy_(before)
                    if isinstance(error, HeldValueChanged):
                        for generator, state in states:
                            generator.set_state(state)
                    raise
        finally:
            if script is not None:
                script.leave()
                native = script.counters
                self.counters.served, self.counters.passed = native.served, native.passed
                self.counters.misses, self.counters.missed_bytes = native.misses, native.missed_bytes
                self.counters.worker_new = native.worker_new + native.worker_passed
            torch._C._set_grad_enabled(mode)
            if autocast:
                torch.set_autocast_enabled("cpu", True)

    def rehearsed(self) -> Layout | None:
        """After a run with `log=True`: a layout by what the kernels really asked for, if that was not as expected."""
        if self._script is None:
            return None
        observed = observe(self._script.events, self.layout)
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
        return lay_out(replace(self.layout.draft, program=replace(self.program, ops=ops)))


def generators_of(program: Program) -> tuple[torch.Generator, ...]:
    """The generators that the step draws from."""
    found: dict[int, torch.Generator] = {}
    for op in program.ops:
        if not isinstance(op.target, Special) and torch.Tag.nondeterministic_seeded in op.target.tags:
            own = op.kwargs.get("generator")
            own = own if isinstance(own, torch.Generator) else torch.default_generator
            found.setdefault(generator_key(own), own)
    return tuple(found.values())


def written_before_update(program: Program) -> list[BufferId]:
    """What the forward and backward write of the user's, in order: running statistics, counters."""
    written = dict.fromkeys(b for op in program.ops if op.phase is not Phase.UPDATE for b in op.mutates)
    return [b for b in written if program.buffers[b].role.borrowed and program.buffers[b].role is not Role.CONSTANT]


def undo_bytes(program: Program) -> int:
    """What the saved copies of these take, outside of the arena."""
    return sum(program.buffers[b].size_bytes for b in written_before_update(program))


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
    served = [e.result for entries in layout.entries for e in entries if e.size_bytes]
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


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Everything in a tensor's storage: a step may write any part of it, through any view."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,))
