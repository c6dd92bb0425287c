"""The modules that a step can be seen to use beside the model: a discriminator, a teacher, a loss with layers.

In: loss_fn and the model. Out: every module outside of the model that loss_fn's closure, globals, bound object or
arguments lead to, by the name it was found under.
"""

from __future__ import annotations

import collections
import functools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_MOST = 100_000  #: objects that are looked at
_CLOSED = frozenset(("torch", "numpy", *sys.stdlib_module_names))
_PACKAGES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
_OURS = ("takeback.step", "takeback.compiler")  #: a trainer may hold its compiled step


def modules_beside(model: torch.nn.Module, loss_fn: Callable[..., Any]) -> dict[str, torch.nn.Module]:
    """By name, the outermost first. The names are those of variables and attributes."""
    ours = {id(m) for m in model.modules()}
    found: dict[str, torch.nn.Module] = {}
    seen = set(ours)
    pending: collections.deque[tuple[Any, str]] = collections.deque([(loss_fn, "loss_fn")])
    pending.extend((value, name) for m in model.modules() for value, name in _plain_attributes(m))
    while pending and len(seen) < _MOST:
        value, name = pending.popleft()
        if id(value) in seen or _is(value, str | bytes | int | float | torch.Tensor | types.NoneType):
            continue
        seen.add(id(value))
        if _is(value, torch.nn.Module):
            found[name if name not in found else f"{name} ({len(found)})"] = value
            pending.extend((child, f"{name}.{key}") for key, child in value.named_children())
        pending.extend(_inside(value, name))
    return found


def _plain_attributes(module: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    for key, value in vars(module).items():
        if key not in ("_modules", "_parameters", "_buffers"):
            yield value, key
    yield type(module), type(module).__name__


def _inside(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    if _is(value, torch.nn.Module):
        yield from _plain_attributes(value)
    elif _is(value, dict):
        yield from ((item, str(key)) for key, item in list(dict.items(value)))  # a lazy one would import everything
    elif _is(value, list | tuple | set | frozenset | collections.deque):
        yield from ((item, f"{name}[{i}]") for i, item in enumerate(value))
    elif _is(value, functools.partial):
        yield from ((value.func, name), (value.args, name), (value.keywords, name))
    elif _is(value, types.MethodType):
        yield from ((value.__self__, name), (value.__func__, name))
    elif _is(value, types.FunctionType):
        if not _is_closed(value.__module__):
            yield from _function(value)
    elif _is(value, type):
        if not _is_installed(value.__module__):
            yield from ((item, key) for key, item in vars(value).items())
    elif _is(value, property | staticmethod | classmethod):
        yield (value.fget if _is(value, property) else value.__func__), name
    elif not _is(value, types.ModuleType | torch.optim.Optimizer) and not _is_closed(type(value).__module__):
        yield from ((item, key) for key, item in _attributes(value).items())
        yield type(value), name


def _function(function: types.FunctionType) -> Iterator[tuple[Any, str]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, name
        except ValueError:  # not filled yet
            continue
    yield function.__defaults__, function.__name__
    yield function.__kwdefaults__, function.__name__
    if _is_installed(function.__module__):
        return
    names = _names(function.__code__)
    for name in sorted(names):
        item: Any = function.__globals__.get(name)
        if _is(item, types.ModuleType) and not _is_installed(item.__name__):
            yield from ((getattr(item, inner), inner) for inner in sorted(names & vars(item).keys()))
        elif item is not None:
            yield item, name


def _is(value: object, kinds: Any) -> bool:
    """isinstance() without asking the object, which may answer with an exception."""
    return issubclass(type(value), kinds)


def _attributes(value: object) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*(_names(c) for c in inner))


def _is_closed(module_name: object) -> bool:
    if not isinstance(module_name, str) or module_name.startswith(_OURS):
        return True
    return module_name.partition(".")[0] in _CLOSED


@functools.cache
def _is_installed(module_name: str) -> bool:
    """Code of a package: what its functions name are its own globals, and no module of the user's."""
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return _is_closed(module_name) or file.startswith(_PACKAGES)
