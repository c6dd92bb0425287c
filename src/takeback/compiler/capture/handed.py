"""Notes while a step is recorded whether a value of some class comes to code that may do with it what nobody sees.

In: the class, and what code that is. It comes there as an argument or as the result of a call, by itself or inside of
something else.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from takeback.compiler.capture.ran import origin_of_file

_MOST_SEARCHED = 2000
_HOLD_NONE = (torch.Tensor, torch.nn.Module, type, ModuleType, CodeType, BuiltinFunctionType, str, int, bytes)


@dataclass
class Handed:
    """For an onlooker, which tells it of every call and return. Only the user's code counts."""

    kind: type
    matters: Callable[[CodeType, Mapping[str, Any]], bool]  #: of code and its globals
    by_name: Collection[int] = ()  #: `__dict__`s by id, in which a value is found by its name alone
    met: bool = False
    _known: dict[int, bool] = field(default_factory=dict)

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        to = frame if event == "call" else frame.f_back if event == "return" else None
        if to is None or self.met:
            return
        code = to.f_code
        if id(code) not in self._known:
            ours = origin_of_file(code.co_filename) == "user"
            self._known[id(code)] = ours and self.matters(code, to.f_globals)
        if self._known[id(code)]:
            self.met = self._is_in(frame.f_locals if event == "call" else arg)

    def _is_in(self, value: object) -> bool:
        """Whether it is somewhere in this: what holds too much to be searched counts as if it were."""
        pending, searched = [value], dict[int, object]()
        while pending:
            each = pending.pop()
            kind = type(each)
            if kind is self.kind or len(searched) > _MOST_SEARCHED:
                return True
            if id(each) in searched or kind is float or issubclass(kind, _HOLD_NONE):
                continue
            searched[id(each)] = each
            if kind is FunctionType:
                pending += gc.get_referents(each.__closure__)  # type: ignore[attr-defined]
            else:
                has_names = kind.__module__ not in ("builtins", "collections")
                pending += (r for r in gc.get_referents(each) if not (has_names and id(r) in self.by_name))
        return False
