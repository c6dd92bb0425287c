"""Who can read which bytes at this moment of a backward: nodes that saved them, gradients on their way, `.grad`s, and
what Python holds.

Filled before the engine runs, and kept up to date as nodes run. Tensors and storages are held weakly.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from takeback.grads.slots import slot_of
from takeback.guard import engine
from takeback.guard.graph import Graph, Known, NodeKind
from takeback.guard.holders import live
from takeback.guard.region import Key, StorageRegion, Unwatchable, region_of

_CASTS = 4
"""Through how many of torch's own nodes (a cast, a transpose) a node is looked for the leaf it computes for."""


@dataclass(frozen=True)
class EngineCall:
    """What the engine was asked to do. Of the tensors it was called with, only the nodes: who holds a tensor makes it
    look held."""

    roots: tuple[GradientEdge, ...]
    keeps: bool  #: the graph stays for a second backward
    creates: bool  #: the gradients get a graph of their own
    inputs: tuple[GradientEdge, ...]
    accumulates: bool  #: into `.grad`; else gradients are returned
    alone: bool  #: no other thread trains


class Around(NamedTuple):
    """A call into the engine in which another one is made, and the node that makes it: a reentrant checkpoint."""

    readers: Readers
    node: Known


class Readers:
    """The readers of one call into the engine. `around`: the calls that it is made in."""

    def __init__(self, call: EngineCall, skipped: Counter[str], around: Sequence[Around] = ()) -> None:
        self.call = call
        self.around = around
        self.inputs: list[tuple[StorageRegion, weakref.ref[Any]]] = []  #: what checkpoints compute again from
        self._skipped = skipped
        self.graph = Graph(skipped)
        self._later: set[Known] = set()  #: nodes whose saved tensors a later backward may read
        self.saved: dict[Key, tuple[StorageRegion, list[tuple[Known, str]]]] = {}
        self.pending: dict[tuple[Known, int], StorageRegion | None] = {}
        self.grads: dict[int, tuple[StorageRegion, weakref.ref[torch.Tensor]]] = {}
        self.held: dict[Key, StorageRegion] = {}
        self.buffers: list[weakref.ref[torch.Tensor]] = []
        self.roots = [edge.node for edge in call.roots]
        self.run = self.graph.add(self.roots)
        if call.inputs:
            self.graph.mark_executed_({edge.node for edge in call.inputs})
        self.run = [known for known in self.run if known.executes]
        self.captured = set() if call.accumulates else {(edge.node, edge.output_nr) for edge in call.inputs}

    def region(self, tensor: torch.Tensor, what: str) -> StorageRegion | None:
        """The tensor's bytes; what cannot be watched is counted."""
        try:
            return region_of(tensor)
        except Unwatchable as why:
            self._skipped[f"{why}, {what}"] += 1
            return None

    def fill(self) -> None:
        """Looks at everything that is alive."""
        others: set[Node] = set()
        alive: list[tuple[int, bool, StorageRegion]] = []
        buffers: dict[int, torch.Tensor] = {}
        leaves = {id(known.leaf) for known in self.run}
        for thing in live(torch.Tensor, torch.nn.Module, *engine.CHECKPOINTS):
            if isinstance(thing, engine.CHECKPOINTS):
                given = (self.region(t, "given to a checkpoint") for t in engine.inputs_of(thing))
                self.inputs += [(region, weakref.ref(thing)) for region in given if region is not None]
                continue
            if isinstance(thing, torch.nn.Module):
                buffers |= {id(b): b for b in thing.buffers(recurse=False)}
                continue
            tensor = thing
            region = self.region(tensor, "held in Python")
            if region is None:
                continue
            alive.append((id(tensor), tensor.requires_grad, region))
            if tensor.requires_grad and tensor.grad_fn is not None:
                if self.call.alone:
                    others.add(tensor.grad_fn)
            elif tensor.is_leaf and (self.call.alone or id(tensor) in leaves):
                self.see_grad(tensor)
        if not self.call.alone:  # the engine sets a `.grad` and frees what a node saved without the GIL: to read either
            # meanwhile may crash
            self._skipped["the .grads and graphs of other backwards, while another thread trains"] += 1
        own = list(self.graph.known.values())
        for known in self.graph.add(others):
            known.executes = False
        self._later = set(self.graph.still_readable(others))
        if self.call.keeps:
            self._later |= set(own)
        for known in self.graph.known.values():
            for name, region in known.saved:
                self.saved.setdefault(region.key, (region, []))[1].append((known, name))
        self.buffers = [weakref.ref(buffer) for buffer in buffers.values()]
        # A tensor that autograd has nothing to do with may be scratch, which a node is free to use.
        storages = {key[0] for key in self.saved} | {region.storage.key for region, _ in self.grads.values()}
        for identity, requires_grad, region in alive:
            if requires_grad or region.storage.key in storages or identity in buffers:
                self.held[region.key] = region

    def see_grad(self, leaf: torch.Tensor) -> None:
        """The leaf's `.grad` may have changed."""
        self.grads.pop(id(leaf), None)
        grad = leaf.grad
        if grad is None:
            return
        if dist.is_available() and dist.is_initialized():
            self._skipped["a .grad that a process group may be averaging"] += 1
            return
        region = self.region(grad, "a .grad")
        if region is not None:
            self.grads[id(leaf)] = (region, weakref.ref(leaf))

    def ran(self, known: Known, results: Iterable[Any]) -> None:
        """A node's gradients are consumed, and what it computed waits at the nodes below."""
        known.ran = True
        for key in [key for key in self.pending if key[0] is known]:
            del self.pending[key]
        for (below, nr), result in zip(known.next, results, strict=False):
            if below is None or not isinstance(result, torch.Tensor):
                continue
            if (below, nr) in self.pending:
                self.pending[below, nr] = None  # now a sum, in a place that only the engine knows
            elif engine.takes_as_it_is(below.node, nr, result):
                self.pending[below, nr] = self.region(result, "a gradient")

    # -- questions -----------------------------------------------------------------------------------------------------

    def reads(self, reader: Known, writer: Known) -> bool:
        """Whether a node may read what it saved after `writer` has run."""
        for readers, running in self.around:
            there = readers.graph.known.get(reader.node)
            if there is not None:  # it will run, or has run, in that call
                return readers.reads(there, running)
        return reader in self._later or (reader is not writer and reader.executes and not reader.ran)

    def waiting_for(self, region: StorageRegion) -> Iterator[str]:
        """The checkpoints that compute again from these bytes: each once in a backward, and again in the next."""
        for given, reference in self.inputs:
            if given.key == region.key and self._computes_again(reference()):
                yield "torch.utils.checkpoint, which keeps it to compute its block again"

    def _computes_again(self, checkpoint: Any) -> bool:
        return checkpoint is not None and (self.call.keeps or not engine.has_computed_again(checkpoint))

    def readable(self, writer: Known) -> Iterator[StorageRegion]:
        """What nodes and `.grad`s other than the writer's own may read."""
        yield from self._on_its_way(writer)
        for readers, running in self.around:
            yield from readers._on_its_way(running)
        for region, reference in self.inputs:
            if self._computes_again(reference()):
                yield region
        own = writer.leaf
        for region, leaf in self.grads.values():
            if leaf() is not None and leaf() is not own:
                yield region

    def _on_its_way(self, writer: Known) -> Iterator[StorageRegion]:
        for region, readers in self.saved.values():
            if any(self.reads(reader, writer) for reader, _ in readers):
                yield region
        for (reader, _), waiting in self.pending.items():
            if waiting is not None and reader is not writer:
                yield waiting

    def destinations(self, known: Known) -> Iterator[StorageRegion]:
        """Where a node may write its results: the gradients of the leaves it computes for, and what hangs on these
        leaves (a slice of a GradBuffer, Megatron's `main_grad`)."""
        level = [known]
        for _ in range(_CASTS):
            level = [below for one in level for below, _ in one.next if below is not None]
            for leaf in (one.leaf for one in level):
                if leaf is None:
                    continue
                slot = slot_of(leaf)
                for place in (leaf.grad, slot.view if slot is not None else None, *vars(leaf).values()):
                    region = self.region(place, "a .grad") if isinstance(place, torch.Tensor) else None
                    if region is not None:
                        yield region
            level = [one for one in level if one.kind is NodeKind.TORCH]

    def grads_share_bytes(self) -> bool:
        """Whether two leaves of this backward have a `.grad` on the same bytes."""
        leaves = [known.leaf for known in self.run]
        found = [self.region(leaf.grad, "a .grad") for leaf in leaves if leaf is not None and leaf.grad is not None]
        regions = sorted((r for r in found if r is not None), key=lambda r: (r.storage.key, r.start_bytes))
        return any(a.overlaps(b) for a, b in itertools.pairwise(regions))


def edge_of(one: Any) -> GradientEdge:
    """Of a tensor, or the edge that was given."""
    return one if isinstance(one, GradientEdge) else get_gradient_edge(one)
