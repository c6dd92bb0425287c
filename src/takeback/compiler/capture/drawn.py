"""Functions that draw from numpy's global generator, as ops: `takeback::drawn` calls one anew in each replay, where
eager would, and what it gives becomes a tensor of the program.

While a step is recorded, `Calls` stands in the place of such functions (drawers.py finds them). A call becomes an op,
whose operands are the tensors among the arguments, and gives a `Drawn`: it can become a tensor (torch.tensor,
torch.as_tensor, torch.from_numpy) or be given to another such function; whatever else is asked of it would depend on
what was drawn, and is refused. Such an op draws from a `NumpyGenerator` (randomness.py), which keeps its calls.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # checked on 2.11 and 2.13

from takeback.compiler.capture.drawers import Drawer, in_place_of
from takeback.compiler.capture.leaks import open_to, what_may_be_read
from takeback.compiler.capture.modes import be_on_function_stack_
from takeback.compiler.capture.op_facts import facts_of
from takeback.compiler.capture.randomness import NumpyGenerator
from takeback.compiler.capture.recorder import Recorder
from takeback.compiler.capture.trial import tensors_in
from takeback.errors import CaptureError

_library = torch.library.Library("takeback", "FRAGMENT")
_library.define(
    "drawn(Tensor[] operands, str call, Device device, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
DRAWN = torch.ops.takeback.drawn.default

_LONGEST = 400  #: words of arguments in a call's name
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


# -- the op ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operand:
    """Stands among the arguments for a tensor of the program."""

    index: int
    as_array: bool  #: it was a `Drawn`


@dataclass(frozen=True, eq=False)
class _DrawingCall:
    """One call of a function, with all of its arguments but the tensors."""

    function: FunctionType
    arguments: Any
    kinds: list[object] = field(default_factory=list)  #: what it gave the first time

    def __call__(self, operands: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
        name, copies = _name(self.function), [t.clone() for t in operands]
        args, kwargs = _map(self.arguments, functools.partial(_given, copies))
        told = _told((args, kwargs))
        drawn = self.function(*args, **kwargs)
        if _told((args, kwargs)) != told or not all(map(_same_bytes, copies, operands)):
            raise Misused(f"{name}, which draws from numpy.random, writes into what it is given. Write into a copy.")
        if type(drawn) is np.ndarray and any(np.shares_memory(drawn, each) for each in _arrays((args, kwargs))):
            raise Misused(f"{name}, which draws from numpy.random, gives what it is given. Return a copy of it.")
        kind = drawn.dtype if type(drawn) is np.ndarray else type(drawn).__name__
        if not self.kinds:
            self.kinds.append(kind)
        if type(drawn) is not np.ndarray or kind != self.kinds[0]:
            raise CaptureError(
                f"{name}, which draws from numpy.random, gave {kind}, and {self.kinds[0]} when the step was recorded. "
                f"Let it always return an array of one dtype."
            )
        return drawn


#: By their names among ops' arguments. The generators of programs hold them.
_calls: weakref.WeakValueDictionary[str, _DrawingCall] = weakref.WeakValueDictionary()


def _given(operands: Sequence[torch.Tensor], leaf: object) -> object:
    if isinstance(leaf, _Operand):
        tensor = operands[leaf.index]
        return torch._C.TensorBase.numpy(tensor.cpu()).copy() if leaf.as_array else tensor
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _run(
    operands: Sequence[torch.Tensor], call: str, device: torch.device, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    check = what_may_be_read()
    with _Looking(check) if check is not None else contextlib.nullcontext():
        array = _calls[call](operands)
    source = _torch_from_numpy(array.copy(order="C"))
    return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source)


_library.impl("drawn", _run, "CompositeExplicitAutograd")
_torch_from_numpy = torch.from_numpy


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))))


def _name(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    """New containers each time: a function may write into what it is given."""
    if type(tree) in (tuple, list):
        return type(tree)(_map(item, change) for item in tree)
    if type(tree) is dict:
        return {key: _map(value, change) for key, value in tree.items()}
    return change(tree)


# -- while a step is recorded ------------------------------------------------------------------------------------------


class Misused(CaptureError):
    """Something else was done with what a function has drawn than to make a tensor of it."""


class Drawn:
    """Stands for the array that a function gave."""

    dtype: object
    _tensor: torch.Tensor
    _name: str
    _shared: bool
    __slots__ = ("_name", "_shared", "_tensor", "dtype")
    __class__ = property(lambda self: np.ndarray)  # whoever asks takes eager's way

    def __init__(self, tensor: torch.Tensor, name: str, dtype: object) -> None:
        self._tensor = tensor
        self._name = name
        self.dtype = dtype
        self._shared = False  # a tensor was made of it that has its bytes in eager: who writes that writes this

    def __getattr__(self, name: str) -> Any:
        return _refuse(self, f".{name}")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"<what {self._name} draws>"


def _refuse(drawn: Drawn, what: str) -> Any:
    raise Misused(
        f"what {drawn._name} has drawn from numpy.random is used in Python ({what}). Make "
        f"a tensor of it at once (torch.tensor), or do all of it in that function."
    )


def _refusing(name: str) -> Callable[..., Any]:
    return lambda self, *others: _refuse(self, name)


_ASKED = (
    *("bool", "eq", "ne", "lt", "le", "gt", "ge", "contains", "iter", "getitem", "setitem", "float", "int", "index"),
    *("complex", "invert", "neg", "pos", "abs", "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul"),
    *("truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "and"),
    *("rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift", "divmod", "rdivmod", "array"),
    *("array_ufunc", "array_function", "copy", "deepcopy", "reduce_ex", "format"),
)
for _asked in _ASKED:
    setattr(Drawn, f"__{_asked}__", _refusing(f"__{_asked}__"))
Drawn.__hash__ = None  # type: ignore[assignment]  # as an array's


class Calls:
    """Of a recording: what stands in the place of functions that draw."""

    def __init__(self, drawers: Sequence[Drawer], generator: NumpyGenerator, device: torch.device) -> None:
        self._drawers, self._generator, self._device = drawers, generator, device
        self._thread = threading.get_ident()
        self._knows: Callable[[torch.Tensor], bool] = lambda tensor: False
        self._inside = False
        self._found: dict[str, None] = {}

    @contextlib.contextmanager
    def of(self, recorder: Recorder) -> Iterator[None]:
        """Use around the recorded step, inside of all that looks at it."""
        if not self._drawers:
            yield
            return
        self._knows = recorder.table.knows
        with in_place_of(self._drawers, self._recorded), _from_numpy(), _Conversions():
            yield

    def notes(self) -> Iterator[str]:
        for name in self._found:
            yield f"{name} draws from numpy.random, and is called in each step; what it gives is a tensor of the plan"

    def _recorded(self, function: FunctionType) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            operands: list[torch.Tensor] = []
            name = _name(function)
            arguments = _map((args, kwargs), functools.partial(_kept, operands))
            key, call = _named(name, _DrawingCall(function, arguments))
            self._generator.calls.append(call)
            self._found[name] = None
            self._inside = True
            try:
                with open_to(functools.partial(self._check, operands, name)):
                    made = DRAWN(operands, key, self._device, generator=self._generator)
            finally:
                self._inside = False
            return Drawn(made, name, call.kinds[0])

        return called

    def _check(self, operands: Sequence[torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        """What a function reads without being given it may be another tensor's bytes in a replay."""
        if self._knows(tensor) and not any(_shares(tensor, operand) for operand in operands):
            raise Misused(f"{name}, which draws from numpy.random, reads a tensor that it is not given as an argument.")


class _Looking(TorchDispatchMode):
    """Around what such a function computes with torch: each tensor is checked, and torch draws nothing."""

    def __init__(self, check: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            self._check(tensor)
        if facts_of(func).random:
            raise Misused(f"a function that draws from numpy.random draws from torch, too ({func}).")
        return func(*args, **(kwargs or {}))


def _shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _kept(operands: list[torch.Tensor], leaf: object) -> object:
    """What a call is made with in each replay."""
    if type(leaf) is Drawn or isinstance(leaf, torch.Tensor):
        as_array = type(leaf) is Drawn
        operands.append(_once_shared(leaf)._tensor if as_array else leaf.detach())
        return _Operand(len(operands) - 1, as_array)
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if type(leaf) in _PLAIN or isinstance(leaf, np.generic | np.dtype):
        return leaf
    raise Misused(
        f"a function that draws from numpy.random is given a {type(leaf).__name__}, which may change. Give it numbers, "
        f"texts, arrays and tensors, in tuples, lists and dicts."
    )


def _named(name: str, call: _DrawingCall) -> tuple[str, _DrawingCall]:
    """Under which it is found, the same for the same call in another process, too; and the one that is found there."""
    told = _told(call.arguments)
    found = name if len(told) > _LONGEST else f"{name}{told}"
    key, number = found, 0
    while (other := _calls.setdefault(key, call)) is not call:
        if other.function is call.function and _told(other.arguments) == told:
            return key, other
        number += 1
        key = f"{found} #{number}"
    return key, call


def _told(arguments: Any) -> str:
    """Arguments in words: equal ones are the same arguments. Of tensors it does not tell."""

    def word(leaf: object) -> object:
        if isinstance(leaf, np.ndarray):
            return (leaf.dtype.str, leaf.shape, hashlib.sha256(leaf.tobytes()).hexdigest())
        return "a tensor" if isinstance(leaf, torch.Tensor) else leaf

    return repr(_map(arguments, word))


def _arrays(arguments: Any) -> list[np.ndarray[Any, Any]]:
    found: list[np.ndarray[Any, Any]] = []
    _map(arguments, lambda leaf: found.append(leaf) if isinstance(leaf, np.ndarray) else None)
    return found


class _Conversions(TorchFunctionMode):
    """Makes a tensor of the program where torch is asked to make one of what was drawn."""

    def __exit__(self, *error: Any) -> None:
        be_on_function_stack_(self)
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and args and type(args[0]) is Drawn:
            return _converted(*args, shares=func is not torch.tensor, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _once_shared(drawn: Drawn) -> Drawn:
    if drawn._shared:
        _refuse(drawn, "after torch.from_numpy or torch.as_tensor")
    return drawn


def _converted(
    drawn: Drawn,
    *,
    shares: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    requires_grad: bool = False,
    **others: Any,
) -> torch.Tensor:
    if any(others.values()):
        _refuse(drawn, f"torch.tensor with {', '.join(others)}")
    made = _once_shared(drawn)._tensor
    drawn._shared = shares
    where = torch.get_default_device() if device is None else device
    return made.to(device=where, dtype=dtype or made.dtype, copy=True).requires_grad_(requires_grad)


@contextlib.contextmanager
def _from_numpy() -> Iterator[None]:
    """No mode sees torch.from_numpy."""

    def from_numpy(array: Any) -> torch.Tensor:
        return _converted(array, shares=True, device="cpu") if type(array) is Drawn else _torch_from_numpy(array)

    try:
        torch.from_numpy = from_numpy
        yield
    finally:
        torch.from_numpy = _torch_from_numpy
