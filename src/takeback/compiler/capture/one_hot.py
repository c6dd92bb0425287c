"""`F.one_hot` with a number of classes, in a recorded step: on a CPU torch reads the least and the greatest class into
Python (C++), only to refuse those out of range.

A mode puts three ops in its place, of which `takeback::classes` gives the classes on and refuses what eager refuses, in
each replay too. So a plan follows whatever the classes are. Without a number of classes the greatest one is a shape:
that is read as before, and so is a one_hot that no call of Python's leads to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from takeback.compiler.capture.modes import be_on_function_stack_
from takeback.engine import transformed

aten = torch.ops.aten

_library = torch.library.Library("takeback", "FRAGMENT")
_library.define("classes(Tensor self, int num_classes) -> Tensor")
CLASSES = torch.ops.takeback.classes.default


def _classes(self: torch.Tensor, num_classes: int) -> torch.Tensor:
    least, greatest = aten.aminmax.default(self)
    if least.item() < 0 or greatest.item() >= num_classes:
        aten.one_hot.default(self, num_classes)  # raises what eager raises
        raise AssertionError("torch's one_hot has taken classes that are out of range")
    return aten.clone.default(self)


_library.impl("classes", _classes, "CompositeExplicitAutograd")
torch.library.register_fake("takeback::classes", lambda self, num_classes: torch.empty_like(self), lib=_library)

_ONE_HOT = (torch._C._nn.one_hot, aten.one_hot, aten.one_hot.default)
_ALSO_CALLED = {"self": "input", "tensor": "input"}


class OneHots(TorchFunctionMode):
    """Use around a recorded step, outside of the recorder."""

    def __exit__(self, *error: Any) -> None:
        be_on_function_stack_(self)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = _of(args, kwargs or {}) if func in _ONE_HOT and not transformed() else None
        if call is None:
            return func(*args, **(kwargs or {}))
        classes, number = call
        index = CLASSES(classes, number).unsqueeze(-1)
        return classes.new_zeros((*classes.shape, number)).scatter_(-1, index, 1)


def _of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, int] | None:
    """The classes and their number; None where torch reads nothing, or what it reads is the number, or it refuses."""
    given: dict[str, Any] = dict(zip(("input", "num_classes"), args, strict=False))
    given |= {_ALSO_CALLED.get(name, name): value for name, value in kwargs.items()}
    classes, number = given.get("input"), given.get("num_classes")
    if len(given) != len(args) + len(kwargs) or len(given) != 2 or not isinstance(classes, torch.Tensor):
        return None
    if not isinstance(number, int | np.integer) or isinstance(number, bool) or number == -1:
        return None
    if classes.dtype is not torch.long or classes.device.type != "cpu" or not classes.numel():
        return None
    return classes, int(number)
