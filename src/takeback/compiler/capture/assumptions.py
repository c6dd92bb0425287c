"""What a plan assumes of the Python world: every value reachable from the model and loss_fn is as it was recorded.

In: the objects a step can read. Out: `Assumptions`, a flat list of places (how to read it, the value it had), compared
before every replay. A place that changes *during* the recording means that the step keeps state in Python, which a
replay would drop; it is named.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import itertools
import operator
import random
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from takeback.compiler.capture.hooks import MODULE_HOOKS

_SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None), np.generic, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format),
)
_MOST_ARRAY_BYTES = 16 << 20  #: of one numpy array; larger ones are held by identity only
_NOT_WALKED = frozenset(
    (
        *MODULE_HOOKS,
        "_is_full_backward_hook",
        "_non_persistent_buffers_set",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_compiled_call_impl",
    )
)
#: Objects of these are not looked into; of these and of Python's own library, neither is the code.
_OPAQUE = frozenset(
    ("torch", "numpy", "threading", "logging", "io", "_io", "asyncio", "concurrent", "multiprocessing", "subprocess")
)
#: Of takeback's own: what these keep never goes into a step, for while one is recorded they keep nothing.
_OURS = ("takeback.workspace", "takeback.norm_cache", "takeback.nn.owner", "takeback.nn.invert")
_CODE_NOT_READ = _OPAQUE | {"transformers"}
_STDLIB = sysconfig.get_paths()["stdlib"]
_MOST_PLACES = 1_000_000
_MOST_ENTRIES = 10_000  #: of one container; a larger one is data: held by identity and length
_MISSING = object()

Child = tuple[object, str]


def _is_opaque(module_name: object) -> bool:
    if not isinstance(module_name, str) or module_name.startswith("torch.distributions"):
        return not isinstance(module_name, str)
    return module_name.partition(".")[0] in _OPAQUE or module_name.startswith(_OURS)


def _is_library_code(module_name: object) -> bool:
    if not isinstance(module_name, str) or module_name.partition(".")[0] in _CODE_NOT_READ:
        return True
    if module_name.startswith(_OURS):
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None:
        return module_name.partition(".")[0] in sys.builtin_module_names
    return file.startswith(_STDLIB) and "site-packages" not in file


class Assumptions:
    """Every Python value a step can read, as it was when this was made."""

    def __init__(self, **roots: object) -> None:
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self._items: list[tuple[Any, Any, object, str]] = []  # container[key] was value
        self._attributes: list[tuple[Any, str, object, str]] = []  # getattr(container, key) was value
        self._lengths: list[tuple[Any, int, str]] = []
        self._sets: list[tuple[Any, frozenset[object], str]] = []
        self._hooks: list[tuple[dict[int, object], str]] = []
        self._named: set[str] = set()  # what the user's functions name
        self._training: list[tuple[Any, str]] = []
        self._arrays: list[tuple[Any, bytes, str]] = []
        self._drawers: list[tuple[Any, object, str]] = []  # random number generators that are not torch's
        seen: set[int] = set()
        pending = collections.deque((value, name) for name, value in roots.items())
        while pending and len(self._items) < _MOST_PLACES:
            value, path = pending.popleft()
            if id(value) not in seen and not isinstance(value, _SCALARS):
                seen.add(id(value))
                pending.extend(self._children(value, path))
            if not pending:
                pending.extend(self._schedules())

    def _schedules(self) -> Iterator[Child]:
        """An optimizer or scheduler changes in every step, and a Trainer holds both: only what is named is read."""
        names = self._named | ({"_last_lr"} if "get_last_lr" in self._named else set())
        for value, path in self._training:
            for name in sorted(names & vars(value).keys()):
                yield from self._attribute(value, name, f"{path}.{name}")
        self._training = []

    # -- finding places ----------------------------------------------------------------------------------------

    def _children(self, value: Any, path: str) -> Iterator[Child]:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            yield from self._mapping(vars(value), path, "{}.{}")
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, dict | list | tuple | collections.deque) and len(value) > _MOST_ENTRIES:
            self._lengths.append((value, len(value), path))
        elif isinstance(value, dict):
            self._lengths.append((value, len(value), path))
            yield from self._mapping(value, path, "{}[{!r}]")
        elif isinstance(value, list | tuple | collections.deque):
            self._lengths.append((value, len(value), path))
            yield from self._mapping(dict(enumerate(value)), path, "{}[{!r}]", container=value)
        elif isinstance(value, set | frozenset):
            self._sets.append((value, frozenset(value), path))
        elif isinstance(value, functools.partial):
            yield from ((value.func, path), (value.args, f"{path}.args"), (value.keywords, f"{path}.keywords"))
        elif isinstance(value, types.MethodType):
            yield from ((value.__self__, path), (value.__func__, path))
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, path)
        elif isinstance(value, type):
            yield from self._class(value, path)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_ARRAY_BYTES:
                self._arrays.append((value, value.tobytes(), path))
        elif (state := _drawer_state(value)) is not None:
            self._drawers.append((value, state, path))
        elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            yield from self._instance(value, path)

    def _mapping(
        self,
        mapping: dict[Any, Any],
        path: str,
        form: str,
        *,
        container: Any = None,
        skip: frozenset[str] = frozenset(),
    ) -> Iterator[Child]:
        for key, item in mapping.items():
            if key not in skip:
                name = form.format(path, key)
                self._items.append((mapping if container is None else container, key, item, name))
                yield item, name

    def _instance(self, value: Any, path: str) -> Iterator[Child]:
        attributes = _get(value, "__dict__")
        if isinstance(value, torch.nn.Module) and isinstance(attributes, dict):
            tables = ("_parameters", "_buffers", "_modules")
            yield from self._mapping(attributes, path, "{}.{}", skip=_NOT_WALKED | set(tables))
            self._lengths.append((attributes, len(attributes), path))
            self._hooks += [(attributes[kind], f"{kind[1:]} of {path}") for kind in MODULE_HOOKS]
            for table in tables:
                self._lengths.append((attributes[table], len(attributes[table]), f"{path}.{table}"))
                yield from self._mapping(attributes[table], path, "{}.{}")
        elif isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            self._training.append((value, path))
        elif not _is_opaque(type(value).__module__):
            if isinstance(attributes, dict):
                self._lengths.append((attributes, len(attributes), path))
                yield from self._mapping(attributes, path, "{}.{}")
            for slot in _slots(type(value)):
                yield from self._attribute(value, slot, f"{path}.{slot}")
        yield type(value), type(value).__name__

    def _attribute(self, container: Any, name: str, path: str) -> Iterator[Child]:
        item = _get(container, name)
        if item is not _MISSING:
            self._attributes.append((container, name, item, path))
            yield item, path

    def _class(self, value: type, path: str) -> Iterator[Child]:
        """A class of the user's: its attributes are read through its instances, its functions read globals."""
        for base in value.__mro__:
            if _is_library_code(base.__module__):
                continue
            for name, item in tuple(vars(base).items()):
                if isinstance(item, types.FunctionType):
                    yield item, f"{base.__name__}.{name}"
                elif isinstance(item, property | staticmethod | classmethod):
                    function = item.fget if isinstance(item, property) else item.__func__
                    yield function, f"{base.__name__}.{name}"
                elif not name.startswith("__"):
                    yield from self._attribute(base, name, f"{base.__name__}.{name}")

    def _function(self, function: types.FunctionType, path: str) -> Iterator[Child]:
        if _is_library_code(function.__module__):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
            self._attributes.append((cell, "cell_contents", content, f"variable {name!r} of {path}"))
            yield content, f"variable {name!r} of {path}"
        for name in ("__defaults__", "__kwdefaults__"):
            yield from self._attribute(function, name, f"the defaults of {path}")
        self._lengths.append((function.__dict__, len(function.__dict__), path))
        yield from self._mapping(function.__dict__, path, "{}.{}")
        self._named |= _names(function.__code__)
        for name in sorted(_globals(function.__code__)):
            item = function.__globals__.get(name, sys.modules.get(name, _MISSING))  # or imported inside the function
            if isinstance(item, types.ModuleType):
                if not _is_library_code(item.__name__):
                    yield from self._module(item, function.__code__)
            elif item is not _MISSING and not isinstance(item, types.BuiltinFunctionType):
                self._items.append((function.__globals__, name, item, f"global {name!r} read by {path}"))
                yield item, f"global {name!r} read by {path}"

    def _module(self, module: types.ModuleType, code: types.CodeType) -> Iterator[Child]:
        """`config.ALPHA`: what a function names of a module of the user's."""
        for name in sorted(_names(code)):
            item = getattr(module, name, None)
            if not isinstance(item, types.ModuleType):
                yield from self._attribute(module, name, f"{module.__name__}.{name}")
            elif not _is_library_code(item.__name__) and item.__name__.startswith(module.__name__ + "."):
                yield from self._module(item, code)

    # -- comparing ---------------------------------------------------------------------------------------------

    def change(self) -> str | None:
        """None while everything is as it was; else what changed, from what to what."""
        for table, path in self._hooks:
            if table:
                return f"{path} is not empty any more"
        for container, size, path in self._lengths:
            if len(container) != size:
                return f"{path} had {size} entries and now has {len(container)}"
        for container, key, value, path in self._items:
            try:
                now = container[key]
            except (KeyError, IndexError):
                return f"{path} is gone"
            if now is not value and not _equal(now, value):
                return f"{path} was {_show(value)} and is now {_show(now)}"
        for container, name, value, path in self._attributes:
            now = _get(container, name)
            if now is not value and not _equal(now, value):
                return f"{path} was {_show(value)} and is now {_show(now)}"
        for array, content, path in self._arrays:
            if array.tobytes() != content:
                return f"{path} (a numpy array) holds other numbers"
        for container, members, path in self._sets:
            if members != container:
                return f"{path} has other members"
        return None

    def drawn(self) -> str | None:
        """A random number generator of Python's or numpy's that was used since; a replay would not draw again."""
        return next((path for drawer, state, path in self._drawers if _drawer_state(drawer) != state), None)

    def restore_(self) -> None:
        """Puts back every place that changed, after a recording that is refused."""
        for container, size, _ in self._lengths:
            if isinstance(container, list) and len(container) > size:
                del container[size:]
            elif isinstance(container, dict):
                for key in list(container)[size:]:  # what the step has added comes last
                    del container[key]
        for container, key, value, _ in self._items:
            if not isinstance(container, tuple) and (key in container if isinstance(container, dict) else True):
                container[key] = value
        for array, content, _ in self._arrays:
            if array.tobytes() != content:
                array[...] = np.frombuffer(content, array.dtype).reshape(array.shape)
        for container, name, value, _ in self._attributes:
            if _get(container, name) is not value:
                setattr(container, name, value)


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Every global or attribute that a function's code names, inner functions and comprehensions included."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*(_names(c) for c in inner))


@functools.cache
def _globals(code: types.CodeType) -> frozenset[str]:
    """Of those the globals and imports alone: `out.loss` does not read a global `loss`."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
    own = frozenset(str(i.argval) for i in dis.get_instructions(code) if i.opname in loads)
    return own.union(*(_globals(c) for c in inner))


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [s for s in found if s not in ("__dict__", "__weakref__")]


def _get(container: object, name: str) -> Any:
    """An attribute, or `_MISSING`, also where a `__getattr__` of the user's raises something else than it should."""
    try:
        return getattr(container, name, _MISSING)
    except Exception:
        return _MISSING


def _drawer_state(value: object) -> object:
    """Where something stands that gives another value each time it is asked; None if it is no such thing."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return repr((frame.f_lasti, frame.f_locals)) if frame is not None else "finished"
    if hasattr(type(value), "__next__") and hasattr(type(value), "__length_hint__"):
        return operator.length_hint(value)
    return None


def _equal(now: object, then: object) -> bool:
    if type(now) is not type(then) or not isinstance(now, _SCALARS):
        return False
    return now.hex() == then.hex() if isinstance(now, float) and isinstance(then, float) else bool(now == then)


def _show(value: object) -> str:
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "missing" if value is _MISSING else f"a {type(value).__name__}"
