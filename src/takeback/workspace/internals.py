"""What only torch's internals can say or do: who holds a storage, whether a tracer is running, plain tensor subclasses.

A buffer may be handed out again when nobody holds it any more: no tensor, no view, and nothing that autograd saved.
torch keeps that count, and has no public name for it. Checked on 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from takeback import engine

Kind = TypeVar("Kind", bound=torch.Tensor)


def holders(storage: torch.UntypedStorage) -> int:
    """A number that grows with every holder: tensors of any kind count in C++, names for the storage object itself in
    Python, where 2.13 counts the first tensor once more. So it means something only beside what it was before."""
    return engine.holders(storage) + sys.getrefcount(storage)


def traced() -> bool:
    """Whether ops are recorded or intercepted rather than run: torch.compile, fake tensors, make_fx, compile_step."""
    return bool(torch.compiler.is_compiling()) or engine.being_recorded()


def subclassed(tensor: torch.Tensor, kind: type[Kind]) -> Kind:
    """The same memory and version counter as an object of another class, and in autograd's eyes no view of it."""
    made = torch.Tensor._make_subclass(kind, tensor)
    assert isinstance(made, kind)
    return made


def call_plainly(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object] | None = None
) -> object:
    """Calls with every subclass taken for a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))
