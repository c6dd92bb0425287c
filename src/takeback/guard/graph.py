"""A graph of autograd nodes as data: which node is whose code, what each has saved, and which of them will run.

In: nodes and gradient edges. Nothing is unpacked, nothing is recorded, tensors are held weakly.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from takeback.guard import engine
from takeback.guard.region import StorageRegion, Unwatchable, region_of


class NodeKind(enum.Enum):
    """Whose code a node runs."""

    TORCH = enum.auto()  #: an operator of torch: it computes new tensors, and is trusted
    LEAF = enum.auto()  #: AccumulateGrad, and the user's hooks on a leaf
    PYTHON = enum.auto()  #: a torch.autograd.Function
    NATIVE = enum.auto()  #: a C++ node from outside of torch, or one that may run another node inside


@dataclass(eq=False)
class Known:
    """What is known of one node."""

    node: Node
    name: str
    kind: NodeKind
    saved: list[tuple[str, StorageRegion]]
    next: list[tuple[Known | None, int]] = field(default_factory=list)
    executes: bool = True  #: the running backward will call it
    ran: bool = False

    @property
    def leaf(self) -> torch.Tensor | None:
        return getattr(self.node, "variable", None) if self.kind is NodeKind.LEAF else None


class Graph:
    """Every node that was met, once."""

    def __init__(self, skipped: Counter[str]) -> None:
        self.known: dict[Node, Known] = {}
        self._skipped = skipped

    def add(self, roots: Iterable[Node]) -> list[Known]:
        """Walks to everything below the roots; returns what had not been met before."""
        new: list[Known] = []
        todo = [node for node in roots if node not in self.known]
        while todo:
            node = todo.pop()
            if node in self.known:
                continue
            self.known[node] = known = Known(node, node.name(), _kind(node), list(self._saved(node)))
            new.append(known)
            todo.extend(below for below, _ in node.next_functions if below is not None)
        for known in new:
            known.next = [
                (self.known[below] if below is not None else None, nr) for below, nr in known.node.next_functions
            ]
        return new

    def mark_executed_(self, goals: set[Node]) -> None:
        """With torch.autograd.grad or inputs=, only the nodes on a way to a goal run."""
        state: dict[Known, bool] = {}
        for start in list(self.known.values()):
            todo = [start]
            while todo:
                at = todo[-1]
                below = [known for known, _ in at.next if known is not None]
                missing = [known for known in below if known not in state]
                if at not in state and missing:
                    todo.extend(missing)
                    continue
                state.setdefault(at, any(state[known] or known.node in goals for known in below))
                todo.pop()
        for known, runs in state.items():
            known.executes = runs

    def still_readable(self, roots: Iterable[Node]) -> Iterator[Known]:
        """What a later backward from these roots reads: it does not get past a node that will have released its saved
        tensors."""
        seen: set[Node] = set()
        todo = [self.known[node] for node in roots if node in self.known]
        while todo:
            at = todo.pop()
            if at.node in seen:
                continue
            seen.add(at.node)
            if at.executes and at.saved:
                continue
            yield at
            todo.extend(known for known, _ in at.next if known is not None)

    def _saved(self, node: Node) -> Iterator[tuple[str, StorageRegion]]:
        if not engine.knows_what_is_saved():
            self._skipped["nodes of a torch that does not show what they saved"] += 1
            return
        statistics = getattr(node, "_saved_training", False) is True or "BatchNormWithUpdate" in node.name()
        for name, value in engine.saved_by(node):
            # A batch norm that trains keeps its running statistics but does not read them.
            if not (statistics and name in ("running_mean", "running_var")):
                yield from self._regions(_plain_name(name), value)
        if isinstance(node, BackwardCFunction):
            for name, value in vars(node).items():
                yield from self._regions(f"ctx.{name}", value)

    def _regions(self, name: str, value: object) -> Iterator[tuple[str, StorageRegion]]:
        for tensor in tensors_in(value):
            try:
                region = region_of(tensor)
            except Unwatchable as why:
                self._skipped[f"{why}, saved by a node"] += 1
                continue
            if region is not None:
                yield name, region


def tensors_in(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors of nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one, depth - 1)
    elif depth and isinstance(value, list | tuple | set):
        for one in value:
            yield from tensors_in(one, depth - 1)


def containers_in(value: object, depth: int = 3) -> Iterator[int]:
    """The ids of nested lists, tuples and dicts."""
    if depth and isinstance(value, dict | list | tuple | set):
        yield id(value)
        for one in value.values() if isinstance(value, dict) else value:
            yield from containers_in(one, depth - 1)


def _plain_name(name: str) -> str:
    """As the Function's author knows it: `saved_tensors[0]`."""
    return f"saved_{name}" if name.startswith("tensors[") else name


def _kind(node: Node) -> NodeKind:
    if isinstance(node, BackwardCFunction):
        return NodeKind.PYTHON
    name = node.name()
    if name.endswith("AccumulateGrad"):
        return NodeKind.LEAF
    if "CppNode" in name or name.endswith("CopySlices"):
        return NodeKind.NATIVE
    # torch's own nodes have plain names; one that does not name itself is called by its C++ type.
    return NodeKind.NATIVE if "::" in name and not name.startswith("torch::autograd::") else NodeKind.TORCH
