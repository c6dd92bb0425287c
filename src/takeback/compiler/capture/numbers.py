"""Numbers that the user changes between steps (a temperature, the weight of a term) become numbers that a plan reads
anew in each step, where the step only computes with them.

In: the places of numbers that changed since a plan was recorded. While the step is recorded again, a `TracedNumber`
stands there: it knows what was computed from it, and whether Python asked for its value (`if beta > 0.5`). Out: the
program with a `Number` wherever an operand differs from the older recording by just that. Anything else, and the number
stays an assumption.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from takeback.compiler.capture.assumptions import NumberPlace
from takeback.compiler.capture.batch import map_leaves
from takeback.compiler.capture.handed import Handed
from takeback.compiler.capture.ran import Seen, globals_named, mentioned, origin_of_file
from takeback.compiler.program import Argument, BufferId, Cluster, Number, Op, Phase, Program, Region, Special
from takeback.errors import CaptureError

Formula = Callable[[Sequence[float]], float]

#: Ops whose kernels and derivatives do the same whatever the number is: it is an operand and decides nothing.
_OPERAND_OF = frozenset(
    (
        *("mul", "mul_", "add", "add_", "sub", "sub_", "rsub", "div", "div_", "lerp", "lerp_", "addcmul", "addcmul_"),
        *("addcdiv", "addcdiv_", "masked_fill", "masked_fill_", "fill", "fill_", "where", "clamp", "clamp_min"),
        *("clamp_max", "gt", "ge", "lt", "le", "eq", "ne"),
    )
)
#: Code that mentions these may look at a number where it cannot tell.
_OF_A_MODULE = (ModuleType, BuiltinFunctionType, FunctionType, type, np.ufunc, type(np.clip))
_LOOKS = frozenset(("math", "np", "numpy", "struct", "ctypes", "decimal", "cmath", "__class__"))
_LOOKS_AT_NUMPYS = frozenset(("tensor", "as_tensor", "asarray"))  #: which give a tensor of the number's own dtype


@dataclass
class Trace:
    """What became of the numbers in one recording."""

    places: tuple[NumberPlace, ...]
    values: tuple[float, ...]
    formulas: list[Formula] = field(default_factory=list)
    asked: bool = False  #: Python has looked at the value of one

    @property
    def of_numpy(self) -> bool:
        """Whether one of them is numpy's, which divides by zero where Python raises, and is of another type."""
        return any(type(value) is np.float64 for value in self.values)


class TracedNumber(float):
    """A number that is a function of the places' values. Arithmetic with other numbers gives another one; whatever else
    is asked of it shows its value, and is noted."""

    _trace: Trace
    _formula: Formula

    @classmethod
    def made(cls, value: float, formula: Formula, trace: Trace) -> TracedNumber:
        self = cls(value)
        self._trace, self._formula = trace, formula
        trace.formulas.append(formula)
        return self

    def read(self) -> float:
        """What it is with the numbers that stand in the places now."""
        return float(self._formula([float.__pos__(place.read()) for place in self._trace.places]))


def _arithmetic(name: str) -> Callable[[TracedNumber, Any], Any]:
    plain = getattr(float, name)

    def method(self: TracedNumber, other: Any) -> Any:
        if type(other) not in (int, float, bool, TracedNumber):
            return NotImplemented
        value = plain(self, other)
        if value is NotImplemented or type(value) is not float:
            return value
        self._trace.asked |= self._trace.of_numpy and "div" in name
        mine = self._formula
        theirs: Formula = other._formula if isinstance(other, TracedNumber) else (lambda values: other)
        return TracedNumber.made(value, lambda values: plain(float(mine(values)), theirs(values)), self._trace)

    return method


def _negated(self: TracedNumber) -> TracedNumber:
    mine = self._formula
    return TracedNumber.made(-float.__pos__(self), lambda values: -mine(values), self._trace)


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: TracedNumber, *args: Any) -> Any:
        if origin_of_file(sys._getframe(1).f_code.co_filename) != "takeback":  # who looks on does not count
            self._trace.asked = True
        return plain(self, *args)

    return method


_BINARY = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
for _name in _BINARY:
    setattr(TracedNumber, _name, _arithmetic(_name))
TracedNumber.__neg__ = _negated  # type: ignore[method-assign, assignment]
for _name in (
    *("__bool__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__int__", "__trunc__"),
    *("__floor__", "__ceil__", "__round__", "__repr__", "__str__", "__format__", "__floordiv__", "__rfloordiv__"),
    *("__mod__", "__rmod__", "__divmod__", "__rdivmod__", "__pow__", "__rpow__", "__abs__", "is_integer", "hex"),
    *("as_integer_ratio", "__float__", "conjugate", "__pos__"),
):
    if hasattr(float, _name):
        setattr(TracedNumber, _name, _telling(_name))


@contextlib.contextmanager
def traced(places: Sequence[NumberPlace]) -> Iterator[Trace]:
    """Puts traced numbers in these places, and takes them away again."""
    trace = Trace(tuple(places), tuple(place.read() for place in places))
    try:
        for i, (place, value) in enumerate(zip(trace.places, trace.values, strict=True)):
            place.write_(TracedNumber.made(value, _chosen(i), trace))
        yield trace
    finally:
        put_back_(trace)


def put_back_(trace: Trace) -> None:
    for place, value in zip(trace.places, trace.values, strict=True):
        place.write_(value)


def _chosen(index: int) -> Formula:
    return lambda values: values[index]


def check_out(aux: object, trace: Trace) -> None:
    """Raises where loss_fn returns a number that is numpy's: a traced one would come out as Python's."""
    if trace.of_numpy:
        map_leaves(aux, TracedNumber, _refuse)


def _refuse(number: TracedNumber) -> None:
    raise CaptureError("a number of numpy's is returned")


def may_be_looked_at(seen: Seen, places: Sequence[NumberPlace]) -> bool:
    """Whether code ran that can look at a number unseen, and mentions one of these. Of those that are handed to such
    code it is told by `handed`."""
    names = {place.key for place in places if isinstance(place.key, str)}
    unnamed = any(not isinstance(place.key, str) for place in places)
    of_numpy = any(isinstance(place.then, np.float64) for place in places)
    return any(
        (unnamed or not names.isdisjoint(mentioned(code))) and _looks(code, table, of_numpy=of_numpy)
        for code, table in seen.users_code()
        if places
    )


@functools.cache
def _formats(code: CodeType) -> bool:
    """Whether it writes numbers into a text with `%`."""
    texts = any(isinstance(each, str) and "%" in each for each in code.co_consts)
    return texts and any(i.opname == "BINARY_OP" and i.argrepr == "%" for i in dis.get_instructions(code))


def handed(trace: Trace) -> Handed:
    """Notes where a traced number comes to code that can look at it unseen. An object in whose `__dict__` one was put
    has it under a name, and code that asks for it mentions that."""
    looks = functools.partial(_looks, of_numpy=trace.of_numpy)
    return Handed(TracedNumber, looks, {id(place.container) for place in trace.places})


def _looks(code: CodeType, table: Mapping[str, Any], *, of_numpy: bool) -> bool:
    """Whether code may call a function of C that takes the value of a float without asking for it, or ask for its type.
    `of_numpy`: the float is numpy's."""
    names = mentioned(code)
    if "type" in globals_named(code):  # the function, and no `device.type`
        return True
    if not _LOOKS.isdisjoint(names) or (of_numpy and not _LOOKS_AT_NUMPYS.isdisjoint(names)) or _formats(code):
        return True
    met = [table[name] for name in code.co_names if name in table]
    homes = [v.__name__ if type(v) is ModuleType else v.__module__ for v in met if issubclass(type(v), _OF_A_MODULE)]
    return any(isinstance(name, str) and name.partition(".")[0].lstrip("_") in _LOOKS for name in homes)


def bound(now: Program, trace: Trace, before: Program, then: Sequence[float]) -> Program | None:
    """The program with a `Number` wherever an operand is what a formula gives now, and was what it gave `then` in the
    program recorded before; None where anything else differs."""
    old_ops, new_ops = (tuple(op for op in p.ops if op.phase is not Phase.UPDATE) for p in (before, now))
    if trace.asked or len(old_ops) != len(new_ops):
        return None
    matching = _Matching(
        {(f(trace.values).hex(), f(then).hex()): f for f in trace.formulas}, tuple(place.read for place in trace.places)
    )
    ops = []
    for old, new in zip(old_ops, new_ops, strict=True):
        op = matching.op(new, old)
        if op is None:
            return None
        ops.append(op)
    ops += now.ops[len(new_ops) :]  # clipping: it follows the backward, and its numbers are options of the step
    return replace(now, ops=tuple(ops)) if matching.has_same_tensors(now, before) else None


@dataclass
class _Matching:
    """Two recordings of one step, op by op. Buffers may be numbered otherwise."""

    formulas: Mapping[tuple[str, str], Formula]
    read: Sequence[Callable[[], float]]
    buffers: dict[BufferId, BufferId] = field(default_factory=dict)  #: of the older recording, to those of the newer

    def op(self, new: Op, old: Op) -> Op | None:
        """The newer op, with numbers where they belong; None if it is not the older one."""
        same = new.target is old.target and new.expected == old.expected and new.kwargs.keys() == old.kwargs.keys()
        if not same or len(new.args) != len(old.args) or len(new.results) != len(old.results):
            return None
        args = [self._operand(a, b) for a, b in zip(new.args, old.args, strict=True)]
        kwargs = {name: self._operand(value, old.kwargs[name]) for name, value in new.kwargs.items()}
        found = [a for a in (*args, *kwargs.values()) if isinstance(a, Number)]
        if found and (
            isinstance(new.target, Special | Cluster) or new.target.overloadpacket.__name__ not in _OPERAND_OF
        ):
            return None
        results = [self._operand(a, b) for a, b in zip(new.results, old.results, strict=True)]
        if any(a is _OTHER for a in (*args, *kwargs.values(), *results)):
            return None
        return replace(new, args=tuple(args), kwargs=kwargs) if found else new

    def _operand(self, now: Any, was: Any) -> Any:
        if isinstance(now, Region) and isinstance(was, Region):
            known = self.buffers.setdefault(was.buffer, now.buffer)
            return now if replace(was, buffer=known) == now else _OTHER
        if isinstance(now, tuple) and isinstance(was, tuple):
            if len(now) != len(was):
                return _OTHER
            members = [self._operand(a, b) for a, b in zip(now, was, strict=True)]
            return now if all(m is a for m, a in zip(members, now, strict=True)) else _OTHER
        if type(now) is float and isinstance(was, float):
            formula = self.formulas.get((now.hex(), float.hex(was)))
            if formula is not None:
                return Number.made(now, lambda: float(formula([read() for read in self.read])))
            return now if now.hex() == float.hex(was) and not isinstance(was, Number) else _OTHER
        if type(now) is not type(was):
            return _OTHER
        return now if now == was else _OTHER

    def has_same_tensors(self, now: Program, before: Program) -> bool:
        """Tensors that the step makes of Python's numbers are not operands."""
        for old, new in self.buffers.items():
            if (old in before.externals) is not (new in now.externals):
                return False
            if old in before.externals and not _same_tensor(before.externals[old], now.externals[new]):
                return False
        return True


_OTHER = object()


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.data_ptr() == b.data_ptr():
        return True
    return a.shape == b.shape and a.dtype == b.dtype and a.numel() <= 4096 and bool(torch.equal(a, b))


def _given(op: Op) -> tuple[Argument, ...]:
    return (*op.args, *op.kwargs.values())


def numbers_of(program: Program) -> tuple[Number, ...]:
    """The numbers that a replay has to read."""
    found = (a for op in program.ops for a in _given(op) if isinstance(a, Number))
    return tuple({id(n): n for n in found}.values())
