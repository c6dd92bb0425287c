"""Tells whether a function keeps nothing between its calls, and depends on its arguments and random numbers alone.

In: a function written in Python. Out: why it may depend on more, or None. It is read, not run: what it names, and what
the functions that it names name, must be functions of the same kind, modules of Python's, numpy or torch, or values
that cannot change; and it writes nothing that outlives it. What cannot be told counts as state.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

import numpy as np
import torch

from takeback.compiler.capture.ran import origin_of_class, origin_of_module

_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME", "YIELD_VALUE")
_REFLECTS = frozenset(
    ("globals", "locals", "vars", "setattr", "delattr", "exec", "eval", "open", "input", "iter", "next", "__import__")
)
_UNCHANGING = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    range,
    torch.dtype,
    torch.device,
    np.dtype,
    np.generic,
)


def state_of(function: FunctionType, known: frozenset[FunctionType] = frozenset()) -> str | None:
    """What it may keep, or look at, besides its arguments; None if nothing is found. `known` are being looked at."""
    if function in known:
        return None
    name = function.__qualname__
    if function.__code__.co_freevars:
        return f"{name} is a closure"
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if not _never_changes(default):
            return f"{name} has a default of type {type(default).__name__}"
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in _WRITES:
                return f"{name} writes {step.argval!s}" if step.opname != "YIELD_VALUE" else f"{name} is a generator"
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found = _of_global(function, str(step.argval), known | {function})
                if found is not None:
                    return found
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """With those of the functions and comprehensions inside."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _of_global(function: FunctionType, name: str, known: frozenset[FunctionType]) -> str | None:
    if name not in function.__globals__:
        hidden = name in _REFLECTS or not hasattr(builtins, name)
        return f"{function.__qualname__} uses {name}" if hidden else None
    value = function.__globals__[name]
    if isinstance(value, FunctionType):
        return None if origin_of_module(value.__module__) in ("torch", "python") else state_of(value, known)
    if isinstance(value, ModuleType):
        harmless = origin_of_module(value.__name__) in ("torch", "python")
    elif isinstance(value, type):
        harmless = origin_of_class(value) in ("torch", "python")
    elif isinstance(value, BuiltinFunctionType):
        harmless = getattr(value, "__self__", None) is None or isinstance(value.__self__, ModuleType)
    else:
        harmless = _never_changes(value)
    return None if harmless else f"{function.__qualname__} uses {name}, a {type(value).__name__}"


def _never_changes(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_never_changes, value))
    return isinstance(value, _UNCHANGING)
