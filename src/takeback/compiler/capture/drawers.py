"""Finds the functions of the user's that draw from numpy's global generator and give an array: SpecAugment's masks.

In: a step that draws, run once more while a `Learner` looks on. Out: for all that it drew the outermost functions that
gave an array for it, with the places under which they are called. `in_place_of` puts something else in these places for
a time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import numpy as np

from takeback.compiler.capture.ran import origin_of_file
from takeback.compiler.capture.randomness import NumpyGenerator

Namespace = MutableMapping[str, Any] | type


@dataclass(frozen=True)
class Drawer:
    """A function that draws, and where it is found when it is called: in globals of modules, or in classes."""

    function: FunctionType
    places: tuple[tuple[Namespace, str], ...]


@dataclass
class Drawers:
    """Those that a compiled step is known to call: what one recording has learned, the next ones begin with."""

    known: tuple[Drawer, ...] = ()
    generator: NumpyGenerator = field(default_factory=NumpyGenerator)  #: from which its plans say that they draw

    def learn_(self, found: Sequence[Drawer]) -> bool:
        """Whether one of them is new."""
        functions = {drawer.function for drawer in self.known}
        new = tuple(drawer for drawer in found if drawer.function not in functions)
        self.known += new
        return bool(new)


class Learner:
    """Looks on while it is entered, by a profile function, which goes on to call the one that was there."""

    def __init__(self) -> None:
        self.found: list[Drawer] = []
        self._open: dict[int, tuple[object, int]] = {}
        self._previous: Any = None

    def __enter__(self) -> Learner:
        self._previous = sys.getprofile()
        if self._previous is None or callable(self._previous):  # cProfile's, up to Python 3.11, cannot be put back
            sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is None or callable(self._previous):
            sys.setprofile(self._previous)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and origin_of_file(frame.f_code.co_filename) == "user":
            self._open[id(frame)] = (_stand(), len(self.found))
        elif event == "return":
            before, known = self._open.pop(id(frame), (None, 0))
            if before is not None and type(arg) is np.ndarray and _stand() != before:
                drawer = _drawer(frame)
                if drawer is not None:
                    self.found[known:] = [drawer]  # in place of those that it has called
        if self._previous is not None:
            self._previous(frame, event, arg)


def _stand() -> object:
    """Where numpy's global generator stands. A draw moves on in its block of numbers, or to the next block."""
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    return (inner.get("pos"), inner["key"][:4].tobytes(), state["has_gauss"]) if "key" in inner else repr(inner)


def _drawer(frame: FrameType) -> Drawer | None:
    """The function that runs in this frame; None where it is found neither in a module nor in a class: a lambda, or a
    function inside of another one."""
    code = frame.f_code

    def runs(value: object) -> bool:
        return type(value) is FunctionType and value.__code__ is code

    around = [frame.f_globals, *([frame.f_back.f_globals] if frame.f_back is not None else [])]
    namespaces: list[tuple[Namespace, Any]] = [(each, each) for each in {id(g): g for g in around}.values()]
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    namespaces += [(kind, vars(kind)) for kind in type(owner).__mro__] if owner is not None else []
    found = [(space, name, value) for space, named in namespaces for name, value in tuple(named.items()) if runs(value)]
    if not found:
        return None
    function = found[0][2]
    return Drawer(function, tuple((space, name) for space, name, value in found if value is function))


@contextlib.contextmanager
def in_place_of(drawers: Sequence[Drawer], make: Callable[[FunctionType], Callable[..., Any]]) -> Iterator[None]:
    """Calls what `make` gives for each of these functions in its place."""
    with contextlib.ExitStack() as stack:
        for drawer in drawers:
            instead = make(drawer.function)
            for space, name in drawer.places:
                stack.callback(_put_, space, name, drawer.function)
                _put_(space, name, instead)
        yield


def _put_(space: Namespace, name: str, value: object) -> None:
    if isinstance(space, type):
        setattr(space, name, value)
    else:
        space[name] = value
