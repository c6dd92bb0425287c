"""What a loss of TRL's keeps while it is computed, metrics and a count of tokens, is told after the step, as data.

In: a `compute_loss` that runs inside of a `Telling`. Out: `data()`, a nesting of tuples that goes with the results of a
compiled step; `tell_` writes it where TRL keeps it, with the values of the step that has just run. Guaranteed: inside
of the step nothing is kept by the trainer, so that a replay leaves out nothing; whoever must know a value inside of
the step reads it as ever, so that the plan is for that value; and who keeps one where nobody would tell it is refused.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from takeback.engine import version_of
from takeback.errors import CaptureError

#: ("item", tensor) | ("kept", name) | ("pick", tensor, mask, writes) | ("call", name, operand, args, kwargs)
#: | (operator, ...)
Reckoning = tuple[Any, ...]
#: Everything that stands for a value, as long as somebody has it.
Made = list[weakref.ref[Any]]

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_SUMS = ("sum", "mean")


class ToldNumber:
    """A number that is known after the step. It may be computed with and kept; who looks at it reads its tensor."""

    def __init__(self, reckoning: Reckoning, made: Made) -> None:
        self._reckoning, self._made = reckoning, made
        made.append(weakref.ref(self))

    def _look(self) -> Any:
        def kept(name: str) -> NoReturn:
            raise CaptureError(
                f"the loss looks at trainer.{name}, another number in each step, so that each would need a plan of its "
                f"own. Compute what depends on it in a callback, or use TRL's trainer without takeback."
            )

        _check_unwritten(self._reckoning)
        return evaluated(self._reckoning, kept)

    def _compared(self, how: str, other: Any) -> Any:
        compare: Callable[[Any, Any], Any] = getattr(operator, how)
        if not isinstance(other, ToldNumber | int | float):
            return compare(self._look(), _real(other))
        if self._reckoning[0] != "item" or not isinstance(self._reckoning[1], torch.Tensor):
            return bool(compare(self._look(), _real(other)))
        tensor = self._reckoning[1].detach()  # the answer is read, not the number
        return bool(compare(tensor.double() if tensor.is_floating_point() else tensor, _real(other)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._look(), name)  # is_integer, bit_length, ...

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_real(args), **_real(kwargs or {}))


def _arithmetic(name: str, *, turned: bool) -> Callable[[ToldNumber, Any], Any]:
    def compute(self: ToldNumber, other: Any) -> Any:
        if not isinstance(other, ToldNumber | int | float):
            operands = (other, self._look()) if turned else (self._look(), other)
            return getattr(operator, name)(*operands)
        mine, others = self._reckoning, other._reckoning if isinstance(other, ToldNumber) else other
        return ToldNumber((name, others, mine) if turned else (name, mine, others), self._made)

    return compute


def _looking(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(_real(self), f"__{name}__")(*map(_real, args))


def _comparing(name: str) -> Callable[[ToldNumber, Any], Any]:
    return lambda self, other: self._compared(name, other)


for _name in _ARITHMETIC:
    setattr(ToldNumber, f"__{_name}__", _arithmetic(_name, turned=False))
    setattr(ToldNumber, f"__r{_name}__", _arithmetic(_name, turned=True))
for _name in _COMPARISONS:
    setattr(ToldNumber, f"__{_name}__", _comparing(_name))
for _name in (
    *("bool", "float", "int", "index", "round", "trunc", "floor", "ceil", "neg", "pos", "abs", "invert", "hash"),
    *("divmod", "rdivmod", *_BITWISE, *(f"r{name}" for name in _BITWISE), "format", "str", "repr", "reduce_ex"),
):
    setattr(ToldNumber, f"__{_name}__", _looking(_name))


class Picked:
    """`tensor[mask]`, whose shape depends on the data, summed up after the step. Whoever does anything else with it
    gets the tensor."""

    def __init__(self, reckoning: Reckoning, made: Made) -> None:
        self._reckoning: Any = reckoning  #: or the tensor, as soon as it was got: who writes to it must find it again
        self._made = made
        made.append(weakref.ref(self))

    def item(self) -> ToldNumber:
        mine = self._reckoning
        return ToldNumber(("item", mine if isinstance(mine, tuple) else mine.detach().clone()), self._made)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(self._reckoning, tuple) and self._reckoning[0] == "call" and self._reckoning[3:] == ((), {}):
            raise IndexError("a sum has no rows")  # as torch says of a tensor without dimensions
        return _real(self)[_real(index)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _SUMS and isinstance(self._reckoning, tuple):
            return lambda *args, **kwargs: Picked(
                ("call", name, self._reckoning, _real(args), _real(kwargs)), self._made
            )
        return getattr(_real(self), name)

    def __eq__(self, other: object) -> Any:
        return _real(self) == _real(other)

    def __ne__(self, other: object) -> Any:
        return _real(self) != _real(other)

    __hash__ = object.__hash__  # as a tensor's: which one it is

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_real(args), **_real(kwargs or {}))


def _on_tensor(name: str, *, turned: bool = False) -> Callable[[Picked, Any], Any]:
    how: Callable[[Any, Any], Any] = getattr(operator, f"__{name}__")
    if turned:
        return lambda self, other: how(_real(other), _real(self))
    return lambda self, other: how(_real(self), _real(other))


for _name in (*_ARITHMETIC, *_BITWISE, "matmul"):
    setattr(Picked, f"__{_name}__", _on_tensor(_name))
    setattr(Picked, f"__r{_name}__", _on_tensor(_name, turned=True))
for _name in ("lt", "le", "gt", "ge", "contains"):
    setattr(Picked, f"__{_name}__", _on_tensor(_name))
for _name in (
    *("bool", "float", "int", "index", "complex", "len", "iter", "reversed", "neg", "pos", "abs", "invert"),
    *("setitem", "format", "str", "repr", "reduce_ex"),
):
    setattr(Picked, f"__{_name}__", _looking(_name))


def _real(value: Any) -> Any:
    """What stands for a value becomes it, also inside of lists, tuples and dicts; without any it is the same object."""
    if isinstance(value, Picked):
        _check_unwritten(value._reckoning)
        value._reckoning = evaluated(value._reckoning)
        return value._reckoning
    if isinstance(value, ToldNumber):
        return value._look()
    if isinstance(value, list | tuple):
        members = [_real(each) for each in value]
        if all(a is b for a, b in zip(members, value, strict=True)):
            return value
        return members if isinstance(value, list) else tuple(members)
    if isinstance(value, dict):
        entries = {name: _real(each) for name, each in value.items()}
        return value if all(entries[name] is each for name, each in value.items()) else entries
    if isinstance(value, slice):
        return slice(_real(value.start), _real(value.stop), _real(value.step))
    return value


def _writes(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else version_of(tensor) for tensor in tensors)


def _check_unwritten(reckoning: Any) -> None:
    """What is picked later must be what would have been picked at once."""
    if not isinstance(reckoning, tuple) or not reckoning:
        return
    if reckoning[0] == "pick":
        _, tensor, mask, writes = reckoning
        if _writes(tensor, mask) != writes:
            raise CaptureError(
                "compute_loss picks tensor[mask], and writes to the tensor or to the mask in place before the step has "
                "ended, when what was picked is summed up. Pick from copies: tensor.clone()[mask.clone()]."
            )
    for operand in reckoning[1:]:
        _check_unwritten(operand)


def evaluated(reckoning: Any, kept: Callable[[str], Any] | None = None) -> Any:
    """Its value, by the tensors that it holds. `kept(name)`: what the trainer has under that name."""
    if not isinstance(reckoning, tuple):
        return reckoning
    kind, *operands = reckoning
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


class _StandIn:
    """For what TRL keeps, inside of a step. What it has no method for is refused by name."""

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("==")

    __hash__ = None  # type: ignore[assignment]


def _refusing(what: str) -> Callable[..., NoReturn]:
    return lambda self, *args: self._refuse(what)


for _name, _what in (
    *(("len", "len()"), ("iter", "a loop"), ("contains", "in"), ("bool", "its truth"), ("ne", "!=")),
    *(("reversed", "reversed()"), ("setitem", "[...] ="), ("delitem", "del"), ("add", "+"), ("radd", "+")),
    *(("mul", "*"), ("rmul", "*"), ("imul", "*="), ("or", "|"), ("ior", "|=")),
):
    setattr(_StandIn, f"__{_name}__", _refusing(_what))


class _Histories(_StandIn):
    """Stands for lists of numbers by name, which TRL has for "train" and for "eval"."""

    def __init__(self, told: list[Any], mode: str) -> None:
        self._told, self._mode = told, mode

    def __getitem__(self, name: str) -> _History:
        return _History(self._told, self._mode, name)

    def __setitem__(self, name: str, values: Any) -> None:
        if isinstance(values, _History) and values.place == (self._mode, name):
            return  # after +=
        self._told.append(("set", self._mode, name, list(values)))

    def _refuse(self, what: str) -> NoReturn:
        raise CaptureError(
            f"the loss uses its metrics ({self._mode}) by {what}, which a replay cannot. Inside of the loss "
            f"_metrics[mode][name] can be appended to, extended and set; do the rest in log() or in a callback, or use "
            f"the trainer without takeback."
        )


class _History(_StandIn):
    def __init__(self, told: list[Any], mode: str, name: str) -> None:
        self._told, self.place = told, (mode, name)

    def append(self, value: Any) -> None:
        self._told.append(("append", *self.place, value))

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)

    def __iadd__(self, values: Any) -> _History:
        self.extend(values)
        return self

    def __getitem__(self, index: int) -> Any:
        mine = [value for how, *place, value in self._told if how == "append" and tuple(place) == self.place]
        if index != -1 or not mine:
            self._refuse(f"[{index}]")
        return mine[-1]

    def _refuse(self, what: str) -> NoReturn:
        mode, name = self.place
        raise CaptureError(
            f"the loss looks at the history of its metric {name!r} ({mode}) by {what}, which a replay has not. Inside "
            f"of the loss it can be appended to, extended and set. Look at it in log() or in a callback, or use the "
            f"trainer without takeback."
        )


class _Metrics(_StandIn):
    """Stands for TRL's `_metrics`."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def __getitem__(self, mode: str) -> _Histories:
        return _Histories(self._told, mode)

    def _refuse(self, what: str) -> NoReturn:
        _Histories(self._told, "all of them")._refuse(what)


class Telling:
    """While a `compute_loss` runs inside of it."""

    def __init__(self) -> None:
        self._told: list[Any] = []
        self._numbers: dict[str, Any] = {}
        self.made: Made = []

    def read(self, name: str) -> Any:
        if name == "_metrics":
            return _Metrics(self._told)
        return self._numbers[name] if name in self._numbers else ToldNumber(("kept", name), self.made)

    def write(self, name: str, value: Any) -> None:
        self._numbers[name] = value

    def data(self) -> list[Any]:
        """Numbers first: what is appended may be computed of them, as they were before."""
        told = [(how, mode, name, _written(value)) for how, mode, name, value in self._told]
        return [*told, *(("number", "", name, _written(value)) for name, value in self._numbers.items())]

    def end(self, homes: Mapping[str, Any]) -> None:
        """After data(): what stands for a value is gone with the loss that computed it. If any is not, somebody keeps
        it who would never be told; `homes` are looked through for its name."""
        self._told, self._numbers = [], {}
        if _alive(self.made):
            gc.collect()  # a cycle may have it that nobody has
        left = _alive(self.made)
        if left:
            kept = _where(left, homes) or "a variable outside of trainer and model"
            raise CaptureError(
                f"compute_loss keeps a value of the step in {kept}. It is known only after the step, and replays, "
                f"which run no Python, would never set it again. Keep it as a metric (self._metrics['train'][name]"
                f".append(...)), which is told after each step, or set it in a callback, or use TRL's trainer without "
                f"takeback."
            )


def _alive(made: Made) -> list[Any]:
    return [value for reference in made if (value := reference()) is not None]


def _where(left: list[Any], homes: Mapping[str, Any]) -> str | None:
    """The shortest name under which one of these is found."""
    wanted = {id(value) for value in left}
    waiting = deque(homes.items())
    seen = {id(left)}
    while waiting:
        name, value = waiting.popleft()
        if id(value) in wanted:
            return name
        if id(value) in seen or isinstance(value, type | torch.Tensor):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting.extend((f"{name}[{key!r}]" if isinstance(key, str | int) else name, v) for key, v in value.items())
        elif isinstance(value, list | tuple | deque):
            waiting.extend((f"{name}[{i}]", v) for i, v in enumerate(value))
        elif isinstance(value, set | frozenset):
            waiting.extend((f"{name}", v) for v in value)
        else:
            with contextlib.suppress(AttributeError):  # past those who look on
                waiting.extend((f"{name}.{key}", v) for key, v in object.__getattribute__(value, "__dict__").items())
    return None


def _written(value: Any) -> Any:
    """What was told, as data: what stands for a value by its reckoning."""
    if isinstance(value, ToldNumber | Picked):
        _check_unwritten(value._reckoning)
        return ("told", value._reckoning)
    if type(value) is tuple:
        return ("tuple", [_written(each) for each in value])
    if type(value) is dict:
        return {name: _written(each) for name, each in value.items()}
    return [_written(each) for each in value] if type(value) is list else value


def tell_(kept: dict[str, Any], told: list[Any]) -> None:
    """Writes into `kept`, the trainer's own."""
    before = dict(kept)

    def known(value: Any) -> Any:
        if type(value) is list:
            return [known(each) for each in value]
        if type(value) is dict:
            return {name: known(each) for name, each in value.items()}
        if type(value) is tuple:
            return evaluated(value[1], before.__getitem__) if value[0] == "told" else tuple(known(value[1]))
        return value

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
    """Around a loss of TRL's: where its own code reads a number, or picks by a mask, it gets what stands for them.
    Who hands such a thing to torch looks at it."""

    def __init__(self, made: Made | None = None) -> None:
        super().__init__()
        self._made: Made = [] if made is None else made

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _real(args), _real(kwargs or {})
        caller = sys._getframe(1)
        computes = caller.f_code.co_name.endswith("compute_loss")  # TRL's, or the user's around it
        if computes or caller.f_globals.get("__name__", "").partition(".")[0] == "trl":
            if func is torch.Tensor.item:
                return ToldNumber(("item", args[0].detach().clone()), self._made)
            if func is torch.Tensor.__getitem__ and computes:
                tensor, index = args
                if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not tensor.requires_grad:
                    return Picked(("pick", tensor, index, _writes(tensor, index)), self._made)
        return func(*args, **kwargs)


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
        telling = Telling()
        with Reading(telling.made):
            yield telling
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
