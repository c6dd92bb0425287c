"""Reads a line of generated code back: the call that it makes, as the program would say it.

In: a statement, as Python's own parser has it, and what each name in it is said to stand for. `check_call` raises
`BorrowError` unless the statement calls the op's kernel, on the op's operands, each in its place, and takes its results
in their order; `check_look` unless a name for some bytes has the geometry that it is said to have. Shares nothing with
the writer of the code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from takeback.compiler.layout import Layout
from takeback.compiler.ownership.facts import FILL, inplace_overload, out_overload
from takeback.compiler.ownership.kinds import Kind
from takeback.compiler.program import Argument, Cluster, HyperScalar, Number, Op, Region, Special
from takeback.compiler.run.bindings import fastest
from takeback.errors import BorrowError

WHAT_TO_DO = "The code must not be run; this is a bug in whatever wrote it."


@dataclass(frozen=True)
class Meant:
    """What the names of the code are said to stand for."""

    claims: Mapping[str, Region]  #: local names, over the buffer whose bytes they are
    borrowed: Mapping[str, Region]  #: names of the user's tensors, and of looks into the batch
    lists: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, object]
    prologue: Sequence[str] = ()  #: lines that look into the batch


@dataclass(frozen=True)
class _CallForm:
    """One way to call an op: these functions do the same."""

    functions: tuple[object, ...]
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    defaults: Mapping[str, object]


def check_call(statement: ast.stmt, op: Op, kind: Kind, position: int, meant: Meant, layout: Layout) -> None:
    """That the statement is the op, and no other."""
    wrong = _ReadBack(op, kind, position, meant, layout).wrong(statement)
    if wrong is not None:
        raise BorrowError(f"op {position}: `{ast.unparse(statement)}` {wrong}. {WHAT_TO_DO}")


class _ReadBack:
    def __init__(self, op: Op, kind: Kind, position: int, meant: Meant, layout: Layout) -> None:
        self.op, self.kind, self.position, self.meant, self.layout = op, kind, position, meant, layout

    def wrong(self, statement: ast.stmt) -> str | None:
        """What is not as the op says, in words; None if all of it is."""
        if self.kind is Kind.HOLD:
            return self._held(statement)
        if self.kind is Kind.RANDOM:
            return self._state(statement)
        value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        if not isinstance(value, ast.Call):
            return "calls nothing"
        if isinstance(statement, ast.Assign):
            wrong = self._targets(statement.targets)
            if wrong is not None:
                return wrong
        if self.kind is Kind.REDUCE:
            number, _, members = self.op.args
            given = [self.read(a) for a in value.args]
            ok = _name(value.func) == "reduce" and self._same(given, [number, members])
            return None if ok else "does not hand over the bucket that is meant"
        if isinstance(value.func, ast.Attribute):
            return self._method(value, value.func)
        return self._function(value)

    def _targets(self, targets: Sequence[ast.expr]) -> str | None:
        """Each name on the left stands for the result at its place."""
        [target] = targets
        names = _leaves(target)
        results = _flat(self.op.results)
        if len(names) != len(results):
            return f"takes {len(names)} results of {len(results)}"
        for name, result in zip(names, results, strict=True):
            if name != "_" and self.meant.claims.get(name) != self._key(result):
                return f"takes another result as {name}"
        return None

    def _function(self, call: ast.Call) -> str | None:
        op, function = self.op, _name(call.func)
        if isinstance(op.target, Cluster):
            if self.meant.constants.get(function) is not op.target:
                return "calls the kernel of another cluster"
            given = [self.read(a) for a in call.args]
            return None if self._same(given, [op.args]) and not call.keywords else "gives it other operands"
        called = self.meant.constants.get(function)
        args = [self.read(a) for a in call.args]
        kwargs = {str(k.arg): self.read(k.value) for k in call.keywords}
        forms = [form for form in self._forms() if any(called == f for f in form.functions)]
        if not forms:
            return "calls another kernel"
        return None if any(self._fits(form, args, kwargs) for form in forms) else "gives it other operands"

    def _fits(self, form: _CallForm, args: list[Any], kwargs: dict[str, Any]) -> bool:
        if not self._same(args, list(form.args)) or not form.kwargs.keys() <= kwargs.keys():
            return False
        if not all(self._same(kwargs[name], value) for name, value in form.kwargs.items()):
            return False
        more = kwargs.keys() - form.kwargs.keys()
        return all(name in form.defaults and kwargs[name] == form.defaults[name] for name in more)

    def _forms(self) -> list[_CallForm]:
        op, target = self.op, self.op.target
        assert not isinstance(target, Special | Cluster)
        found = [_form(target, op.args, op.kwargs)]
        out = out_overload(target) if self.kind is Kind.OUT else None
        if out is not None:
            outs = [a for a in out._schema.arguments if a.is_out]
            one = len(outs) == 1 and str(outs[0].type) == "List[Tensor]"
            named = {outs[0].name: op.results} if one else {a.name: op.results[i] for i, a in enumerate(outs)}
            found.append(_form(out, op.args, {**op.kwargs, **named}))
        instead = inplace_overload(target) if self.kind is Kind.INSTEAD else None
        if instead is not None:
            found.append(_form(instead, op.args, op.kwargs))
        return found

    def _method(self, call: ast.Call, method: ast.Attribute) -> str | None:
        """A fill, or a copy, of the first result's place."""
        given = [self.read(method.value), *map(self.read, call.args)]
        op, result = self.op, self.op.results[0]
        meant: list[Any] = []
        if self.kind is Kind.COPY and method.attr == "copy_":
            meant = [result, op.args[0]]
        elif self.kind is Kind.FILL and method.attr in ("fill_", "zero_"):
            assert not isinstance(op.target, Special | Cluster)
            place, number = FILL[op.target]
            value = number if place is None else op.args[place]
            meant = [result, value] if method.attr == "fill_" else [result]
            if method.attr == "zero_" and value != 0:
                return "fills with another number"
        return None if meant and self._same(given, meant) else "does not give the result its value"

    def _held(self, statement: ast.stmt) -> str | None:
        """if not same_value(CALL, held): raise changed(position)"""
        test = statement.test if isinstance(statement, ast.If) else None
        compared = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
        if not isinstance(compared, ast.Call) or _name(compared.func) != "same_value" or len(compared.args) != 2:
            return "compares nothing"
        call, held = compared.args
        expected = self.read(held)
        if not isinstance(call, ast.Call) or not (expected is self.op.expected or expected == self.op.expected):
            return "compares with another value"
        return self._function(call)

    def _state(self, statement: ast.stmt) -> str | None:
        """r0 = g1.get_state(), and g1.set_state(r0)"""
        slot, generator = self.op.args
        value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return "is no state of a generator"
        if self.meant.constants.get(_name(value.func.value)) is not generator:
            return "is the state of another generator"
        if self.op.target is Special.SAVE_RANDOM:
            kept = _leaves(statement.targets[0]) if isinstance(statement, ast.Assign) else []
            return None if value.func.attr == "get_state" and kept == [f"r{slot}"] else "keeps another state"
        names = [_name(a) for a in value.args]
        return None if value.func.attr == "set_state" and names == [f"r{slot}"] else "brings another state back"

    # -- arguments -------------------------------------------------------------------------------------------------

    def read(self, node: ast.expr) -> Any:
        """An argument, as the program would have it; what cannot be read equals nothing."""
        return _read(node, self.meant)

    def _key(self, argument: Argument) -> Argument:
        if isinstance(argument, Region) and argument.buffer in self.layout.owners:
            return replace(argument, buffer=self.layout.owners[argument.buffer])
        return argument

    def _same(self, given: Any, meant: Any) -> bool:
        """`given` was read back, `meant` is the program's."""
        if isinstance(meant, tuple | list):
            return isinstance(given, tuple | list) and len(given) == len(meant) and all(map(self._same, given, meant))
        if isinstance(meant, Region):
            return isinstance(given, Region) and given == self._key(meant)
        if isinstance(meant, HyperScalar):
            return isinstance(given, _ReadScalar) and given.index == meant.index
        if isinstance(meant, Number):
            return given is meant
        if isinstance(meant, float):
            return type(given) is type(meant) and given.hex() == meant.hex()
        return type(given) is type(meant) and (given is meant or bool(given == meant))


@dataclass(frozen=True)
class _ReadScalar:
    """S[index]"""

    index: int


_UNREAD = object()


def _read(node: ast.expr, meant: Meant) -> Any:
    if isinstance(node, ast.Name):
        if node.id in meant.lists:
            return tuple(meant.borrowed[m] for m in meant.lists[node.id])
        for table in (meant.claims, meant.borrowed, meant.constants):
            if node.id in table:
                return table[node.id]
        return _UNREAD
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_read(each, meant) for each in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value: Any = node.operand.value
        return -value
    if isinstance(node, ast.Subscript) and _name(node.value) == "S" and isinstance(node.slice, ast.Constant):
        return _ReadScalar(int(str(node.slice.value)))
    if isinstance(node, ast.Attribute) and node.attr == "now":
        return _read(node.value, meant)
    return _UNREAD


def _form(target: Any, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> _CallForm:
    functions: tuple[Callable[..., Any], ...] = (fastest(target), target._op)
    rest = target._schema.arguments[len(args) :]
    defaults = {a.name: a.default_value for a in rest if a.has_default_value()}
    return _CallForm(functions, args, kwargs, defaults)


def check_look(name: str, call: ast.Call, meant: Meant, layout: Layout) -> None:
    """That a helper gives a name the geometry that the name is said to have."""
    claim, called = meant.claims[name], _name(call.func)
    args = [_read(a, meant) for a in call.args]
    whole = (tuple(claim.shape), tuple(claim.stride), claim.offset)
    size = layout.program.buffers[claim.buffer].size_bytes
    ok = True
    if called == "as_strided":
        ok = isinstance(args[0], Region) and args[0].dtype is claim.dtype and tuple(args[1:]) == whole
    elif called == "over":
        ok = args[1] is claim.dtype and tuple(args[2:]) == whole
    elif called == "fit":
        ok = args[3] is claim.dtype and tuple(args[4:]) == whole
    elif called == "raw":
        ok = args[0] == size and args[2] is claim.dtype and tuple(args[3:]) == whole
    elif called == "empty_strided":
        dtype = next((_read(k.value, meant) for k in call.keywords if k.arg == "dtype"), None)
        filled = claim.offset == 0 and claim.span_bytes == (0, size)
        ok = filled and dtype is claim.dtype and tuple(args) == whole[:2]
    if not ok:
        raise BorrowError(f"`{name} = {ast.unparse(call)}` is not the look that {name} stands for. {WHAT_TO_DO}")


def check_batch(meant: Meant, layout: Layout) -> None:
    """That each look into the batch (x = look(B[0], dtype, shape, stride, offset)) is the one that x stands for."""
    for text in meant.prologue:
        [statement] = ast.parse(text).body
        assert isinstance(statement, ast.Assign)
        [target], call = statement.targets, statement.value
        region = meant.borrowed.get(_name(target))
        ok = isinstance(call, ast.Call) and _name(call.func) == "look" and region is not None
        if ok and isinstance(call, ast.Call) and region is not None:
            leaf, *geometry = call.args
            ok = isinstance(leaf, ast.Subscript) and isinstance(leaf.slice, ast.Constant)
            ok = ok and ast.unparse(leaf) == f"B[{layout.program.leaves[region.buffer]}]"
            read = tuple(_read(a, meant) for a in geometry)
            ok = ok and read == (region.dtype, tuple(region.shape), tuple(region.stride), region.offset)
        if not ok:
            raise BorrowError(f"`{text}` is not the look into the batch that is meant. {WHAT_TO_DO}")


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _leaves(target: ast.expr) -> list[str]:
    """The names on the left of an assignment, in order."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for each in target.elts for name in _leaves(each)]
    return [_name(target)]


def _flat(results: Argument) -> list[Argument]:
    if isinstance(results, tuple | list):
        return [each for part in results for each in _flat(part)]
    return [results]
