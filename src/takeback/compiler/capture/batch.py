"""Takes a batch apart into tensors and everything else, and puts it together again.

In: any nesting of tuples, lists, dicts, mappings, dataclasses, namedtuples and registered pytrees. Out: the tensors in
order, and a hashable key of all the rest, which a plan is looked up by.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree  # no public equivalent; checked on 2.11 and 2.13

from takeback.compiler.capture.given import (
    NUMBERS,
    WatchedDict,
    can_be_watched,
    children_of,
    given_value,
    is_plain,
    named,
    too_many,
)
from takeback.errors import CaptureError

_GIVEN = "given"  #: stands in a key for a value that comes apart
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def tensors_of(batch: object) -> list[torch.Tensor]:
    """The tensors of a batch, in order; those among another's attributes too."""
    found: list[torch.Tensor] = []
    _walk(batch, found)
    return found


def results_of(aux: object) -> list[torch.Tensor]:
    """The tensors of what loss_fn gave back, in the order in which `map_tensors` comes across them."""
    found: list[torch.Tensor] = []
    map_tensors(aux, found.append)
    return found


def take_apart(batch: object) -> tuple[list[torch.Tensor], Hashable]:
    """The tensors of a batch in order, and a key: two batches with equal keys may share a plan."""
    tensors: list[torch.Tensor] = []
    return tensors, _walk(batch, tensors)


def take_call_apart(
    batch: tuple[tuple[Any, ...], dict[str, Any]], names: tuple[str, ...]
) -> tuple[list[torch.Tensor], Hashable, dict[str, object]]:
    """The same of a call's arguments, without the values that a plan need not be for alone: those come apart, by their
    paths. `names` are those of positional arguments."""
    tensors: list[torch.Tensor] = []
    given: dict[str, object] = {}
    key = _walk_call(batch, tensors, names, given)
    if too_many(given):
        return *take_apart(batch), {}
    return tensors, key, given


def outline_of(batch: tuple[tuple[Any, ...], dict[str, Any]], names: tuple[str, ...] = ()) -> Hashable:
    """The key of a call less the shapes and strides of its tensors: what batches of one kind have in common, whatever
    their length."""
    given: dict[str, object] = {}
    outline = _walk_call(batch, [], names, given, _tensor_outline)
    return _walk(batch, [], _tensor_outline) if too_many(given) else outline


def _walk_call(
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    tensors: list[torch.Tensor],
    names: tuple[str, ...],
    given: dict[str, object],
    of_tensor: Callable[[torch.Tensor], Hashable] | None = None,
) -> Hashable:
    args, kwargs = batch
    members = [(named(i, names), value) for i, value in enumerate(args)]
    of = of_tensor or tensor_key
    return (
        tuple((name, _member(value, tensors, of, given, name, watched=True)) for name, value in members),
        tuple((name, _member(value, tensors, of, given, name, watched=True)) for name, value in kwargs.items()),
    )


def _member(
    node: Any,
    tensors: list[torch.Tensor],
    of_tensor: Callable[[torch.Tensor], Hashable],
    given: dict[str, object],
    path: str,
    *,
    watched: bool,
) -> Hashable:
    """What a key has of a member of a call or a container. `watched`: of this one it can be seen whether it is read."""
    if type(node) in NUMBERS:
        given[path] = node
        return _GIVEN
    if watched and is_plain(node):
        given[path] = given_value(node)
        return _GIVEN
    children = children_of(node, path) if not isinstance(node, torch.Tensor) else None
    if children is None:
        return _walk(node, tensors, of_tensor)
    inside = can_be_watched(node)
    members = ((k, _member(v, tensors, of_tensor, given, p, watched=inside)) for k, v, p in children)
    return (type(node), tuple(members))


def objects_of(batch: object) -> list[object]:
    """What a batch holds that is neither tensor nor plain value nor container: compared by identity, so looked into."""
    found: list[object] = []

    def visit(leaf: object) -> object:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            found.append(leaf)
        return leaf

    map_leaves(batch, Leaf, visit)
    return found


class LeafType(type):
    """Everything that is no container is an instance of `Leaf`."""

    def __instancecheck__(cls, node: object) -> bool:
        containers = isinstance(node, Mapping | tuple | list) or type(node) in pytree.SUPPORTED_NODES
        return not containers and not (dataclasses.is_dataclass(node) and not isinstance(node, type))


class Leaf(metaclass=LeafType):
    pass


def tensor_key(t: torch.Tensor) -> Hashable:
    strides = t.stride() if t.layout is torch.strided else None
    return (type(t), t.shape, strides, t.dtype, t.device, t.layout, t.requires_grad)


def _tensor_outline(t: torch.Tensor) -> Hashable:
    return (type(t), t.dim(), t.dtype, t.device, t.layout, t.requires_grad)


def _walk(
    node: Any, tensors: list[torch.Tensor], of_tensor: Callable[[torch.Tensor], Hashable] = tensor_key
) -> Hashable:
    if isinstance(node, torch.Tensor):
        if node.is_nested:
            raise CaptureError(
                "the batch holds a nested tensor, whose lengths are data, and takeback plans plain tensors. Pass "
                "t.values() and t.offsets() (packed rows, with a mask that keeps them apart), or pad: see tb.bucket."
            )
        again = next((i for i, t in enumerate(tensors) if t is node), None)
        tensors.append(node)
        # step(x, x) and step(x, y) are different programs; and a step may read attributes that were put on a tensor.
        attributes = _walk(vars(node), tensors, of_tensor) if again is None and vars(node) else None
        return (of_tensor(node), again, attributes)
    kind = type(node)
    if kind is float:
        return (kind, node.hex())  # tells -0.0 from 0.0, and NaN is NaN
    if kind in _PLAIN:
        return (kind, node)
    if isinstance(node, Mapping):
        return (kind, tuple((k, _walk(v, tensors, of_tensor)) for k, v in node.items()))
    if isinstance(node, tuple | list):
        return (kind, tuple(_walk(v, tensors, of_tensor) for v in node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return (kind, tuple(_walk(getattr(node, f.name), tensors, of_tensor) for f in dataclasses.fields(node)))
    if kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(node)
        return (kind, repr(context), tuple(_walk(v, tensors, of_tensor) for v in children))
    try:
        hash(node)
    except TypeError:
        raise CaptureError(
            f"the batch holds a {kind.__module__}.{kind.__qualname__}, which is neither a tensor, a container nor "
            f"hashable, so takeback cannot tell one batch from the next. Pass its tensors, or register it as a pytree."
        ) from None
    return (kind, node)


def batch_in_words(batch: object, most: int = 6) -> str:
    """`16x59, 16`, or `input_ids 16x59, labels 16`: the tensors and plain values of a batch, for messages."""
    found: list[str] = []

    def visit(node: Any, name: str) -> None:
        label = f"{name} " if name else ""
        if isinstance(node, torch.Tensor):
            found.append(label + ("x".join(map(str, node.shape)) or "scalar"))
        elif isinstance(node, Mapping):
            for key, value in node.items():
                visit(value, str(key)[:24])
        elif isinstance(node, tuple | list):
            for value in node:
                visit(value, name)
        elif dataclasses.is_dataclass(node) and not isinstance(node, type):
            for field in dataclasses.fields(node):
                visit(getattr(node, field.name), field.name)
        elif isinstance(node, bool | int | float | str):
            found.append(label + repr(node)[:24])

    visit(batch, "")
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "no tensors") + more


def map_leaves(node: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same batch with every leaf of that kind replaced; containers are rebuilt, the caller's are left alone."""
    if isinstance(node, kind):
        return change(node)
    of = type(node)
    if isinstance(node, Mapping):
        rebuilt = {k: map_leaves(v, kind, change) for k, v in node.items()}
        if isinstance(node, WatchedDict):
            return rebuilt
        if isinstance(node, collections.defaultdict):
            return of(node.default_factory, rebuilt)
        return rebuilt if of is dict else of(rebuilt)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return of(*(map_leaves(v, kind, change) for v in node))
    if isinstance(node, tuple | list):
        return of(map_leaves(v, kind, change) for v in node)
    if of in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[of].flatten_fn(node)
        return pytree.SUPPORTED_NODES[of].unflatten_fn([map_leaves(v, kind, change) for v in children], context)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = [f.name for f in dataclasses.fields(node) if f.init]
        return dataclasses.replace(node, **{f: map_leaves(getattr(node, f), kind, change) for f in fields})
    return node


def map_tensors(node: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    return map_leaves(node, torch.Tensor, change)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How `accumulate=` cuts a batch along dimension 0. `parts` are (first row, rows), as torch.chunk cuts them where
    they are uneven; None where each tensor is cut into equal parts of its own."""

    count: int
    parts: tuple[tuple[int, int], ...] | None = None

    def part(self, batch: Any, index: int) -> Any:
        """The `index`-th part. Scalars go to every one."""
        if self.count == 1:
            return batch

        def rows(t: torch.Tensor) -> torch.Tensor:
            if t.dim() == 0:
                return t
            each = t.shape[0] // self.count
            first, length = (index * each, each) if self.parts is None else self.parts[index]
            return t.narrow(0, first, length)

        return map_tensors(batch, rows)

    def weigh(self, loss: torch.Tensor, index: int) -> torch.Tensor:
        """The part's share of the batch's loss: that of its rows. Equal parts are averaged."""
        if self.count == 1:
            return loss
        if self.parts is None or len({length for _, length in self.parts}) == 1:
            return loss / self.count
        return loss * (self.parts[index][1] / sum(length for _, length in self.parts))


def cut(batch: Any, count: int) -> Cut:
    """Into `count` parts, or as many as torch.chunk makes of so few rows."""
    if count == 1:
        return Cut(1)
    shapes = {t.shape[0]: tuple(t.shape) for t in results_of(batch) if t.dim()}
    odd = [rows for rows in shapes if rows % count]
    if not odd:
        return Cut(count)
    if len(shapes) > 1:
        raise CaptureError(
            f"accumulate={count} does not divide a batch of {odd[0]} rows (a tensor of shape {shapes[odd[0]]}), and "
            f"others of its tensors have {next(r for r in shapes if r != odd[0])}, so that it is not known which rows "
            f"belong together. Choose a batch size that is a multiple of {count}."
        )
    [rows] = shapes
    each = -(-rows // count)
    parts = tuple((first, min(each, rows - first)) for first in range(0, rows, each))
    return Cut(len(parts), parts)
