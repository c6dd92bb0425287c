"""Who in Python holds a tensor: a variable of a running function, a global, a module's attribute, a list, a closure.

A tensor that only the autograd graph holds has a Python object too; what counts is a reference that the user's code can
follow. Frames of torch and of takeback do not count, nor does what is garbage.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from types import CellType, CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from takeback.guard.sites import belongs_to_user

CHECKPOINT = "torch.utils.checkpoint, which computed it again for another node"
_DEPTH = 7
"""Through how many containers a reference is followed."""


def live(*kinds: type) -> list[Any]:
    """Every object of these types, or of one derived from them, that the garbage collector knows."""
    wanted = kinds_of(*kinds)
    return [thing for thing in gc.get_objects() if type(thing) in wanted]


def kinds_of(*kinds: type) -> set[type]:
    """These types, and all that are derived from them."""
    wanted: set[type] = set()
    todo = list(kinds)
    while todo:
        kind = todo.pop()
        if kind not in wanted:
            wanted.add(kind)
            todo += type.__subclasses__(kind)
    return wanted


def user_variables() -> Iterator[Any]:
    """What the variables of the user's running functions hold."""
    for frame in _frames():
        if frame.f_locals is not frame.f_globals and belongs_to_user(frame):
            yield from list(frame.f_locals.values())


def holders_of(tensors: list[Any], ignored: set[int]) -> dict[int, str]:
    """For each tensor or other object (by its position) that the user can reach: how. `ignored` are ids of containers
    that do not count, such as what the contexts of autograd Functions keep."""
    variables, snapshots = _variables()
    ignored = ignored | snapshots | {id(tensors), id(variables), id(ignored), id(snapshots)}
    found: dict[int, str] = {}
    for i in range(len(tensors)):  # enumerate would keep the tensor in a tuple, which looks like a holder
        text = variables.get(id(tensors[i])) or _climb(tensors[i], variables, ignored)
        if text:
            found[i] = text
    return found


def _variables() -> tuple[dict[int, str], set[int]]:
    """What the variables of the user's running functions hold, by id, with their text; and the ids of the dicts that
    show them, which are copies (before Python 3.13)."""
    held: dict[int, str] = {}
    snapshots: set[int] = set()
    for frame in _frames():
        variables = frame.f_locals
        if frame.f_locals is not frame.f_globals:
            snapshots.add(id(variables))
            if belongs_to_user(frame):
                where = f"{frame.f_code.co_name}()"
                for name, value in list(variables.items()):
                    held.setdefault(id(value), f"the variable {name} of {where}")
    return held, snapshots


def _frames() -> Iterator[FrameType]:
    """Of all threads."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


def _climb(tensor: Any, variables: dict[int, str], ignored: set[int]) -> str | None:
    """How the user reaches a tensor that no variable holds directly."""
    level: list[Any] = [tensor]
    seen = {id(tensor)}
    via = ""
    for depth in range(_DEPTH):
        above: list[Any] = []
        # What this search itself made must not be taken for a holder.
        ours, mark = ignored | seen | {id(level), id(above)}, object()
        for thing in gc.get_referrers(*level, mark):
            if id(thing) in ours or isinstance(thing, FrameType | BackwardCFunction):
                continue
            if type(thing) is tuple and thing and thing[-1] is mark:  # the arguments of get_referrers
                continue
            if id(thing) in variables:
                return f"{via or _place(thing, level)} in {variables[id(thing)]}"
            decided = _owner(thing, level)
            if decided:
                return f"{via} in {decided}" if via and decided != CHECKPOINT else decided
            if _passes(thing):
                above.append(thing)
        if not above:
            return None
        if depth == 0:
            via = _place(above[0], level)
        seen |= {id(thing) for thing in above}
        level = above
    return via or None


def _owner(thing: Any, level: Iterable[Any]) -> str | None:
    """The text of a holder that the user can certainly reach."""
    inside = {id(one) for one in level}
    if isinstance(thing, dict):
        name = thing.get("__name__")
        if isinstance(name, str) and "__builtins__" in thing and not name.startswith(("torch.", "takeback.")):
            key = next((k for k, v in thing.items() if id(v) in inside), "?")
            return f"the global variable {key}" + ("" if name == "__main__" else f" of {name}")
        return None
    if isinstance(thing, CellType | FunctionType):
        return "a closure"
    if isinstance(thing, GeneratorType | CoroutineType):
        return f"the suspended {thing.__name__}()"
    if isinstance(thing, type | ModuleType):
        return f"{thing.__name__}"
    if type(thing).__module__ == "torch.utils.checkpoint":
        return CHECKPOINT
    if isinstance(thing, list | tuple | set | frozenset | torch.Tensor) or type(thing).__module__ in _HIDDEN:
        return None
    return f"a {type(thing).__name__}"


_HIDDEN = ("builtins", "weakref")


def _passes(thing: Any) -> bool:
    return (
        isinstance(thing, dict | list | tuple | set | frozenset | torch.Tensor) or type(thing).__module__ == "weakref"
    )


def _place(thing: Any, level: Iterable[Any]) -> str:
    inside = {id(one) for one in level}
    if isinstance(thing, dict):
        key = next((k for k, v in thing.items() if id(v) in inside), None)
        return f"{key!r}" if key is not None else "a dict"
    return f"a {type(thing).__name__}"
