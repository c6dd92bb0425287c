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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import torch

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep
_TAKEBACK = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_COMPILER = os.path.join(_TAKEBACK, "compiler") + os.sep
OPEN = ("takeback.zoo", "takeback.integrations")  #: of takeback, what runs inside of a step as the user's code does


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
        return "user" if name.startswith(OPEN) else top
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


def can_be_spied(kind: type) -> bool:
    """Whether reads of its objects' attributes can be seen: a class written in Python, neither torch's nor Python's."""
    if not kind.__flags__ & _HEAP_TYPE or origin_of_class(kind) != "user":
        return False
    return not issubclass(kind, torch.Tensor | type | BaseException)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE

_lock = threading.RLock()
_onlookers: tuple[Onlooker, ...] = ()  #: those that look on just now, each for a thread of its own
_spied: dict[type, _Spied] = {}


@dataclass
class _Spied:
    """A class whose `__getattribute__` tells, for as long as somebody looks on."""

    own: object  #: its own `__getattribute__`, or None where it inherits one
    watchers: set[int]


def _spy(kind: type) -> Callable[[Any, str], Any]:
    """`__getattribute__` of a class, which notes what is asked of the objects that are watched."""
    original: Any = kind.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        for onlooker in _onlookers:
            known = onlooker.seen.reads.get(id(self))
            if known is not None and onlooker.counts():
                known.add(name)
                if name == "__dict__" and origin_of_file(sys._getframe(1).f_code.co_filename) == "user":
                    known.add(EVERYTHING)
        return original(self, name)

    return __getattribute__


def pause_profile_() -> Any:
    """Takes off the profile function of this thread, and gives it, to be put back; None if there is none. cProfile's
    own, which is no function, stays on. Done first of all, for each event before it costs more than this."""
    profile = sys.getprofile()
    if type(profile) is FunctionType or callable(profile):
        sys.setprofile(None)
        return profile
    return None


class Onlooker:
    """Sees what runs and is read on this thread while it is entered. `objects` are watched, and must outlive it."""

    def __init__(self, objects: Iterable[object]) -> None:
        watched = [o for o in objects if can_be_spied(type(o))]
        self.seen = Seen(reads={id(o): set() for o in watched})
        self.also: Sequence[Callable[[FrameType, str, object], None]] = ()  #: are told of every call and return
        self.paused = False  #: what runs just now is not the step's own code
        self._kinds = tuple(dict.fromkeys(map(type, watched)))
        self._previous: Any = None
        self._looking = False
        self._thread = 0
        self._others: frozenset[int | None] = frozenset()

    def counts(self) -> bool:
        """Whether what this thread reads is the step's: autograd's threads, which run a GPU's backward, do count."""
        return not self.paused and threading.get_ident() not in self._others

    def note_stack(self) -> None:
        """Called by whatever runs on a thread of autograd's, which no profile function sees: what led there has run."""
        frame: FrameType | None = sys._getframe(1) if threading.get_ident() != self._thread else None
        while frame is not None:
            self.seen.codes.setdefault(id(frame.f_code), (frame.f_code, frame.f_globals))
            frame = frame.f_back

    def __enter__(self) -> Onlooker:
        global _onlookers
        self._looking = True
        self._previous = sys.getprofile()
        self._thread = threading.get_ident()
        self._others = frozenset(t.ident for t in threading.enumerate()) - {self._thread}
        with _lock:
            _onlookers = (*_onlookers, self)
            spies = {kind: _spy(kind) for kind in self._kinds if kind not in _spied}
            for kind in self._kinds:
                if kind in spies and not _change_(kind, spies[kind]):
                    self.seen.unseen.add(kind)  # the names that the code mentions must do
                else:
                    _spied[kind].watchers.add(id(self))
        sys.setprofile(self._profile())
        return self

    def _profile(self) -> Callable[[FrameType, str, Any], None]:
        codes = self.seen.codes
        other = self._previous if callable(self._previous) else None  # somebody looks on already: he goes on
        collecting = {id(getattr(callback, "__code__", None)) for callback in gc.callbacks}
        also = self.also
        elsewhere: list[FrameType] = []  # what Python calls by itself whenever it likes, and all inside of that

        def note(frame: FrameType, event: str, arg: object) -> None:
            if event == "call":
                code = frame.f_code
                if code.co_name == "__del__" or id(code) in collecting:
                    elsewhere.append(frame)
                if not elsewhere and id(code) not in codes:
                    codes[id(code)] = (code, frame.f_globals)
            elif event == "return" and elsewhere and elsewhere[-1] is frame:
                elsewhere.pop()
            for each in also:
                each(frame, event, arg)
            if other is not None:
                other(frame, event, arg)

        return note

    def __exit__(self, *error: object) -> None:
        self.stop_()

    def stop_(self) -> None:
        """Puts everything back; as often as it is called, for an interrupt may have cut one call short."""
        global _onlookers
        if not self._looking:
            return
        if self._previous is None or callable(self._previous):
            sys.setprofile(self._previous)
        else:  # cProfile's, up to Python 3.11, which cannot be given to setprofile
            self._previous.enable()
        with _lock:
            _onlookers = tuple(o for o in _onlookers if o is not self)
            for kind in self._kinds:
                spied = _spied.get(kind)
                if spied is None:
                    continue
                spied.watchers.discard(id(self))
                if not spied.watchers:
                    _change_back_(kind, spied.own)
                    del _spied[kind]
        self._looking = False


def _change_(kind: type, spy: Callable[[Any, str], Any]) -> bool:
    """False where the class, by its metaclass, allows no changes."""
    _spied[kind] = _Spied(vars(kind).get("__getattribute__"), set())
    try:
        kind.__getattribute__ = spy  # type: ignore[method-assign, assignment]
    except (TypeError, AttributeError):
        del _spied[kind]
        return False
    return True


def _change_back_(kind: type, own: object) -> None:
    if own is not None:
        kind.__getattribute__ = own  # type: ignore[method-assign, assignment]
    elif "__getattribute__" in vars(kind):
        del kind.__getattribute__
