"""What a plan assumes of the Python world: everything that the recorded step read is as it was.

In: the roots from which a step reads (model, loss_fn, objects of the batch), and what was seen while it ran (ran.py).
Out: `Assumptions`, flat lists of places (where to look, what was there), compared before every replay. Without a `Seen`
everything reachable is written down: so it is done before a recording, to know afterwards what the step has changed.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import gc
import itertools
import operator
import pathlib
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from takeback.compiler.capture.given import NUMBERS, GivenValue
from takeback.compiler.capture.hooks import MODULE_HOOKS
from takeback.compiler.capture.ran import (
    EVERYTHING,
    OPEN,
    Seen,
    globals_named,
    is_installed,
    mentioned,
    origin_of_class,
    origin_of_module,
)
from takeback.compiler.program import Program
from takeback.options import environment

#: Compared by value. Of subclasses only these types' own: an object with attributes of its own is looked into.
_VALUES = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, torch.finfo, torch.iinfo),
        *(decimal.Decimal, fractions.Fraction, pathlib.PurePosixPath, pathlib.PosixPath, pathlib.WindowsPath),
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta),
    )
)
_MOST_BYTES = 16 << 20  #: of one array; larger ones are held by identity only
_PARTS = ("_parameters", "_buffers", "_modules")
_TABLES = (*_PARTS, "_forward_hooks", "_forward_pre_hooks", *MODULE_HOOKS)  #: of a module, looked at whoever reads them
#: What torch keeps beside the tables of hooks, which are looked at themselves.
_BESIDE_HOOKS = (
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
    *("_is_full_backward_hook", "_non_persistent_buffers_set"),
)
#: Objects of these are not looked into: what they hold is not the step's.
_OPAQUE = frozenset(
    ("numpy", "threading", "logging", "io", "_io", "asyncio", "concurrent", "multiprocessing", "subprocess", "highspy")
)
#: Of takeback's own: what these keep never goes into a step, for while one is recorded they keep nothing.
_OURS = ("takeback.workspace", "takeback.norm_cache", "takeback.nn.owner", "takeback.nn.invert")
_MOST_PLACES = 200_000
_MOST_ENTRIES = 10_000  #: of one container; a larger one is data: held by identity and length
_MISSING = object()
_BY_NAME = frozenset(("import_module", "modules", "__import__"))  #: code that mentions these may get at any module
_ENVIRONMENT = frozenset(("environ", "getenv"))

Child = tuple[object, str]
Place = tuple[int, object]  #: the container's id, and the key in it


def _is_opaque(kind: type) -> bool:
    """Whether objects of this class are left alone."""
    name = kind.__module__
    if not isinstance(name, str):
        return True
    if name.startswith("takeback."):
        return not issubclass(kind, torch.nn.Module) and not name.startswith(OPEN)
    return name.partition(".")[0] in _OPAQUE


@dataclass(frozen=True)
class _ValuePlace:
    """Where something is that the step read."""

    container: Any
    key: Any
    is_attribute: bool
    then: Any  #: what it was
    path: str

    def read(self) -> Any:
        return (_get if self.is_attribute else _get_item)(self.container, self.key)

    def write_(self, value: Any) -> None:
        if self.is_attribute:
            setattr(self.container, self.key, value)
        elif _is(self.container, dict):
            dict.__setitem__(self.container, self.key, value)
        else:
            self.container[self.key] = value

    @property
    def place(self) -> Place:
        return id(self.container), self.key


class NumberPlace(_ValuePlace):
    """Of a number."""

    then: float


class TensorPlace(_ValuePlace):
    """Of a tensor."""

    then: torch.Tensor


@dataclass(frozen=True)
class Varying:
    """What has changed since a plan was made, where that is all that has changed."""

    numbers: tuple[NumberPlace, ...] = ()
    given: tuple[str, ...] = ()  #: paths of values of the batch
    of: Program | None = None  #: as it was recorded for that plan

    def __bool__(self) -> bool:
        return bool(self.numbers or self.given)


def _is_other_value(now: object, then: object) -> bool:
    return type(now) is type(then) is GivenValue and now != then


class Assumptions:
    """Every Python value that a step reads, or can read, as it was when this was made."""

    def __init__(self, seen: Seen | None = None, given: dict[str, object] | None = None, **roots: object) -> None:
        """`given`: what this call has besides tensors, by path; the next call's is put into the same dict."""
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self.objects: list[object] = []  #: whose attributes are read
        self._seen = seen
        self._items: list[tuple[Any, Any, object, str]] = []  # dict.get(container, key) was value
        self._indexed: list[tuple[Any, Any, object, str]] = []  # container[key] was value, of what is no dict
        self._attributes: list[tuple[Any, str, object, str]] = []  # getattr(container, key) was value
        self._calls: list[tuple[Callable[[], object], object, str]] = []  # function() was value
        self._empty: list[tuple[Any, Collection[str] | None, str]] = []  # had no entries
        self._lengths: list[tuple[Any, int, str]] = []
        self._orders: list[tuple[dict[Any, Any], tuple[object, ...], str]] = []  # keys, in order
        self._tables: list[tuple[Any, frozenset[str], Collection[str] | None, str]] = []  # names, those that matter
        self._types: list[tuple[Any, type, dict[str, Any] | None, str]] = []
        self._sets: list[tuple[Any, frozenset[object], str]] = []
        self._arrays: list[tuple[Any, bytes, str]] = []
        self._drawers: list[tuple[Any, object, str]] = []  # what gives another value each time it is asked
        self._numbers: tuple[NumberPlace, ...] = ()  # read anew in each step
        self._given: list[tuple[dict[str, object], str, object, str]] = []  # of the batch: as the items
        if given is not None:
            self._given += [(given, path, value, f"the argument {path}") for path, value in given.items()]
        self._unread: tuple[str, ...] = ()  # paths of what is given and decides nothing
        self._fast: _Identities | None = None  # made when first asked for
        self._ordered: tuple[list[Any], list[tuple[str, ...]]] | None = None
        self._extra: set[str] = set()  # names that attrgetters ask for
        self._ids: set[int] = set()
        self._functions: set[int] = set()  # code of functions that were looked into
        self._by_kind: dict[type, set[str]] = {}  # what was written down of a class
        self._mentions: dict[type, frozenset[str]] = {}
        self._of_classes: set[Place] = set()
        pending = collections.deque((value, name) for name, value in roots.items())
        if seen is not None:
            pending.extend(self._globals_of_what_ran(seen))
        self._follow(pending)
        if seen is not None and (hidden := self._hidden(seen)):
            self._follow(collections.deque(hidden))
        self._seen = None
        self._containers = [container for container, _, _ in self._empty]

    def _follow(self, pending: collections.deque[Child]) -> None:
        while pending and len(self._items) < _MOST_PLACES:
            value, path = pending.popleft()
            if type(value) not in _VALUES and id(value) not in self._ids:
                self._ids.add(id(value))
                pending.extend(self._children(value, path))

    # -- what counts as read -----------------------------------------------------------------------------------

    def _reads(self, value: Any) -> Collection[str] | None:
        """The names of attributes that the step can have read of this object; None: all of them."""
        seen = self._seen
        if seen is None:
            return None
        kind = type(value)
        exact = seen.reads.get(id(value)) if kind not in seen.unseen else None
        if exact is None:
            return self._mentioned(kind)
        return vars(value).keys() | exact if EVERYTHING in exact else exact

    def _mentioned(self, kind: type) -> frozenset[str]:
        """What the code mentions that may have looked at an object of this class: the user's, and that of the libraries
        the class comes from."""
        assert self._seen is not None
        found = self._mentions.get(kind)
        if found is None:
            names = self._seen.names
            origins = {origin_of_class(base) for base in kind.__mro__ if base is not object}
            found = self._mentions[kind] = frozenset(self._extra).union(*(names[o] for o in origins | {"user"}))
        return found

    def _globals_of_what_ran(self, seen: Seen) -> Iterator[Child]:
        for code, globals_ in list(seen.users_code()):
            yield from self._globals_read_by(code, globals_)

    def _globals_read_by(self, code: types.CodeType, globals_: dict[str, Any]) -> Iterator[Child]:
        for name in sorted(globals_named(code)):
            item = globals_.get(name, sys.modules.get(name, _MISSING))  # or imported inside the function
            path = f"global {name!r} read by {code.co_qualname}"
            if _is(item, types.ModuleType):
                yield from self._module(item, mentioned(code), path)
            elif name in globals_ or name in vars(builtins):  # one of Python's own may be hidden by another, later
                self._items.append((globals_, name, item, path))
                if item is not _MISSING:
                    yield item, path
        names = mentioned(code)
        if not _BY_NAME.isdisjoint(names):
            texts = {v for n in names if isinstance(v := globals_.get(n), str)}
            for name in sorted((names | texts) & sys.modules.keys()):
                yield from self._module(sys.modules[name], names, name)
        if not _ENVIRONMENT.isdisjoint(names):
            table = environment()
            for name in sorted(names & table.keys()):
                yield from self._call(functools.partial(table.get, name), f"the environment variable {name}")

    def _hidden(self, seen: Seen) -> list[Child]:
        """Functions that ran and were not come across: their closures and defaults are read too."""
        inner = {id(c) for code, _ in seen.codes.values() for c in code.co_consts if isinstance(c, types.CodeType)}
        codes = [
            code
            for code, _ in seen.users_code()
            if id(code) not in self._functions and id(code) not in inner and (code.co_freevars or code.co_argcount)
        ]
        if not codes:
            return []
        wanted = {id(c) for c in codes}
        found = (f for f in gc.get_referrers(*codes) if isinstance(f, types.FunctionType))
        return [(f, f.__qualname__) for f in found if id(f.__code__) in wanted]

    # -- finding places ----------------------------------------------------------------------------------------

    def _children(self, value: Any, path: str) -> Iterator[Child]:
        kind = type(value)  # not isinstance(), which asks the object
        if kind in (weakref.ProxyType, weakref.CallableProxyType):  # says of itself that it is what it stands for
            yield value.__repr__.__self__, path
        elif issubclass(kind, torch.Tensor):
            self.tensors.append(value)
            yield from self._table(vars(value), path, self._reads(value))
        elif issubclass(kind, torch.Generator):
            self.generators.append(value)
        elif issubclass(kind, dict | list | tuple | collections.deque | types.MappingProxyType):
            yield from self._container(value, path)
            if kind.__module__ not in ("builtins", "collections"):  # a subclass may have attributes as well
                yield from self._instance(value, path)
        elif issubclass(kind, set | frozenset):
            if value:
                self._sets.append((value, frozenset(value), path))
            else:
                self._empty.append((value, None, path))
        elif issubclass(kind, functools.partial):
            yield from ((value.func, path), (value.args, f"{path}.args"), (value.keywords, f"{path}.keywords"))
        elif issubclass(kind, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
            yield from self._method(value, path)
        elif issubclass(kind, types.FunctionType):
            yield from self._function(value, path)
        elif issubclass(kind, functools._lru_cache_wrapper):
            yield from self._cached(value.__wrapped__, path)
        elif issubclass(kind, type):
            yield from self._class(value, path, None)
            if type(value) is not type:
                yield type(value), path
        elif issubclass(kind, np.ndarray | bytearray | array.array):
            if (value.nbytes if issubclass(kind, np.ndarray) else memoryview(value).nbytes) <= _MOST_BYTES:
                self._arrays.append((value, _content(value), path))
        elif issubclass(kind, contextvars.ContextVar):
            yield from self._call(functools.partial(value.get, _MISSING), f"{path}.get()")
        elif issubclass(kind, weakref.ref):
            yield from self._call(value, path)
        elif issubclass(kind, operator.attrgetter | operator.itemgetter | operator.methodcaller):
            self._extra |= {part for a in value.__reduce__()[1] if isinstance(a, str) for part in a.split(".")}
            self._mentions.clear()
        elif (state := _drawer_state(value)) is not None:
            self._drawers.append((value, state, path))
        elif issubclass(kind, types.ModuleType):
            names = self._mentioned(kind) if self._seen is not None else ()
            yield from self._module(value, names, path)
        elif issubclass(kind, threading.local):
            yield from self._table(value.__dict__, path, self._reads(value))
        elif issubclass(kind, types.CodeType | types.FrameType | np.generic | enum.Enum):
            return
        else:
            yield from self._instance(value, path)

    def _length(self, value: Any, path: str) -> None:
        if value:
            self._lengths.append((value, len(value), path))
        else:
            self._empty.append((value, None, path))

    def _container(self, value: Any, path: str) -> Iterator[Child]:
        self._length(value, path)
        if len(value) > _MOST_ENTRIES:
            return
        places = self._items if isinstance(value, dict) else self._indexed
        if isinstance(value, dict):
            if len(value) > 1:
                self._orders.append((value, tuple(dict.keys(value)), path))
            entries: Iterator[tuple[Any, Any]] = iter(list(dict.items(value)))  # whatever a subclass makes of items()
        else:
            entries = iter(list(value.items() if isinstance(value, Mapping) else enumerate(value)))
        for key, item in entries:
            name = f"{path}[{key!r}]" if type(key) in _VALUES else f"{path}[…]"
            places.append((value, key, item, name))
            yield item, name

    def _table(
        self, table: Any, path: str, reads: Collection[str] | None, skip: Collection[str] = ()
    ) -> Iterator[Child]:
        """The attributes in a `__dict__`: those that matter, and that no other that matters comes."""
        if not table:
            self._empty.append((table, reads, path))
            return
        self._tables.append((table, frozenset(table), reads, path))
        for name, item in tuple(table.items()):
            if name not in skip and (reads is None or name in reads):
                self._items.append((table, name, item, f"{path}.{name}"))
                yield item, f"{path}.{name}"

    def _instance(self, value: Any, path: str) -> Iterator[Child]:
        kind = type(value)
        if _is_opaque(kind):
            return
        attributes = _dict_of(value)
        reads = self._reads(value)
        self.objects.append(value)
        if attributes is not None or kind.__flags__ & 1 << 9:
            self._types.append((value, kind, attributes, path))
        shallow = reads is None and origin_of_module(kind.__module__) == "torch" and not _is_looked_into(kind)
        if issubclass(kind, torch.nn.Module) and attributes is not None:
            yield from self._table(attributes, path, reads, skip=(*_TABLES, *_BESIDE_HOOKS))
            for name in _TABLES:
                table = attributes.get(name)
                if table is not None:
                    self._length(table, f"{path}.{name}")
                    for key, item in tuple(table.items()):
                        where = f"{path}.{key}" if name in _PARTS else f"{path}.{name[1:]}[{key!r}]"
                        self._items.append((table, key, item, where))
                        yield item, where
        elif attributes is not None:
            found = tuple(self._table(attributes, path, reads))
            yield from () if shallow else found
        for slot in _slots(kind):
            if reads is None or slot in reads:
                yield from self._attribute(value, slot, f"{path}.{slot}")
        yield from self._class(kind, kind.__qualname__, reads)

    def _method(self, value: Any, path: str) -> Iterator[Child]:
        owner = value.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            yield owner, f"{path}.self" if isinstance(value, types.MethodType) else path
        if isinstance(value, types.MethodType):
            yield value.__func__, path

    def _attribute(self, container: Any, name: str, path: str) -> Iterator[Child]:
        item = _get(container, name)
        if item is not _MISSING:
            self._attributes.append((container, name, item, path))
            yield item, path

    def _call(self, function: Callable[[], object], path: str) -> Iterator[Child]:
        item = function()
        self._calls.append((function, item, path))
        yield item, path

    def _class(self, kind: type, path: str, reads: Collection[str] | None) -> Iterator[Child]:
        """What is read of a class, through its instances or itself: attributes, and functions that ran."""
        if self._seen is None:
            yield from self._whole_class(kind)
            return
        known = self._by_kind.get(kind)
        wanted = set(self._mentioned(kind) if reads is None else reads) - (known or set())
        if known is not None and not wanted:
            return
        first = known is None
        self._by_kind[kind] = wanted | (known or set())
        for base in kind.__mro__:
            origin = origin_of_class(base)
            if origin == "python":
                continue
            table = vars(base)
            name = base.__qualname__
            if origin == "user":
                self._tables.append((table, frozenset(table), _Relevant(wanted), name))
            for key, item in tuple(table.items()):
                functions = _functions_of(item)
                if key not in wanted and not (first and any(self._seen.ran(f.__code__) for f in functions)):
                    continue
                if functions or origin == "user":
                    self._of_classes.add((id(base), key))
                    self._indexed.append((table, key, item, f"{name}.{key}"))
                    yield from ((f, f"{name}.{key}") for f in functions)
                    if not functions and origin == "user":
                        yield item, f"{name}.{key}"

    def _whole_class(self, kind: type) -> Iterator[Child]:
        for base in kind.__mro__:
            if _is_the_users_own(base.__module__):
                for name, item in tuple(vars(base).items()):
                    functions = _functions_of(item)
                    yield from ((f, f"{base.__qualname__}.{name}") for f in functions)
                    if not functions and not name.startswith("__"):
                        yield from self._attribute(base, name, f"{base.__qualname__}.{name}")

    def _function(self, function: types.FunctionType, path: str) -> Iterator[Child]:
        seen = self._seen
        code = function.__code__
        yield from self._table(function.__dict__, path, self._mentioned(type(function)) if seen is not None else None)
        if (seen is not None and not seen.ran(code)) or origin_of_module(function.__module__ or "") == "takeback":
            return
        self._functions.add(id(code))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
            self._attributes.append((cell, "cell_contents", content, f"variable {name!r} of {path}"))
            yield content, f"variable {name!r} of {path}"
        self._attributes.append((function, "__code__", code, f"the code of {path}"))
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name) is not None:
                yield from self._attribute(function, name, f"the defaults of {path}")
        if seen is None and _is_the_users_own(function.__module__ or ""):
            for name in sorted(_all_globals(code)):
                item = function.__globals__.get(name, _MISSING)
                where = f"global {name!r} read by {path}"
                if _is(item, types.ModuleType):
                    yield from self._module(item, mentioned(code), where)
                elif item is not _MISSING:
                    self._items.append((function.__globals__, name, item, where))
                    yield item, where

    def _cached(self, function: Any, path: str) -> Iterator[Child]:
        """A function whose results are remembered: it need not have run to be read."""
        if isinstance(function, types.FunctionType) and self._seen is not None:
            self._seen.codes.setdefault(id(function.__code__), (function.__code__, function.__globals__))
            yield from self._globals_read_by(function.__code__, function.__globals__)
        yield function, path

    def _module(self, module: types.ModuleType, names: Collection[str], path: str) -> Iterator[Child]:
        """`config.ALPHA`: what a function names of a module. Of libraries only that functions are what they were."""
        users = origin_of_module(module.__name__) == "user"
        table = vars(module)
        if users:
            self._tables.append((table, frozenset(table), frozenset(names), module.__name__))
        for name in sorted(set(names) & table.keys()):
            item = table[name]
            where = f"{module.__name__}.{name}"
            if _is(item, types.ModuleType):
                if item.__name__.startswith(module.__name__ + ".") and id(item) not in self._ids:
                    self._ids.add(id(item))
                    yield from self._module(item, names, where)
            elif users or callable(item):
                self._items.append((table, name, item, where))
                if users:
                    yield item, where

    def hold_(self, before: Assumptions, tensors: Collection[torch.Tensor]) -> None:
        """Holds what an earlier look has come across in the bytes of these tensors, which the step used, and this one
        has not."""
        used = {t.untyped_storage()._cdata for t in tensors}
        known = {id(t) for t in self.tensors}
        strided = (t for t in before.tensors if t.layout is torch.strided and id(t) not in known)
        found = {id(t): t for t in strided if t.untyped_storage()._cdata in used}
        if wanted := found.keys():
            self._fast = None
            self.tensors += found.values()
            self._items += [place for place in before._items if id(place[2]) in wanted]
            self._indexed += [place for place in before._indexed if id(place[2]) in wanted]
            self._attributes += [place for place in before._attributes if id(place[2]) in wanted]

    # -- comparing ---------------------------------------------------------------------------------------------

    def places(self) -> set[Place]:
        """Where this looks."""
        found: set[Place] = {(id(container), key) for container, key, _, _ in (*self._items, *self._indexed)}
        found |= {(id(container), path) for container, path, _, _ in self._given}
        found |= {(id(container), name) for container, name, _, _ in self._attributes} | self._of_classes
        for table in (self._lengths, self._orders, self._sets, self._arrays, self._drawers):
            found |= {(id(container), None) for container, _, _ in table}
        return found

    def change(self, within: set[Place] | None = None, but: Collection[Place] = ()) -> str | None:
        """None while everything is as it was; else what changed, from what to what. `within`: only these places; `but`:
        not these numbers."""
        for container, key, value, path in self._given:  # first, as this tells plans apart
            now = dict.get(container, key, _MISSING)
            if now is not value and not _equal(now, value) and _counts((id(container), key), within, but):
                return _said(path, value, now)
        if within is None and not but and self._is_the_very_same():
            return None
        if any(self._containers):
            for container, reads, path in self._empty:
                for name in container if isinstance(container, dict) else range(len(container)):
                    places = (id(container), name), (id(container), None)
                    if (reads is None or name in reads) and (within is None or not within.isdisjoint(places)):
                        return f"{path} had no entries and now has {len(container)}"
        for container, size, path in self._lengths:
            if len(container) != size and (within is None or (id(container), None) in within):
                return f"{path} had {size} entries and now has {len(container)}"
        for mapping, order, path in self._orders:
            if tuple(dict.keys(mapping)) != order and (within is None or (id(mapping), None) in within):
                return f"the entries of {path} are in another order"
        for place in self._numbers:
            if type(now := place.read()) is not type(place.then):
                return _said(place.path, place.then, now)
        for value, kind, table, path in self._types:
            if type(value) is not kind:
                return f"{path} was a {kind.__qualname__} and is now a {type(value).__qualname__}"
            if table is not None and _dict_of(value) is not table:
                return f"{path} has got another __dict__"
        get = dict.get  # whatever a subclass makes of it
        for container, key, value, path in self._items:
            now = get(container, key, _MISSING)
            if now is not value and not _equal(now, value) and _counts((id(container), key), within, but):
                return _said(path, value, now)
        for container, key, value, path in self._indexed:
            try:
                now = container[key]
            except (IndexError, KeyError):
                now = _MISSING
            if now is not value and not _equal(now, value) and _counts((id(container), key), within, but):
                return _said(path, value, now)
        for container, name, value, path in self._attributes:
            now = _get(container, name)
            if now is not value and not _equal(now, value) and _counts((id(container), name), within, but):
                return _said(path, value, now)
        for table, keys, reads, path in self._tables:
            if table.keys() != keys:
                for name in table.keys() - keys:
                    if (reads is None or name in reads) and (within is None or (id(table), name) in within):
                        return _said(f"{path}.{name}", _MISSING, table[name])
        for function, value, path in self._calls if within is None else ():
            now = function()
            if now is not value and not _equal(now, value):
                return _said(path, value, now)
        for held, content, path in self._arrays:
            if _content(held) != content and (within is None or (id(held), None) in within):
                return f"{path} (a {type(held).__name__}) holds other numbers"
        for members, then, path in self._sets:
            if then != members and (within is None or (id(members), None) in within):
                return f"{path} has other members"
        return None

    def _is_the_very_same(self) -> bool:
        """Whether in every place is the very object that was there. A quick look, made before every replay: False says
        that a closer one is needed."""
        fast = self._fast = self._fast or _Identities.of(self._items, self._indexed, self._attributes)
        same = operator.is_
        try:  # all of it in C: this is what a steady step spends on its assumptions
            found = itertools.chain.from_iterable(map(operator.call, fast.getters, fast.containers))
            if not all(map(same, found, fast.values)):
                return False
            if not all(map(same, map(getattr, fast.owners, fast.names), fast.attributes)):
                return False
            if any(map(operator.contains, *fast.absent)):
                return False
        except Exception:
            return False
        if any(self._containers) or any(len(c) != size for c, size, _ in self._lengths):
            return False
        dict_of = object.__getattribute__
        for value, kind, table, _ in self._types:
            if type(value) is not kind or (table is not None and dict_of(value, "__dict__") is not table):
                return False
        tables, orders = self._table_orders()
        if any(map(operator.ne, map(tuple, tables), orders)):
            return False
        rest = self._orders or self._calls or self._arrays or self._sets or self._numbers or fast.others
        return not rest or self._rest_is_the_same(fast.others)

    def _table_orders(self) -> tuple[list[Any], list[tuple[str, ...]]]:
        """Every `__dict__`, and the names in it in order: compared so, they take a fraction of a comparison of sets."""
        if self._ordered is None:
            unique = {id(table): (table, keys) for table, keys, _, _ in self._tables}
            if any(table.keys() != keys for table, keys, _, _ in self._tables):
                return [{}], [("",)]  # one has changed since it was looked at
            tables = [table for table, _ in unique.values()]
            self._ordered = (tables, [tuple(table) for table in tables])
        return self._ordered

    def _rest_is_the_same(self, others: Sequence[tuple[Any, Any, object, str]]) -> bool:
        """What is not compared by identity, or not in a plain dict, list or tuple."""
        return (
            all(dict.get(c, k, _MISSING) is v if _is(c, dict) else c[k] is v for c, k, v, _ in others)
            and all(tuple(dict.keys(mapping)) == order for mapping, order, _ in self._orders)
            and all(type(place.read()) is type(place.then) for place in self._numbers)
            and all(function() is value for function, value, _ in self._calls)
            and all(_content(held) == content for held, content, _ in self._arrays)
            and all(then == members for members, then, _ in self._sets)
        )

    @property
    def leaves_out(self) -> bool:
        """Whether something that the step is given or can reach is not compared, since it decides nothing."""
        return bool(self._numbers or self._unread)

    def varying(self) -> Varying:
        """The places of numbers that are others now, and the values of the batch, if the numbers can be written and
        nothing else has changed. With them those that have changed before."""
        found = []
        lists = ((False, self._given), (False, self._items), (False, self._indexed), (True, self._attributes))
        for is_attribute, places in lists:
            for container, key, value, path in places:
                if type(value) not in NUMBERS:
                    continue
                assert isinstance(value, float)
                place = NumberPlace(container, key, is_attribute, value, path)
                if type(now := place.read()) is type(value) and not _equal(now, value):
                    found.append(place)
        unique = {place.place: place for place in found}
        given = {(id(c), k): k for c, k, then, _ in self._given if _is_other_value(c.get(k), then)}
        if any(_is(p.container, tuple | types.MappingProxyType) for p in unique.values()):
            return Varying()
        if not (unique or given) or self.change(but={*unique, *given}) is not None:
            return Varying()
        return Varying((*self._numbers, *unique.values()), (*self._unread, *given.values()))

    def leave_out_(self, varying: Varying, values: Sequence[float]) -> None:
        """These numbers, which had such values, are read anew in each step: they must be numbers, whichever. The values
        of the batch may be any."""
        places = varying.numbers
        self._numbers = tuple(replace(place, then=value) for place, value in zip(places, values, strict=True))
        self._unread = varying.given
        self._fast = None
        out = {place.place for place in places}
        self._given = [p for p in self._given if (id(p[0]), p[1]) not in out and p[1] not in varying.given]
        self._items = [p for p in self._items if (id(p[0]), p[1]) not in out]
        self._indexed = [p for p in self._indexed if (id(p[0]), p[1]) not in out]
        self._attributes = [p for p in self._attributes if (id(p[0]), p[1]) not in out]

    def displaced(self) -> list[TensorPlace]:
        """Places where the step read another tensor than is there now."""
        found = []
        for is_attribute, places in ((False, self._items), (False, self._indexed), (True, self._attributes)):
            get = _get if is_attribute else _get_item
            for container, key, value, path in places:
                if _is(value, torch.Tensor) and get(container, key) is not value:
                    found.append(TensorPlace(container, key, is_attribute, value, path))
        return found

    def drawn(self, within: set[Place]) -> str | None:
        """Something that gives another value each time it is asked, and was asked since; a replay would not ask."""
        return next(
            (path for d, state, path in self._drawers if (id(d), None) in within and _drawer_state(d) != state), None
        )

    def iterator(self) -> str | None:
        """An iterator that the step reads from, of which nobody can say whether it went on."""
        return next((path for _, state, path in self._drawers if state is _UNKNOWN), None)

    def restore_(self, within: set[Place] | None = None) -> None:
        """Puts back every place that changed, after a recording that is refused."""
        for container, _, _ in self._empty:
            for name in list(container) if isinstance(container, dict) else ():
                if within is None or (id(container), name) in within:
                    del container[name]
            if isinstance(container, list) and container and (within is None or (id(container), 0) in within):
                container.clear()
        for container, size, _ in self._lengths:
            if within is None or (id(container), None) in within:
                if isinstance(container, list) and len(container) > size:
                    del container[size:]
                elif isinstance(container, dict):
                    for key in list(container)[size:]:  # what the step has added comes last
                        del container[key]
        for table, keys, _, _ in self._tables:
            for name in [n for n in table if n not in keys] if isinstance(table, dict) else ():
                if within is None or (id(table), name) in within:
                    del table[name]
        for container, key, value, _ in self._items:
            if key in container and (within is None or (id(container), key) in within):
                dict.__setitem__(container, key, value)
        for container, key, value, _ in self._indexed:
            if isinstance(container, list | collections.deque) and (within is None or (id(container), key) in within):
                container[key] = value
        for held, content, _ in self._arrays:
            if _content(held) != content and (within is None or (id(held), None) in within):
                _put_back_(held, content)
        for container, name, value, _ in self._attributes:
            if _get(container, name) is not value and (within is None or (id(container), name) in within):
                setattr(container, name, value)


@dataclass(frozen=True)
class _Identities:
    """Places in columns, those of one container side by side: what is in each is fetched and compared in one go."""

    getters: tuple[Callable[[Any], tuple[Any, ...]], ...]
    containers: tuple[Any, ...]
    values: tuple[object, ...]  #: of all getters, one after the other
    owners: tuple[Any, ...]  #: of attributes
    names: tuple[str, ...]
    attributes: tuple[object, ...]
    absent: tuple[tuple[Any, ...], tuple[Any, ...]]  #: containers and keys where nothing was
    others: tuple[tuple[Any, Any, object, str], ...]  #: in containers with a way of their own

    @classmethod
    def of(
        cls,
        items: Sequence[tuple[Any, Any, object, str]],
        indexed: Sequence[tuple[Any, Any, object, str]],
        attributes: Sequence[tuple[Any, str, object, str]],
    ) -> _Identities:
        grouped: dict[int, list[tuple[Any, Any, object, str]]] = {}
        others: list[tuple[Any, Any, object, str]] = []
        absent: list[tuple[Any, Any]] = []
        for place in itertools.chain(items, indexed):
            if place[2] is _MISSING:
                absent.append(place[:2])
                continue
            plain = type(place[0]) in (dict, list, tuple, types.MappingProxyType)
            (grouped.setdefault(id(place[0]), []) if plain else others).append(place)
        getters: list[Any] = []
        values: list[object] = []
        for places in grouped.values():
            # Of one key alone an itemgetter gives no tuple: it is asked for twice.
            twice = places if len(places) > 1 else places * 2
            getters.append(operator.itemgetter(*(key for _, key, _, _ in twice)))
            values += [value for _, _, value, _ in twice]
        return cls(
            getters=tuple(getters),
            containers=tuple(places[0][0] for places in grouped.values()),
            values=tuple(values),
            owners=tuple(owner for owner, _, _, _ in attributes),
            names=tuple(name for _, name, _, _ in attributes),
            attributes=tuple(value for _, _, value, _ in attributes),
            absent=(tuple(container for container, _ in absent), tuple(key for _, key in absent)),
            others=tuple(others),
        )


class _Relevant(frozenset[str]):
    """Names of attributes of a class: besides those that were read, every one that Python asks for by itself."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name in _SPECIAL)


_SPECIAL = frozenset(
    (
        *("__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__", "__bool__", "__eq__"),
        *("__contains__", "__enter__", "__exit__", "__add__", "__mul__", "__matmul__", "__float__", "__int__"),
    )
)


@functools.cache
def _all_globals(code: types.CodeType) -> frozenset[str]:
    """The globals that a function names, inner functions and comprehensions included."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return globals_named(code).union(*(_all_globals(c) for c in inner))


def _is_the_users_own(module_name: str) -> bool:
    return origin_of_module(module_name) == "user" and not is_installed(module_name)


def _functions_of(item: Any) -> tuple[types.FunctionType, ...]:
    """The functions in a class's table: methods, and what properties and the like are made of."""
    if _is(item, property):
        found: tuple[Any, ...] = (item.fget, item.fset)
    elif _is(item, staticmethod | classmethod):
        found = (item.__func__,)
    elif _is(item, functools.cached_property):
        found = (item.func,)
    else:
        found = (item,)
    return tuple(f for f in found if _is(f, types.FunctionType))


def _is_looked_into(kind: type) -> bool:
    return issubclass(kind, torch.nn.Module) or kind.__module__.startswith("torch.distributions")


def _is(value: object, kinds: Any) -> bool:
    """isinstance() without asking the object, which may answer with an exception."""
    return issubclass(type(value), kinds)


def _get(value: object, name: str) -> object:
    """An attribute, or `_MISSING`, whatever the class raises where there is none."""
    try:
        return getattr(value, name)
    except Exception:
        return _MISSING


def _get_item(container: Any, key: Any) -> object:
    """An entry, or `_MISSING`."""
    try:
        return dict.get(container, key, _MISSING) if _is(container, dict) else container[key]
    except (IndexError, KeyError):
        return _MISSING


def _dict_of(value: object) -> dict[str, Any] | None:
    """`__dict__` as it is, past what the class makes of attributes."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [s for s in found if s not in ("__dict__", "__weakref__")]


_UNKNOWN = object()


def _drawer_state(value: Any) -> object:
    """Where something stands that gives another value each time it is asked; None if it is no such thing."""
    kind: Any = type(value)
    if issubclass(kind, random.Random):
        return value.getstate()
    if issubclass(kind, np.random.Generator):
        return repr(value.bit_generator.state)
    if issubclass(kind, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if issubclass(kind, itertools.count):
        return repr(value)
    if issubclass(kind, types.GeneratorType):
        frame = value.gi_frame
        return repr((frame.f_lasti, frame.f_locals)) if frame is not None else "finished"
    if not hasattr(kind, "__next__"):
        return None
    if hasattr(kind, "__length_hint__"):
        return operator.length_hint(value)
    return _UNKNOWN if kind.__module__ in ("builtins", "itertools") else None  # of others the attributes are seen


def _content(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytearray) else bytes(value.tobytes())


def _put_back_(value: Any, content: bytes) -> None:
    if isinstance(value, np.ndarray):
        value[...] = np.frombuffer(content, value.dtype).reshape(value.shape)
    else:
        memoryview(value).cast("B")[:] = content


def _equal(now: Any, then: Any) -> bool:
    if type(now) is not type(then):
        return False
    if type(now) in NUMBERS:
        return bool(now.hex() == then.hex())
    if type(now) in _VALUES or _is(now, np.generic | enum.Enum | GivenValue):
        return bool(now == then)
    # A bound method is made anew each time it is asked for.
    return _is(now, types.MethodType | types.BuiltinMethodType) and now == then


def _counts(place: Place, within: set[Place] | None, but: Collection[Place]) -> bool:
    return (within is None or place in within) and place not in but


def _said(path: str, then: object, now: object) -> str:
    return f"{path}: {_show(then)} is now {_show(now)}"


def _show(value: Any) -> str:
    if type(value) in _VALUES or _is(value, np.generic | enum.Enum | GivenValue):
        return repr(value)
    if _is(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if _is(value, types.FunctionType):
        return f"the function {value.__qualname__}"
    return "missing" if value is _MISSING else f"a {type(value).__name__}"
