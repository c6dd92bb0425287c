"""Looks on while a step is recorded: which Python code runs, and which attributes are read of which objects.

In: the objects whose attributes matter. Out: a `Seen`, from which assumptions.py tells what the step can have read.
Attributes of objects whose class is written in Python are seen one by one, exactly; of everything else the code is
known that ran, and the names it mentions.
"""

from __future__ import annotations

import dis
import functools
import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep
_TAKEBACK = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_COMPILER = os.path.join(_TAKEBACK, "compiler") + os.sep


@functools.cache
def origin_of_file(file: str) -> str:
    """Whose code a file holds: "takeback" (its compiler), "torch", "python" (the standard library, numpy) or "user"."""
    if file.startswith(_COMPILER):
        return "takeback"
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith((_NUMPY, "<frozen ")):
        return "python"
    if file.startswith(_STDLIB) and "site-packages" not in file and "dist-packages" not in file:
        return "python"
    return "user"


@functools.cache
def origin_of_module(name: str) -> str:
    """The same of a module by its name; what has no file is Python's if it is built in, else the user's."""
    top = name.partition(".")[0]
    if top in ("torch", "takeback"):
        return "user" if name.startswith("takeback.zoo") else top
    if top in ("builtins", "numpy", "highspy") or top in sys.builtin_module_names:
        return "python"
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None:
        return origin_of_file(file)
    return "python" if top in sys.stdlib_module_names else "user"


def origin_of_class(kind: type) -> str:
    """The same of a class. One that a library made for somebody (make_dataclass, namedtuple) is not found in there."""
    origin = origin_of_module(kind.__module__) if isinstance(kind.__module__, str) else "user"
    if origin != "python" or not kind.__flags__ & _HEAP_TYPE:
        return origin
    return origin if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind else "user"


@functools.cache
def is_installed(module_name: str) -> bool:
    """Whether a module was installed as a package: its globals are a framework's, not those of a training script."""
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@functools.cache
def mentioned(code: CodeType) -> frozenset[str]:
    """The globals, attributes and short texts that a function's code names, without those of inner functions."""
    found = set(code.co_names)
    pending: list[Any] = list(code.co_consts)
    while pending:
        const = pending.pop()
        if isinstance(const, str):
            found.add(const)
        elif isinstance(const, tuple | frozenset):
            pending.extend(const)
    return frozenset(found)


@functools.cache
def globals_named(code: CodeType) -> frozenset[str]:
    """Of those the globals and imports alone: `out.loss` does not read a global `loss`. A function that asks for
    `globals()` can read any that it has a text for."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
    found = frozenset(str(i.argval) for i in dis.get_instructions(code) if i.opname in loads)
    return found | mentioned(code) if found & {"globals", "eval", "exec"} else found


@dataclass
class Seen:
    """What was seen of one recorded step."""

    codes: dict[int, tuple[CodeType, dict[str, Any]]] = field(default_factory=dict)  #: by id; with their globals
    reads: dict[int, set[str]] = field(default_factory=dict)  #: of each watched object, by id: names of attributes
    unseen: set[type] = field(default_factory=set)  #: classes of watched objects that could not be watched after all

    def ran(self, code: CodeType) -> bool:
        return id(code) in self.codes

    def users_code(self) -> Iterator[tuple[CodeType, dict[str, Any]]]:
        for code, globals_ in self.codes.values():
            if origin_of_file(code.co_filename) == "user":
                yield code, globals_

    @functools.cached_property
    def names(self) -> dict[str, frozenset[str]]:
        """Everything that the code which ran mentions, by whose code it is."""
        found: dict[str, set[str]] = {"user": set(), "torch": set(), "python": set(), "takeback": set()}
        for code, _ in self.codes.values():
            found[origin_of_file(code.co_filename)] |= mentioned(code)
        return {origin: frozenset(names) for origin, names in found.items()}


EVERYTHING = "*"  #: stands among the names that were read where the user's code has taken a whole `__dict__`


def _spied(kind: type, reads: dict[int, set[str]], thread: int) -> Callable[[Any, str], Any]:
    """`__getattribute__` of a class, which notes what is asked of the objects that are watched."""
    original: Any = kind.__getattribute__
    get_ident = threading.get_ident

    def __getattribute__(self: Any, name: str) -> Any:
        known = reads.get(id(self))
        if known is not None and get_ident() == thread:
            known.add(name)
            if name == "__dict__" and origin_of_file(sys._getframe(1).f_code.co_filename) == "user":
                known.add(EVERYTHING)
        return original(self, name)

    return __getattribute__


def can_be_spied(kind: type) -> bool:
    """Whether reads of its objects' attributes can be seen: a class written in Python, neither torch's nor Python's."""
    if not kind.__flags__ & _HEAP_TYPE or origin_of_class(kind) != "user":
        return False
    return not issubclass(kind, torch.Tensor | type | BaseException)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE

#: One recording at a time changes classes; another thread's waits here.
_classes = threading.RLock()


class Onlooker:
    """Sees what runs and is read on this thread while it is entered. `objects` are watched, and must outlive it."""

    def __init__(self, objects: Iterable[object]) -> None:
        watched = [o for o in objects if can_be_spied(type(o))]
        self.seen = Seen(reads={id(o): set() for o in watched})
        self._kinds = tuple(dict.fromkeys(map(type, watched)))
        self._changed: list[tuple[type, object]] = []
        self._previous: Any = None
        self._looking = False
        self._collecting = False  # garbage: what Python runs then (callbacks, finalizers) is not the step's
        self._thread = 0

    def __enter__(self) -> Onlooker:
        _classes.acquire()
        self._looking = True
        self._previous = sys.getprofile()
        thread = self._thread = threading.get_ident()
        gc.callbacks.insert(0, self._collection_begins)
        gc.callbacks.append(self._collection_ends)
        spies = [(kind, _spied(kind, self.seen.reads, thread)) for kind in self._kinds]
        for kind, spy in spies:
            self._changed.append((kind, vars(kind).get("__getattribute__")))
            try:
                kind.__getattribute__ = spy  # type: ignore[method-assign, assignment]
            except (TypeError, AttributeError):  # a metaclass that allows no changes: the code's names must do
                self._changed.pop()
                self._blind_(kind)
        codes = self.seen.codes
        other = self._previous if callable(self._previous) else None  # somebody looks on already: he goes on

        def note(frame: FrameType, event: str, arg: object) -> None:
            if event == "call" and not self._collecting:
                code = frame.f_code
                if id(code) not in codes:
                    codes[id(code)] = (code, frame.f_globals)
            if other is not None:
                other(frame, event, arg)

        sys.setprofile(note)
        return self

    def _collection_begins(self, phase: str, info: object) -> None:
        if phase == "start" and threading.get_ident() == self._thread:
            self._collecting = True

    def _collection_ends(self, phase: str, info: object) -> None:
        if phase == "stop" and threading.get_ident() == self._thread:
            self._collecting = False

    def _blind_(self, kind: type) -> None:
        self.seen.unseen.add(kind)

    def __exit__(self, *error: object) -> None:
        self.stop_()

    def stop_(self) -> None:
        """Puts everything back; as often as it is called, for an interrupt may have cut one call short."""
        if not self._looking:
            return
        if self._previous is None or callable(self._previous):
            sys.setprofile(self._previous)
        else:  # cProfile's, up to Python 3.11, which cannot be given to setprofile
            self._previous.enable()
        for callback in (self._collection_begins, self._collection_ends):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)
        for kind, own in self._changed:
            if own is not None:
                kind.__getattribute__ = own  # type: ignore[method-assign, assignment]
            elif "__getattribute__" in vars(kind):
                del kind.__getattribute__
        self._looking = False
        _classes.release()
