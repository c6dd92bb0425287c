"""Finds the functions of the user's that draw from numpy's global generator and give an array: SpecAugment's masks.

In: a step that draws, run once more while a `Learner` looks on. Out: for all that it drew the outermost functions that
gave an array for it and keep nothing themselves (stateless.py), with the places under which they are called.
`in_place_of` puts something else in these places for a time.
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
from takeback.compiler.capture.stateless import state_of

Globals = MutableMapping[str, Any]


@dataclass(frozen=True)
class Drawer:
    """A function that draws, and the globals of modules in which it is found when it is called."""

    function: FunctionType
    places: tuple[tuple[Globals, str], ...]

    @property
    def stands(self) -> bool:
        """Whether it is still what is called there, and keeps nothing."""
        return all(space.get(name) is self.function for space, name in self.places) and state_of(self.function) is None


@dataclass
class Drawers:
    """Those that a compiled step is known to call: what one recording has learned, the next ones begin with."""

    known: tuple[Drawer, ...] = ()
    generator: NumpyGenerator = field(default_factory=NumpyGenerator)  #: from which its plans say that they draw

    def forget_(self) -> None:
        """Those in whose place something else stands by now."""
        self.known = tuple(drawer for drawer in self.known if drawer.stands)

    def learn_(self, found: Sequence[Drawer]) -> bool:
        """Whether one of them, or a place of it, is new."""
        new = tuple(drawer for drawer in found if drawer not in self.known)
        functions = {drawer.function for drawer in new}
        self.known = (*(drawer for drawer in self.known if drawer.function not in functions), *new)
        return bool(new)


class Learner:
    """Looks on while it is entered, by a profile function, which goes on to call the one that was there."""

    def __init__(self) -> None:
        self.found: list[Drawer] = []
        self.refused = ""  #: why one that draws and gives an array is none of them
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
                why = f"{frame.f_code.co_qualname} is in no module" if drawer is None else state_of(drawer.function)
                if drawer is not None and why is None:
                    self.found[known:] = [drawer]  # in place of those that it has called
                self.refused = self.refused or why or ""
        if self._previous is not None:
            self._previous(frame, event, arg)


def _stand() -> object:
    """Where numpy's global generator stands. A draw moves on in its block of numbers, or to the next block."""
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    return (inner.get("pos"), inner["key"][:4].tobytes(), state["has_gauss"]) if "key" in inner else repr(inner)


def _drawer(frame: FrameType) -> Drawer | None:
    """The function that runs in this frame; None where no module has it, or more than one of the same code: a method,
    a lambda, a function inside of another one, what a decorator has made."""
    around = [frame.f_globals, *([frame.f_back.f_globals] if frame.f_back is not None else [])]
    found = [
        (space, name, value)
        for space in {id(each): each for each in around}.values()
        for name, value in tuple(space.items())
        if type(value) is FunctionType and value.__code__ is frame.f_code
    ]
    functions = {value for _, _, value in found}
    return Drawer(functions.pop(), tuple((space, name) for space, name, _ in found)) if len(functions) == 1 else None


@contextlib.contextmanager
def in_place_of(drawers: Sequence[Drawer], make: Callable[[FunctionType], Callable[..., Any]]) -> Iterator[None]:
    """Calls what `make` gives for each of these functions in its place."""
    with contextlib.ExitStack() as stack:
        for drawer in drawers:
            instead = make(drawer.function)
            for space, name in drawer.places:
                stack.callback(space.__setitem__, name, drawer.function)
                space[name] = instead
        yield
