"""Runs a layout where the device's own allocator places (CUDA): a value's bytes are taken when its op runs and given
back when its last owner dies, so that the bytes alive follow the plan; what is reserved is the allocator's own matter.

Work is enqueued on the current stream, in the order of the program. The update allocates too: where it runs out of
memory before it has written anything (a norm for clipping), the step is taken back; later it is half done, as in
eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from takeback.compiler.layout import Layout, lay_out
from takeback.compiler.program import BufferId, Op, Region, Scratch
from takeback.compiler.run.allocator_code import AllocatorCode, Compute, UpdateCode, generate_for_allocator
from takeback.compiler.run.codegen import HeldValueChanged, look, over, same_value
from takeback.compiler.run.cuda_graph import CAPTURED, GraphedCompute, GraphedStep, GraphSettings, why_not_captured
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.kernels import Kernels
from takeback.compiler.run.meter import Meter, NoMeter, meter_for
from takeback.compiler.run.proof import GRADIENT, Proof
from takeback.parallel import Reducer

_LEAST_SHARE = 0.002  #: of the peak: scratch that differs by less from what was recorded needs no new layout


@dataclass(frozen=True)
class _Bound:
    """Code over the user's tensors as they are now."""

    code: AllocatorCode
    watched: bool
    compute: Compute
    update: UpdateCode
    graphed: GraphedCompute | None  #: the same as `compute`, where it may become a graph


class AllocatorExecutor(Executor):
    """A layout whose values are allocated as they are made."""

    def __init__(
        self,
        layout: Layout,
        *,
        poison: bool = False,
        reducer: Reducer | None = None,
        kernels: Kernels | None = None,
        graphs: GraphSettings | None = None,
    ) -> None:
        super().__init__(layout, reducer, kernels)
        self._poison = poison
        self._graphs = graphs if graphs is not None and graphs.ask != "never" else None
        self._meter: Meter | NoMeter = meter_for(self.program.device)
        self._landed: dict[int, None] = {}
        self._bound: _Bound | None = None
        self._held: list[torch.Tensor] = []
        self._places: dict[BufferId, int] = {}
        self._given: set[BufferId] = set()
        self._seen: dict[int, int] = {}  # most bytes inside an op above its results, by position
        self._requests = 0

    def tensor(self, region: Region, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        role = self.program.buffers[region.buffer].role
        if role.handed:
            leaf = leaves[self.program.leaves[region.buffer]]
            return look(leaf, region.dtype, region.shape, region.stride, region.offset)
        owner = self.program.externals.get(region.buffer)
        if owner is None:
            owner = self._held[self._places[self.layout.owners[region.buffer]]]
        return over(owner, region.dtype, region.shape, region.stride, region.offset)

    def still_has(self, region: Region) -> bool:
        return region.buffer not in self.layout.owners or self.layout.owners[region.buffer] in self._places

    def give(self, region: Region, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Bytes of the step's own are handed on, unless they are a part of a buffer or were handed on before."""
        tensor = self.tensor(region, leaves)
        owner = self.layout.owners.get(region.buffer)
        whole = region.packed and region.span_bytes == (0, self.program.buffers[region.buffer].size_bytes)
        if owner is None or owner in self._given or not whole:
            return tensor.clone()
        self._given.add(owner)
        return tensor

    def release_(self) -> None:
        self._held, self._places, self._given = [], {}, set()

    def rehearsed(self) -> Layout | None:
        """Corrects the layout by what the kernels really took inside: the code does not depend on it, so it stays."""
        changed = {
            p: taken
            for p, taken in self._seen.items()
            if abs(taken - _recorded(self.program.ops[p])) > self.layout.alive_bytes * _LEAST_SHARE
        }
        if changed:
            ops = list(self.program.ops)
            for position, taken in changed.items():
                ops[position] = replace(ops[position], scratch=(Scratch(taken, 0, 1),) if taken else ())
            self.layout = lay_out(replace(self.layout.draft, program=replace(self.program, ops=tuple(ops))))
            self.program = self.layout.draft.program
        self._seen = {}
        self.settle_()
        return None

    def settle_(self) -> None:
        self._meter.trim(self.layout.alive_bytes)

    def make_room_(self) -> None:
        self._meter.give_back()

    def count_aside(self) -> Callable[[], int]:
        self._meter.begin()
        return self._meter.end

    # -- the step --------------------------------------------------------------------------------------------------

    def _prepare_(self, *, log: bool) -> None:
        self.release_()
        if self._bound is not None and self._bound.watched == log:
            return
        code = generate_for_allocator(self.layout, poison=self._poison, watched=log, landed=tuple(self._landed))
        compute, update = code.bind(
            self.program.externals,
            {
                **self._clusters(code.constants),
                "as_strided": torch.as_strided,
                "empty_strided": torch.empty_strided,
                "over": over,
                "raw": _raw,
                "fit": self._fit,
                "begin": self._meter.begin,
                "seen": self._note,
                "commits": self.commits_,
                "poison": _poison,
                "grad_mode": torch._C._set_grad_enabled,  # checked on 2.11 and 2.13
                "look": look,
                "same_value": same_value,
                "changed": HeldValueChanged,
                "reduce": None if self._reducer is None else self._reducer.ready,
            },
        )

        graphed = self._graph_of(code, compute) if not log else None
        self._bound = _Bound(code, log, graphed or compute, update, graphed)  # all at once: Ctrl-C may come at any time

    def _graph_of(self, code: AllocatorCode, compute: Compute) -> GraphedCompute | None:
        if self._graphs is None or self.program.device_type != "cuda":
            return None
        computed = self.program.ops[: self._first_update]
        if self._reducer is not None:
            refused: str | None = "gradients are sent to the other ranks while it runs"
        elif self._poison or self._written_leaves:
            refused = "poison=True" if self._poison else "it writes a batch tensor"
        else:
            refused = why_not_captured(self.program, computed)
        leaves = self.program.leaves
        step = GraphedStep(
            self._drawn_from,
            frozenset(leaves[r.buffer] for op in computed for r in op.inputs if r.buffer in leaves),
            lambda held: self._named(code, held),
            self._put_back_,
            self._uninterrupted,
        )
        measure = Proof(self._graphs.measure).of(self.program).measure
        return GraphedCompute(
            compute, self._graphs, self.kernels, step, program=self.program, measure=measure, refused=refused
        )

    def _named(self, code: AllocatorCode, held: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What there is between compute and update: gradients, the loss and all else; and what was written so far."""
        places = {owner: i for i, owner in enumerate(code.crossing)}
        regions = {f"{GRADIENT}parameter {i}": region for i, region in self.program.grads.items()}
        found = {
            name: over(held[places[owner]], r.dtype, r.shape, r.stride, r.offset)
            for name, r in regions.items()
            if (owner := self.layout.owners.get(r.buffer)) in places
        }
        known = {self.layout.owners.get(r.buffer) for r in regions.values()}
        found |= {f"value %{owner}": held[i] for owner, i in places.items() if owner not in known}
        return found | {f"tensor {i} that it writes": t for i, t in enumerate(t for some in self._live for t in some)}

    def uncapture_(self) -> None:
        if self._bound is not None and self._bound.graphed is not None:
            self._bound.graphed.rest_()

    @property
    def graph(self) -> str:
        if self._bound is None or self._bound.graphed is None:
            return ""
        return self._bound.graphed.note or CAPTURED

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """What is allocated in here is nothing that the step asks for."""
        yield
        if self._bound is not None and self._bound.watched:
            self._meter.begin()

    def _compute_(self, batch: list[torch.Tensor]) -> None:
        assert self._bound is not None
        before = self._meter.requests() if self._bound.watched else 0
        self._held = self._bound.compute(batch)
        if self._bound.graphed is not None and self._bound.graphed.captured:
            self._given = set(self._bound.code.crossing)  # the graph's own bytes: whoever wants them gets a copy
        if self._bound.watched:
            self._requests = self._meter.requests() - before
        self.counters.passed = self._requests
        self._places = {owner: i for i, owner in enumerate(self._bound.code.crossing)}

    def _update_(self, batch: list[torch.Tensor], scalars: Sequence[float]) -> None:
        assert self._bound is not None
        held, self._places = self._held, {}
        before = self._meter.requests() if self._bound.watched else 0
        self._held = self._bound.update(
            batch, scalars, held
        )  # which empties `held`, so that gradients go as they are used
        if self._bound.watched:
            self._requests += self._meter.requests() - before
        self.counters.passed = self._requests
        self._places = {owner: i for i, owner in enumerate(self._bound.code.surviving)}

    def _note(self, position: int) -> None:
        self._seen[position] = self._meter.end()

    def _fit(
        self,
        result: torch.Tensor,
        position: int,
        size_bytes: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
    ) -> torch.Tensor:
        """The result if it lies in its storage as it did when it was recorded, else a copy that does."""
        same = result.shape == shape and result.stride() == stride and result.storage_offset() == offset
        if same and result.untyped_storage().nbytes() >= size_bytes:
            return result
        self._landed[position] = None
        home = _raw(size_bytes, result.device, dtype, shape, stride, offset)
        home.copy_(result)
        self.counters.landed += 1
        self.counters.landed_bytes += result.numel() * result.element_size()
        return home


def _recorded(op: Op) -> int:
    return sum(s.size_bytes for s in op.scratch if s.result is None and s.end is not None)


def _raw(
    size_bytes: int,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    """A region of a buffer of its own."""
    return over(torch.empty(size_bytes, dtype=torch.uint8, device=device), dtype, shape, stride, offset)


def _poison(tensor: torch.Tensor) -> None:
    """Fills everything in a tensor's storage: NaN in every floating-point type."""
    over(tensor, torch.uint8, (tensor.untyped_storage().nbytes(),), (1,), 0).fill_(255)
