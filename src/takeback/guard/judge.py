"""Changed bytes in, the error out if somebody other than the node that changed them can read them.

Nodes, gradients on their way and `.grad`s are known to the readers. Python is searched only where none of these reads
the bytes, since the search walks the heap.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from takeback.errors import OverwriteError
from takeback.guard import engine
from takeback.guard.aliases import aliases
from takeback.guard.graph import Graph, Known, NodeKind, containers_in
from takeback.guard.holders import CHECKPOINT, holders_of, live
from takeback.guard.message import Overwrite, Reader, error_of
from takeback.guard.readers import Readers
from takeback.guard.region import Key, StorageRegion
from takeback.guard.sites import NodeSite, NodeSites


@dataclass(frozen=True)
class Own:
    """What a node was handed, as it was before it ran."""

    tensors: dict[Key, tuple[str, StorageRegion]]  #: its incoming gradients, and what it saved
    returned: frozenset[Key]  #: of these, what torch.autograd.grad gives to its caller
    versions: dict[int, int | None]  #: of the buffers of modules, by id
    number: int  #: of the next autograd node


class Judge:
    """Answers for one call into the engine."""

    def __init__(self, readers: Readers, sites: NodeSites, thread: int) -> None:
        self._readers, self._sites, self._thread = readers, sites, thread

    def own(self, known: Known, gradients: Iterable[torch.Tensor]) -> Own:
        tensors = {region.key: (f"its {name}", region) for name, region in known.saved}
        returned = set()
        for i, gradient in enumerate(gradients):
            region = self._readers.region(gradient, "a gradient")
            if region is not None:
                tensors[region.key] = (f"its incoming gradient {i}", region)
                if (known.node, i) in self._readers.captured:
                    returned.add(region.key)
        buffers = [buffer for reference in self._readers.buffers if (buffer := reference()) is not None]
        versions = {id(buffer): engine.version_of(buffer) for buffer in buffers}
        return Own(tensors, frozenset(returned), versions, engine.sequence_number())

    def error(
        self, known: Known, own: Own, changed: list[StorageRegion], watched: list[StorageRegion], results: list[Any]
    ) -> OverwriteError | None:
        found = [(region, list(self._readers_of(known, own, region, results))) for region in changed]
        if not any(readers for _, readers in found) and known.kind is not NodeKind.LEAF:
            keys, ignored = {region.key for region in watched}, {id(results)}
            found = self._held(own, changed, keys, ignored)
            if any(readers for _, readers in found):
                gc.collect()  # what only garbage holds is not held
                found = self._held(own, changed, keys, ignored)
        certain = [self._overwrite(known, own, region, readers) for region, readers in found if readers]
        return error_of(certain) if certain else None

    def out_of_reach(
        self, own: Own, changed: list[StorageRegion], watched: list[StorageRegion], results: list[Any]
    ) -> list[StorageRegion]:
        """Of the changed bytes, those of the node's own that no code of the user's can have written meanwhile."""
        grads = {region.storage.key for region, _ in self._readers.grads.values()}
        mine = [region for region in changed if region.key in own.tensors and region.storage.key not in grads]
        found = self._held(own, mine, {region.key for region in watched}, {id(results)}) if mine else []
        return [region for region, readers in found if not readers]

    def _readers_of(self, known: Known, own: Own, region: StorageRegion, results: list[Any]) -> Iterator[Reader]:
        count = 0
        for reader in self._nodes_and_grads(known, region):
            count += 1
            yield reader
        if region.key in own.returned:
            count += 1
            yield Reader("the caller of torch.autograd.grad, who gets this gradient", node=False)
        name, mine = own.tensors.get(region.key, ("", region))
        if mine.shared and "incoming" in name:
            count += 1
            yield Reader("the other elements of the gradient: it is expanded, and they share bytes", node=False)
        if self._readers.call.creates and not count:
            yield from self._new_nodes(region, results)

    def _nodes_and_grads(self, known: Known, region: StorageRegion) -> Iterator[Reader]:
        yield from self._nodes(self._readers, known, region)
        seen = {reader.node for reader, _ in self._readers.saved.get(region.key, (region, []))[1]}
        for readers, running in self._readers.around:
            yield from self._nodes(readers, running, region, seen)
        for text in dict.fromkeys(self._readers.waiting_for(region)):
            yield Reader(text, node=False)
        own = known.leaf
        for grad, reference in self._readers.grads.values():
            leaf = reference()
            if grad.key == region.key and leaf is not None and leaf is not own:
                yield Reader(f"your own code, through the .grad of {_name(leaf)}", node=False)

    def _nodes(
        self, readers: Readers, known: Known, region: StorageRegion, seen: Collection[Node] = ()
    ) -> Iterator[Reader]:
        """Of one call into the engine: nodes that saved the bytes, and gradients on their way."""
        for reader, name in readers.saved.get(region.key, (region, []))[1]:
            if reader.node not in seen and readers.reads(reader, known):
                again = " and reads it in a second backward: the graph is kept" if reader.ran else ""
                who = "itself" if reader is known else reader.name
                yield Reader(f"{who}, which saved it as {name}{again}", self._site(reader))
        for (reader, nr), waiting in readers.pending.items():
            if waiting is not None and waiting.key == region.key and reader is not known:
                leaf = reader.leaf
                if leaf is not None:
                    yield Reader(f"{_name(leaf)}, as its gradient", node=False)
                else:
                    yield Reader(f"{reader.name}, as its incoming gradient {nr}", self._site(reader))

    def _new_nodes(self, region: StorageRegion, results: list[Any]) -> Iterator[Reader]:
        """Nodes of the graph that create_graph is making."""
        roots = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        for known in Graph(Counter()).add(roots):
            if known.node not in self._readers.graph.known:
                for name, saved in known.saved:
                    if saved.key == region.key:
                        yield Reader(f"{known.name}, which create_graph made and which saved it as {name}")

    def _held(
        self, own: Own, changed: list[StorageRegion], watched: set[Key], ignored: set[int]
    ) -> list[tuple[StorageRegion, list[Reader]]]:
        """What of the changed bytes the user's own references read, other than through containers of the guard."""
        updated = self._updated(own, changed)
        suspect = [region for region in changed if region.key not in updated]
        if not suspect:
            return [(region, []) for region in changed]
        keys = {region.key for region in changed}
        nodes = (known.node for known in self._readers.graph.known.values() if known.kind is NodeKind.PYTHON)
        ignored |= {identity for node in nodes for identity in containers_in(vars(node))}
        tensors: list[Any] = []
        touched: list[StorageRegion] = []
        for tensor in live(torch.Tensor):
            region = self._readers.region(tensor, "held in Python")
            if region is None or (region.key in watched and region.key not in keys):
                continue
            hit = next((r for r in suspect if r.key == region.key), None)
            hit = hit or next((r for r in suspect if r.overlaps(region)), None)
            if hit is None:
                continue
            tensors.append(tensor)
            touched.append(hit)
        for alias, hit in aliases(suspect, lambda one: self._readers.region(one, "held in Python")):
            tensors.append(alias)
            touched.append(hit)
        found: dict[Key, list[Reader]] = {}
        for i, text in holders_of(tensors, ignored | {id(touched)}).items():
            who = text if text == CHECKPOINT else f"your own code, through {text}"
            found.setdefault(touched[i].key, []).append(Reader(who, node=False))
        return [(region, found.get(region.key, [])) for region in changed]

    def _updated(self, own: Own, changed: list[StorageRegion]) -> set[Key]:
        """Of the changed bytes, those of modules' buffers that were updated on purpose: whoever else looks at them (a
        state_dict, a view) looks at the statistics as they are now."""
        buffers = [buffer for reference in self._readers.buffers if (buffer := reference()) is not None]
        moved = [buffer for buffer in buffers if engine.version_of(buffer) != own.versions.get(id(buffer))]
        # A forward inside may move statistics, and then torch counts no write of them: only that of the module's
        # counter, if it has one, or that nodes were made.
        forward = engine.sequence_number() != own.number or bool(moved)
        found: set[Key] = set()
        for buffer in buffers if forward else moved:
            region = self._readers.region(buffer, "held in Python")
            if region is not None:
                found |= {one.key for one in changed if one.key not in own.tensors and one.overlaps(region)}
        return found

    def _overwrite(self, known: Known, own: Own, region: StorageRegion, readers: list[Reader]) -> Overwrite:
        leaf = known.leaf
        if region.key in own.tensors:
            name, region = own.tensors[region.key]
        else:
            name = "a tensor that it was not given" if leaf is None else f"more than the .grad of {_name(leaf)}"
        return Overwrite(known.name, self._site(known), f"{name} ({region.text})", readers)

    def _site(self, known: Known) -> NodeSite | None:
        return self._sites.of(engine.number_of(known.node), self._thread)


def _name(leaf: torch.Tensor) -> str:
    """A parameter by its module; another leaf by its shape."""
    for module in live(torch.nn.Module):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is leaf:
                return f"parameter {name} of a {type(module).__name__}"
    return f"a leaf {list(leaf.shape)}"
