"""Holds what a recording baked in: the Python values reachable from the model and from loss_fn.

In: the objects a step can read. Out: a `Guard`, a flat list of slots (container, key, value) that is compared before
every replay. A slot that changes *during* the recording means that the step keeps state in Python, which a replay
would drop; the guard names it.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    enum.Enum,
)
_OPAQUE = (types.ModuleType, type, types.BuiltinFunctionType, torch.Generator, torch._ops.OpOverload)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_WALKED = frozenset(
    (
        *_HOOKS,
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
_MOST_SLOTS = 100_000
_MISSING = object()


def _is_library(module_name: str | None) -> bool:
    return module_name is None or module_name.partition(".")[0] in (
        "torch",
        "builtins",
        "functools",
        "typing",
    )


class Guard:
    """Every Python value a step can read, as it was when the guard was made."""

    def __init__(self, **roots: object) -> None:
        self._items: list[tuple[Any, Any, object, str]] = []  # container, key, value, path
        self._lengths: list[tuple[Any, int, str]] = []
        self._cells: list[tuple[types.CellType, object, str]] = []
        self.tensors: list[torch.Tensor] = []
        self._hooks: list[tuple[dict[int, object], str]] = []
        self.complete = True
        self._seen: set[int] = set()
        pending = collections.deque((value, name) for name, value in roots.items())
        while pending:
            value, path = pending.popleft()
            if id(value) in self._seen or isinstance(value, _SCALARS):
                continue
            self._seen.add(id(value))
            if len(self._items) > _MOST_SLOTS:
                self.complete = False
                break
            pending.extend(self._children(value, path))

    def _children(self, value: Any, path: str) -> Iterator[tuple[object, str]]:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, _OPAQUE):
            return
        elif isinstance(value, dict):
            yield from self._mapping(value, path, "{}[{!r}]")
        elif isinstance(value, list | tuple | collections.deque):
            if not isinstance(value, tuple):
                self._lengths.append((value, len(value), path))
            for i, item in enumerate(value):
                self._items.append((value, i, item, f"{path}[{i}]"))
                yield item, f"{path}[{i}]"
        elif isinstance(value, set | frozenset):
            self._lengths.append((value, len(value), path))
        elif isinstance(value, functools.partial):
            yield from (
                (value.func, path),
                (value.args, f"{path}.args"),
                (value.keywords, f"{path}.keywords"),
            )
        elif isinstance(value, types.MethodType):
            yield from ((value.__self__, path), (value.__func__, path))
        elif isinstance(value, types.FunctionType):
            yield from self._function(value, path)
        else:
            yield from self._instance(value, path)

    def _mapping(
        self, mapping: dict[Any, Any], path: str, form: str, skip: frozenset[str] = frozenset()
    ) -> Iterator[tuple[object, str]]:
        self._lengths.append((mapping, len(mapping), path))
        for key, item in mapping.items():
            if key not in skip:
                name = form.format(path, key)
                self._items.append((mapping, key, item, name))
                yield item, name

    def _instance(self, value: Any, path: str) -> Iterator[tuple[object, str]]:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        if isinstance(value, torch.nn.Module):
            own = {k: v for k, v in attributes.items() if k not in ("_parameters", "_buffers", "_modules")}
            for key, item in own.items():
                if key not in _NOT_WALKED:
                    self._items.append((attributes, key, item, f"{path}.{key}"))
                    yield item, f"{path}.{key}"
            self._lengths.append((attributes, len(attributes), path))
            self._hooks += [(attributes[kind], f"{kind[1:]} of {path}") for kind in _HOOKS]
            for table in ("_parameters", "_buffers", "_modules"):
                yield from self._mapping(attributes[table], path, "{}.{}")
            if not _is_library(type(value).__module__):
                yield from self._globals(type(value).forward, f"{type(value).__name__}.forward")
        elif not _is_library(type(value).__module__):
            yield from self._mapping(attributes, path, "{}.{}")

    def _function(self, function: types.FunctionType, path: str) -> Iterator[tuple[object, str]]:
        if _is_library(function.__module__):
            return
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
            self._cells.append((cell, content, f"variable {name!r} of {path}"))
            yield content, f"variable {name!r} of {path}"
        yield from (
            (function.__defaults__ or (), f"{path}'s defaults"),
            (function.__kwdefaults__ or {}, path),
        )
        yield from self._globals(function, path)

    def _globals(self, function: Callable[..., object], path: str) -> Iterator[tuple[object, str]]:
        code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        for name in code.co_names if code is not None else ():
            item = scope.get(name, _MISSING)
            if item is not _MISSING and not isinstance(item, _OPAQUE):
                self._items.append((scope, name, item, f"global {name!r} read by {path}"))
                yield item, f"global {name!r} read by {path}"

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
        for cell, value, path in self._cells:
            now = cell.cell_contents
            if now is not value and not _equal(now, value):
                return f"{path} was {_show(value)} and is now {_show(now)}"
        return None

    def restore_scalars_(self) -> None:
        """Puts back every Python scalar that changed, after a recording that is refused."""
        for container, key, value, _ in self._items:
            if isinstance(value, _SCALARS) and not isinstance(container, tuple):
                try:
                    if container[key] is not value:
                        container[key] = value
                except (KeyError, IndexError):
                    continue
        for cell, value, _ in self._cells:
            if isinstance(value, _SCALARS):
                cell.cell_contents = value


def _equal(now: object, then: object) -> bool:
    return type(now) is type(then) and isinstance(now, _SCALARS) and bool(now == then)


def _show(value: object) -> str:
    if isinstance(value, _SCALARS):
        return repr(value)
    return (
        f"a {type(value).__name__} of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"a {type(value).__name__}"
    )


def hooks_on(model: torch.nn.Module) -> str | None:
    """The first hook that a replay would not call, in words, or None."""
    for kind in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    ):
        if getattr(torch.nn.modules.module, kind, None):
            return f"a global module hook ({kind})"
    for name, module in model.named_modules():
        for kind in _HOOKS:
            table = module.__dict__.get(kind)
            if table:
                hook = next(iter(table.values()))
                return f"{_hook_name(hook)} in {kind[1:]} of module {name or type(model).__name__!r}"
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            table = getattr(parameter, kind, None)
            if table:
                return f"{_hook_name(next(iter(table.values())))} in {kind[1:]} of parameter {name!r}"
    return None


def _hook_name(hook: object) -> str:
    return f"hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
