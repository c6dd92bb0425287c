"""What a batch holds besides tensors, by its path in the call: floats, which a plan may read anew in each step, and
plain values under the keys of dicts, fields of dataclasses and names of parameters, of which can be seen whether they
are read.

In: a call of the step. Out: the same call with dicts that note what is read of them, and traced numbers in the place of
floats; afterwards, which of the values nobody has read.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import dis
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from takeback.compiler.capture.handed import Handed
from takeback.compiler.capture.ran import EVERYTHING, Seen, can_be_spied, mentioned
from takeback.errors import CaptureError

NUMBERS = (float, np.float64)  #: what can be read anew in each step
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MOST_GIVEN = 1000  #: of one batch: more are data, and part of the key
_WHOLE = frozenset(("__dict__", "__reduce__", "__reduce_ex__", "__getstate__", EVERYTHING))
_PAST = frozenset(("__getattribute__", "_getframe", "currentframe", "f_locals", "f_back", "getmembers_static"))
_LOOKS_AT_LOCALS = frozenset(("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "inspect"))


@dataclass(frozen=True)
class GivenValue:
    """A value that holds no tensor, as it is compared."""

    key: Any  #: its type, and what it holds

    def __repr__(self) -> str:
        shown = _shown(self.key)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."


def given_value(node: Any) -> GivenValue:
    return GivenValue(_key(node))


def _key(node: Any) -> Hashable:
    kind = type(node)
    if kind is float:
        return (kind, node.hex())  # tells -0.0 from 0.0, and NaN is NaN
    if kind is complex:
        return (kind, repr(node))
    if issubclass(kind, np.generic):
        return (kind, (node.dtype.str, node.tobytes(), repr(node)))
    return (kind, tuple(map(_key, node)) if kind in (tuple, list) else node)


def _shown(key: Any) -> str:
    kind, held = key
    if kind in (tuple, list):
        inside = ", ".join(map(_shown, held))
        return f"[{inside}]" if kind is list else f"({inside})"
    if issubclass(kind, np.generic):
        return str(held[2])
    return repr(float.fromhex(held)) if kind is float else held if kind is complex else repr(held)


def is_plain(node: Any) -> bool:
    """Whether it is no tensor and no object, nor has any inside."""
    kind = type(node)
    return kind in _PLAIN or issubclass(kind, np.generic) or (kind in (tuple, list) and all(map(is_plain, node)))


def children_of(node: Any, path: str) -> list[tuple[Any, Any, str]] | None:
    """Key, value and path of each member of a container that can be put together again with others in their place;
    None of anything else."""
    kind = type(node)
    if kind is dict or (isinstance(node, collections.UserDict) and type(node.data) is dict):
        found = (
            [(k, v, f"{path}[{k!r}]") for k, v in node.items()] if all(type(k) in (str, int) for k in node) else None
        )
        return found if kind is dict or found is None or len(found) == len(node.data) else None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f, v, f"{path}.{f}") for f, v in zip(node._fields, node, strict=True)]
    if kind in (tuple, list):
        return [(i, v, f"{path}[{i}]") for i, v in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type | Mapping | tuple | list):
        return [(f.name, getattr(node, f.name), f"{path}.{f.name}") for f in dataclasses.fields(node)]
    return None


def can_be_watched(node: Any) -> bool:
    """Whether it can be seen which members of this container are read."""
    if isinstance(node, dict | collections.UserDict):
        return True
    return dataclasses.is_dataclass(node) and not isinstance(node, tuple | list) and can_be_spied(type(node))


def take_(given: dict[str, object], found: Mapping[str, object]) -> None:
    """Puts there what this call has. What is as before stays the very same object, which takes no time to compare."""
    values = {path: then if _same(then := given.get(path), now) else now for path, now in found.items()}
    given.clear()
    given.update(values)


def _same(then: object, now: object) -> bool:
    if type(then) is not type(now):
        return False
    return then.hex() == now.hex() if isinstance(then, NUMBERS) and isinstance(now, NUMBERS) else then == now


def too_many(given: Mapping[str, object]) -> bool:
    return len(given) > _MOST_GIVEN


def parameters_of(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what loss_fn is given by position besides the model, as far as they are known."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters[1:] if p.kind in positional)


def never_loaded(loss_fn: Callable[..., Any]) -> frozenset[str]:
    """The parameters that loss_fn does not even mention."""
    function = loss_fn.__func__ if isinstance(loss_fn, types.MethodType) else loss_fn
    if type(function) is not types.FunctionType:
        return frozenset()
    code = function.__code__
    if not _LOOKS_AT_LOCALS.isdisjoint(code.co_names):
        return frozenset()
    used = {i.argval for i in dis.get_instructions(code) if isinstance(i.argval, str)}
    used |= {name for i in dis.get_instructions(code) if isinstance(i.argval, tuple) for name in i.argval}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return frozenset(names) - used - set(code.co_cellvars)


class Mutated(CaptureError):
    """The step writes into a dict of the batch: it is recorded with the dict itself."""


class WatchedDict(dict[Any, Any]):
    """Stands for a dict of the batch, and notes which entries are read."""

    def __init__(self, entries: Mapping[Any, Any], paths: Mapping[Any, str], read: set[str]) -> None:
        super().__init__(entries)
        self._paths, self._read = paths, read
        self.over = False  #: the step is made, and whoever has kept it may do as he likes

    def _note(self, key: Any) -> None:
        if key in self._paths:  # whatever it is that equals the key
            self._read.add(self._paths[key])

    def note_all(self) -> None:
        self._read.update(self._paths.values())

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:  # that it is there makes dict(self) and f(**self) ask for each entry
        return super().__iter__()


def _of_all(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: WatchedDict, *args: Any) -> Any:
        self.note_all()
        return plain(self, *args)

    return method


def _refused(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: WatchedDict, *args: Any, **kwargs: Any) -> Any:
        if self.over:
            return plain(self, *args, **kwargs)
        raise Mutated(f"the step writes into a dict of the batch ({name})")

    return method


for _name in (
    "copy",
    "items",
    "values",
    "__eq__",
    "__ne__",
    "__or__",
    "__ror__",
    "__repr__",
    "__reduce_ex__",
    "__reduce__",
):
    setattr(WatchedDict, _name, _of_all(_name))
for _name in ("__setitem__", "__delitem__", "__ior__", "pop", "popitem", "setdefault", "update", "clear"):
    setattr(WatchedDict, _name, _refused(_name))


@dataclass
class WatchedCall:
    """A call whose values are watched."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: set[str] = field(default_factory=set)  #: paths of what was read from dicts
    objects: dict[str, object] = field(default_factory=dict)  #: dataclasses, by path
    stand_ins: list[Any] = field(default_factory=list)
    watched: set[str] = field(default_factory=set)  #: paths of what can be seen to be read
    unmentioned: Collection[str] = ()
    notes: bool = False  #: its dicts note what is read
    held: Sequence[int] = ()  #: how many refer to each stand-in

    @property
    def both(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs

    def check_out(self) -> None:
        """The step is made. Raises where what stands for the user's outlives it: in aux, or in an object of his."""
        for i in range(len(self.stand_ins)):
            if type(self.stand_ins[i]) is WatchedDict:
                self.stand_ins[i].over = True
        if self.held and any(now > then for now, then in zip(_references(self.stand_ins), self.held, strict=True)):
            raise Mutated("the step keeps a dict of the batch, or returns it")

    def is_unread(self, path: str, seen: Seen) -> bool:
        """Whether nobody has read this value."""
        if path in self.unmentioned:
            return True
        if path not in self.watched or path in self.read:
            return False
        for where, value in self.objects.items():
            names = seen.reads.get(id(value), _WHOLE)
            if path.startswith(f"{where}.") and (type(value) in seen.unseen or not _WHOLE.isdisjoint(names)):
                return False
            if any(path == f"{where}.{name}" for name in names):
                return False
        return True


def looks_past(seen: Seen) -> bool:
    """Whether code of the user's ran that may have read a value where nobody looks on: by a dict's own methods, past
    what an object makes of attributes, or in the variables of another function."""
    if not _PAST.isdisjoint(seen.names["user"]):
        return True
    return any(_asks_dict_itself(code, globals_) for code, globals_ in seen.users_code())


def _asks_dict_itself(code: types.CodeType, globals_: Mapping[str, Any]) -> bool:
    """`dict.get(batch, "id")`, also under another name."""
    kinds = (types.MethodDescriptorType, types.WrapperDescriptorType)
    named = (globals_.get(name) for name in code.co_names)
    if any(isinstance(each, kinds) and each.__objclass__ is dict for each in named):
        return True
    return "dict" in code.co_names and any(
        one.argval == "dict" and one.opname.startswith("LOAD") and other.opname in ("LOAD_ATTR", "LOAD_METHOD")
        for one, other in itertools.pairwise(dis.get_instructions(code))
    )


def _references(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(map(sys.getrefcount, values))


def watched_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: tuple[str, ...],
    given: Mapping[str, object],
    loss_fn: Callable[..., Any],
    *,
    notes: bool,
) -> WatchedCall:
    """The call with what stands in `given` in the place of its floats. `notes`: with dicts that note what is read."""
    call = WatchedCall((), {}, unmentioned=never_loaded(loss_fn), notes=notes)
    call.args = tuple(_watched(v, named(i, names), given, call) for i, v in enumerate(args))
    call.kwargs = {k: _watched(v, k, given, call) for k, v in kwargs.items()}
    call.stand_ins += call.objects.values()
    call.held = _references(call.stand_ins)
    return call


def handed_dicts() -> Handed:
    """Notes where a watched dict comes to code that may make it the `__dict__` of an object, whose attributes are read
    past it."""
    return Handed(WatchedDict, lambda code, table: "__dict__" in mentioned(code))


def named(index: int, names: tuple[str, ...]) -> str:
    """What an argument is called in messages and paths."""
    return names[index] if index < len(names) else f"number {index + 1}"


def _watched(node: Any, path: str, given: Mapping[str, object], call: WatchedCall) -> Any:
    if type(node) in NUMBERS:
        return given.get(path, node)
    if isinstance(node, torch.Tensor):
        return node
    children = children_of(node, path)
    if children is None:
        return node
    if can_be_watched(node):
        call.watched.update(p for _, _, p in children)
    members = {key: _watched(value, p, given, call) for key, value, p in children}
    if isinstance(node, dict) and not call.notes:
        return members
    if isinstance(node, dict | collections.UserDict):
        stand_in = WatchedDict(members, {key: p for key, _, p in children}, call.read)
        call.stand_ins.append(stand_in)
        if isinstance(node, dict):
            return stand_in
        node = copy.copy(node)
        node.data = stand_in
        call.stand_ins.append(node)
        return node
    if isinstance(node, tuple | list):
        return type(node)(*members.values()) if hasattr(node, "_fields") else type(node)(members.values())
    if any(value is not members[key] for key, value, _ in children):
        node = copy.copy(node)
        for key, value in members.items():
            object.__setattr__(node, key, value)
    call.objects[path] = node
    return node
