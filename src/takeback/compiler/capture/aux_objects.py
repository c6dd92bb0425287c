"""Objects in aux that hold tensors and are no containers, such as the cache in a transformers output: opened into what
they hold for the recording, and put together again for the caller of every step. What they hold has no graph."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.capture.batch import LeafType, map_leaves

_DEEPEST = 4


class _Shell:
    """An object of the same class with no attributes; told from others by what it is, not by what it equals."""

    def __init__(self, of: object) -> None:
        self._empty = copy.copy(of)
        vars(self._empty).clear()

    def filled(self, attributes: dict[str, Any]) -> object:
        made = copy.copy(self._empty)
        vars(made).update(attributes)
        return made


@dataclass(frozen=True)
class Opened:
    """What an object holds, as a container."""

    shell: _Shell
    attributes: dict[str, Any]


class _ObjectType(LeafType):
    def __instancecheck__(cls, node: object) -> bool:
        closed = (
            torch.Tensor | torch.nn.Module | type | types.ModuleType | types.FunctionType | types.MethodType | float
        )
        has_attributes = isinstance(getattr(node, "__dict__", None), dict)
        return has_attributes and super().__instancecheck__(node) and not isinstance(node, closed)


class _Object(metaclass=_ObjectType):
    """Every instance that has attributes and is no tensor, number, module, class, function or container."""


def open_objects(aux: Any, depth: int = 0) -> Any:
    """aux with every object that holds a tensor opened."""

    def opened(node: Any) -> Any:
        if depth > _DEEPEST:
            return node
        attributes = open_objects(dict(vars(node)), depth + 1)
        return Opened(_Shell(node), attributes) if _has_tensor(attributes) else node

    return map_leaves(aux, _Object, opened)


def _has_tensor(attributes: dict[str, Any]) -> bool:
    found: list[bool] = []
    map_leaves(attributes, torch.Tensor, lambda _: found.append(True))
    return bool(found)


def close_objects(aux: Any) -> Any:
    """The inverse: every opened object is put together, with what stands in its attributes now."""
    return map_leaves(aux, Opened, lambda node: node.shell.filled(close_objects(node.attributes)))


def without_graph(aux: Any, detached: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """aux with every tensor detached, as each step gives it: what a graph of its own keeps for a backward is let go.
    One that has a gradient stays as it is, for the gradient would be let go, too."""

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.retains_grad and tensor.grad is not None else detached(tensor)

    return map_leaves(aux, torch.Tensor, plain)
