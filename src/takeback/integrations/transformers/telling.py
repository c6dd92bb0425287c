"""What a loss of TRL's keeps while it is computed, metrics and a count of tokens, is told after the step, as data.

In: a `compute_loss` that runs inside of a `Telling`. Out: `data()`, a nesting of tuples that goes with the results of a
compiled step; `tell_` writes it where TRL keeps it, with the values of the step that has just run. Guaranteed: inside
of the step nothing is kept by the trainer, so that a replay leaves out nothing; and whoever must know a value inside of
the step reads it as ever, so that the plan is for that value.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from takeback.errors import CaptureError

#: ("item", tensor) | ("kept", name) | ("pick", tensor, mask) | ("call", name, operand, args, kwargs) | (operator, ...)
Expression = tuple[Any, ...]

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_SUMS = ("sum", "mean")


class ToldNumber:
    """A number that is known after the step. It may be computed with and kept; who looks at it reads its tensor."""

    def __init__(self, expression: Expression) -> None:
        self.expression = expression

    def _look(self) -> Any:
        def kept(name: str) -> NoReturn:
            raise CaptureError(
                f"the loss looks at trainer.{name}, another number in each step, so that each would need a plan of its "
                f"own. Compute what depends on it in a callback, or use TRL's trainer without takeback."
            )

        return evaluated(self.expression, kept)

    def _compared(self, how: str, other: Any) -> bool:
        compare: Callable[[Any, Any], Any] = getattr(operator, how)
        if self.expression[0] != "item" or not isinstance(self.expression[1], torch.Tensor):
            return bool(compare(self._look(), other))
        tensor = self.expression[1].detach()  # the answer is read, not the number
        return bool(compare(tensor.double() if tensor.is_floating_point() else tensor, other))

    __hash__ = None  # type: ignore[assignment]


def _arithmetic(name: str, *, turned: bool) -> Callable[[ToldNumber, Any], Any]:
    def compute(self: ToldNumber, other: Any) -> Any:
        if not isinstance(other, ToldNumber | int | float):
            operands = (other, self._look()) if turned else (self._look(), other)
            return getattr(operator, name)(*operands)
        mine, others = self.expression, other.expression if isinstance(other, ToldNumber) else other
        return ToldNumber((name, others, mine) if turned else (name, mine, others))

    return compute


def _looking(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._look(), f"__{name}__")(*args)


def _comparing(name: str) -> Callable[[ToldNumber, Any], bool]:
    return lambda self, other: self._compared(name, other)


for _name in _ARITHMETIC:
    setattr(ToldNumber, f"__{_name}__", _arithmetic(_name, turned=False))
    setattr(ToldNumber, f"__r{_name}__", _arithmetic(_name, turned=True))
for _name in _COMPARISONS:
    setattr(ToldNumber, f"__{_name}__", _comparing(_name))
for _name in ("bool", "float", "int", "index", "round", "format", "str", "repr", "neg", "abs"):
    setattr(ToldNumber, f"__{_name}__", _looking(_name))


class Picked:
    """`tensor[mask]`, whose shape depends on the data, summed up after the step. Whoever does anything else with it
    gets the tensor."""

    def __init__(self, expression: Expression) -> None:
        self._expression = expression

    def item(self) -> ToldNumber:
        return ToldNumber(("item", self._expression))

    def __getitem__(self, index: Any) -> Any:
        if self._expression[0] == "call":
            raise IndexError("a sum has no rows")  # as torch says of a tensor without dimensions
        return _real(self)[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _SUMS:
            return lambda: Picked(("call", name, self._expression, (), {}))
        return getattr(_real(self), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(_real, args), **{name: _real(value) for name, value in (kwargs or {}).items()})


for _name in _ARITHMETIC:
    setattr(Picked, f"__{_name}__", lambda self, other, how=_name: getattr(operator, how)(_real(self), _real(other)))
    setattr(Picked, f"__r{_name}__", lambda self, other, how=_name: getattr(operator, how)(_real(other), _real(self)))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Picked, f"__{_name}__", lambda self, other, how=_name: getattr(operator, how)(_real(self), _real(other)))
for _name in ("bool", "float", "int", "index", "len", "iter", "neg", "abs"):
    setattr(Picked, f"__{_name}__", lambda self, how=_name: getattr(_real(self), f"__{how}__")())


def _real(value: Any) -> Any:
    return evaluated(value._expression) if isinstance(value, Picked) else value


def evaluated(expression: Any, kept: Callable[[str], Any] | None = None) -> Any:
    """Its value, by the tensors that it holds. `kept(name)`: what the trainer has under that name."""
    if not isinstance(expression, tuple):
        return expression
    kind, *operands = expression
    if kind == "kept":
        assert kept is not None
        return kept(operands[0])
    if kind == "pick":
        return operands[0][operands[1]]
    if kind == "call":
        name, operand, args, kwargs = operands
        return getattr(evaluated(operand, kept), name)(*args, **kwargs)
    values = [evaluated(operand, kept) for operand in operands]
    return values[0].item() if kind == "item" else getattr(operator, kind)(*values)


class _Histories:
    """Stands for lists of numbers by name, which TRL has for "train" and for "eval"."""

    def __init__(self, told: list[Any], mode: str) -> None:
        self._told, self._mode = told, mode

    def __getitem__(self, name: str) -> _History:
        return _History(self._told, self._mode, name)

    def __setitem__(self, name: str, values: list[Any]) -> None:
        self._told.append(("set", self._mode, name, list(values)))


class _History:
    def __init__(self, told: list[Any], mode: str, name: str) -> None:
        self._told, self._place = told, (mode, name)

    def append(self, value: Any) -> None:
        self._told.append(("append", *self._place, value))

    def __getitem__(self, index: int) -> Any:
        mine = [value for how, *place, value in self._told if how == "append" and tuple(place) == self._place]
        if index != -1 or not mine:
            self._refuse()
        return mine[-1]

    def _refuse(self, *args: object) -> NoReturn:
        mode, name = self._place
        raise CaptureError(
            f"the loss looks at the history of its metric {name!r} ({mode}), which a replay has not. Look at it in "
            f"log() or in a callback, or use the trainer without takeback."
        )

    __len__ = __iter__ = __contains__ = __setitem__ = __bool__ = __delitem__ = _refuse


class _Metrics:
    """Stands for TRL's `_metrics`."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def __getitem__(self, mode: str) -> _Histories:
        return _Histories(self._told, mode)


class Telling:
    """While a `compute_loss` runs inside of it."""

    def __init__(self) -> None:
        self._told: list[Any] = []
        self._numbers: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        return _Metrics(self._told) if name == "_metrics" else self._numbers.get(name, ToldNumber(("kept", name)))

    def write(self, name: str, value: Any) -> None:
        self._numbers[name] = value

    def data(self) -> list[Any]:
        """Numbers first: what is appended may be computed of them, as they were before."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(each) for each in value]
            if isinstance(value, ToldNumber):
                return ("told", value.expression)
            return value

        told = [(how, mode, name, plain(value)) for how, mode, name, value in self._told]
        return [*told, *(("number", "", name, plain(value)) for name, value in self._numbers.items())]


def tell_(kept: dict[str, Any], told: list[Any]) -> None:
    """Writes into `kept`, the trainer's own."""
    before = dict(kept)

    def known(value: Any) -> Any:
        if isinstance(value, list):
            return [known(each) for each in value]
        return evaluated(value[1], before.__getitem__) if isinstance(value, tuple) and value[:1] == ("told",) else value

    for how, mode, name, value in told:
        if how == "number":
            kept[name] = known(value)
        elif how == "set":
            kept["_metrics"][mode][name] = known(value)
        else:
            kept["_metrics"][mode][name].append(known(value))


class ToldLater:
    """An attribute of a trainer. While a step runs, its `Telling` has it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        if trainer is None:
            return self
        stepping = trainer._takeback
        if stepping.telling is not None:
            return stepping.telling.read(self._name)
        if self._name not in stepping.kept:
            raise AttributeError(self._name)
        return stepping.kept[self._name]

    def __set__(self, trainer: Any, value: Any) -> None:
        stepping = trainer._takeback
        if stepping.telling is not None:
            stepping.telling.write(self._name, value)
        else:
            stepping.kept[self._name] = value


class Reading(TorchFunctionMode):
    """Around a loss of TRL's: where its own code reads a number, or picks by a mask, it gets what stands for them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        caller = sys._getframe(1)
        computes = caller.f_code.co_name.endswith("compute_loss")  # TRL's, or the user's around it
        if computes or caller.f_globals.get("__name__", "").partition(".")[0] == "trl":
            if func is torch.Tensor.item:
                return ToldNumber(("item", args[0].detach()))
            if func is torch.Tensor.__getitem__ and computes:
                tensor, index = args
                if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not tensor.requires_grad:
                    return Picked(("pick", tensor, index))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reading(accelerator: Any) -> Iterator[Telling]:
    """Around a loss of TRL's, in one process: there is nobody to gather from, though a group of one would be asked."""
    table: dict[str, Any] = object.__getattribute__(accelerator, "__dict__")  # past those who look on
    gather = accelerator.gather_for_metrics

    def gather_for_metrics(values: Any, *args: Any, **kwargs: Any) -> Any:
        """A value is all of it; a batch's rows are counted, by what is left at the end of the data."""
        one = isinstance(values, Picked) or (isinstance(values, torch.Tensor) and values.dim() == 0)
        return values if one else gather(values, *args, **kwargs)

    stand_ins: dict[str, Callable[..., Any]] = {
        "gather_for_metrics": gather_for_metrics,
        "gather": lambda tensor: tensor,
        "reduce": lambda tensor, *args, **kwargs: tensor.clone(),
    }
    table.update(stand_ins)
    try:
        with Reading():
            yield Telling()
    finally:
        for name in stand_ins:
            del table[name]


_BESIDE = {
    # Its Triton kernels are launched past torch's dispatcher, where no recording sees them. Without them TRL computes
    # with torch's ops, as on a CPU, and of all positions, so that no shape depends on the data.
    ("trl.kernels.chunked_logprob", "_TRITON_AVAILABLE"): False,
    # The time of a loss is none of a replay's, and it reads a number that is another one in each step.
    ("trl.extras.profiling", "profiling_context"): lambda trainer, name: contextlib.nullcontext(),
}


@contextlib.contextmanager
def loss_alone() -> Iterator[None]:
    """Around a step: what TRL does beside the loss, where no replay can follow, is left out (checked on TRL 1.16)."""
    changed: list[tuple[Any, str, Any]] = []
    for (home, name), value in _BESIDE.items():
        module = sys.modules.get(home)
        if hasattr(module, name):
            changed.append((module, name, getattr(module, name)))
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, was in changed:
            setattr(module, name, was)
