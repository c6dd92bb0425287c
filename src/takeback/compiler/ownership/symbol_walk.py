"""A program is walked op by op with symbols in place of values: equal symbols are equal values, in whatever bytes.

In: a program. Out: what its buffers hold in the end (contents.py), the random state, what was read into Python. What
passes may change without changing a value (meaning.py says what that is) does not change a symbol.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch

from takeback.compiler.ownership.contents import Contents, Symbol, SymbolTable, WriteLayer
from takeback.compiler.ownership.facts import COPY, EMPTY, FILL
from takeback.compiler.program import (
    Argument,
    BufferId,
    HyperScalar,
    Number,
    Op,
    OpOverload,
    Phase,
    Program,
    Region,
    Role,
    Special,
    regions,
)
from takeback.compiler.schema import once_for_each, schema_of

aten = torch.ops.aten

#: Ops that treat every row by itself: operand 1 are rows of a buffer, and so is whatever else has as many.
_BY_ROWS = frozenset(("nll_loss_backward", "_log_softmax_backward_data"))
_BATCH_NORMS = frozenset((aten.native_batch_norm.default, aten.cudnn_batch_norm.default))
_NORM_NAMES = frozenset(str(target) for target in _BATCH_NORMS)
_LAYER_NORM = "aten.native_layer_norm.default"

_STEPS_OF_A_NORM = frozenset(("aten.sub.Tensor", "aten.mul.Tensor", "aten.add.Tensor"))

#: By result, what it does not look at.
_UNREAD = {
    "convolution_backward": (
        frozenset(("input", "output_mask")),
        frozenset(("weight", "output_mask")),
        frozenset(("input", "weight", "output_mask")),
    )
}

#: Arguments that are themselves. Others are told apart by their identity: passes hand them on.
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class MeaningError(AssertionError):
    """The passes made another step of the one that was recorded: a bug of takeback's, never the user's."""


class SymbolWalk:
    """One program, walked from its first op to its last. `fills`: what an op fills with a number is the same value,
    whatever tensor it is made like."""

    def __init__(self, table: SymbolTable, program: Program, *, fills: bool = False) -> None:
        self.program, self.contents = program, Contents(table, program.buffers)
        self.random: dict[object, Symbol] = {}  #: by generator: its state, where it is not as it was
        self.held: list[Symbol] = []  #: what was read into Python, and might be another value in another step
        self._varies: set[BufferId] = {b for b, buffer in program.buffers.items() if buffer.role is not Role.INTERNAL}
        self.made: list[tuple[Symbol, Op]] = []
        self._table, self._fills = table, fills
        self._saved: dict[object, Symbol] = {}
        self._norms: dict[Symbol, tuple[Symbol, object]] = {}  # what each result of a norm is
        self._partly: dict[Symbol, tuple[Symbol, str]] = {}  # of which layer norm a value is a part, and how far

    def walk(self, averaged: Collection[int] = ()) -> None:
        """`averaged`: of these parameters the gradients are averaged over a group before the update."""
        waits = bool(averaged)
        for op in self.program.ops:
            if waits and op.phase is Phase.UPDATE:
                self._average(averaged)
                waits = False
            self.step(op)
        if waits:
            self._average(averaged)

    def step(self, op: Op) -> None:
        """One op."""
        if isinstance(op.target, Special):
            self._special(op)
            return
        facts = _facts(op.target)
        if facts.is_empty:
            for region in op.outputs:
                self.contents.forget(region.buffer)
                self._varies.add(region.buffer)  # until it is written, whatever is there
        else:
            self._run(op, facts)

    def varies(self, b: BufferId) -> bool:
        """Whether a buffer may hold something else in another step."""
        return b in self._varies

    def leave_(self, b: BufferId, layers: tuple[WriteLayer, ...], *, varies: bool) -> None:
        """What ops that are not walked leave in a buffer."""
        self.contents.replace(b, layers)
        if varies:
            self._varies.add(b)
        else:
            self._varies.discard(b)

    def _average(self, parameters: Collection[int]) -> None:
        places = dict.fromkeys(self.program.grads[i] for i in sorted(parameters) if i in self.program.grads)
        symbols = [self.contents.read(region) for region in places]
        for region, symbol in zip(places, symbols, strict=True):
            layers = self.contents.layers(region.buffer)
            if len(layers) == 1 and self.contents.is_whole(region):
                averaged = self._table.of("average", layers[0].symbol)
                self.contents.replace(region.buffer, (replace(layers[0], symbol=averaged),))
            else:
                self.contents.write(region, self._table.of("average", symbol))

    # -- ops that are no kernels -----------------------------------------------------------------------------------

    def _special(self, op: Op) -> None:
        if op.target is Special.SAVE_RANDOM:
            self._saved[op.args[0]] = self._state(op.args[1])
        elif op.target is Special.RESTORE_RANDOM:
            self.random[_generator(op.args[1])] = self._saved[op.args[0]]
        elif op.target is Special.REDUCE:
            for region in op.inputs:
                self._wrap(region, "on its way", op)
        else:
            everything = {r.buffer for r in (*self.program.slices.values(), self.program.flags) if r is not None}
            if everything != {r.buffer for r in op.inputs}:
                raise MeaningError("the group is not waited for with all slices")
            for region in op.inputs:
                self._wrap(region, "average", op)

    def _wrap(self, region: Region, name: str, op: Op) -> None:
        """What a slice holds becomes what the group makes of it. It is seen as a flat tensor, and keeps its form."""
        if not self.contents.is_whole(region):
            raise MeaningError(f"{op.name} is given a part of %{region.buffer}")
        layers: list[WriteLayer] = []
        for layer in self.contents.layers(region.buffer):
            symbol = layer.symbol
            kind, *inside = self._table.expression(symbol)
            if name == "average":
                if kind != "on its way":
                    raise MeaningError(f"%{region.buffer} is awaited, and was not handed over to the group")
                assert isinstance(inside[0], int)
                symbol = inside[0]
            layers.append(replace(layer, symbol=self._table.of(name, symbol)))
        self.contents.replace(region.buffer, tuple(layers))

    # -- kernels ---------------------------------------------------------------------------------------------------

    def _run(self, op: Op, facts: _TargetFacts) -> None:
        given = list(zip(facts.parameters, op.args, strict=False))
        if op.kwargs:
            given += sorted(op.kwargs.items())
        operands = tuple((name, self._symbols(value)) for name, value in given if name not in facts.outs)
        whole = self._by_rows(op, facts) if facts.by_rows else None
        made, rows = whole if whole is not None else (self._expression(op, facts, operands), None)
        self.made.append((made, op))
        given_by_numbers = self._follows_from_numbers(op, facts)
        if op.may_send_back and not given_by_numbers:
            self.held.append(made)
        if facts.copies and self._copied_whole(op):
            return
        copied = self._copied(op) if facts.copies else None
        writes: list[tuple[Region, Symbol]] = []
        for place, region in _numbered(op.results):
            symbol = self._table.of("result", made, place)
            if facts.unread:
                symbol = self._alone(op, facts, given, place)
            if facts.norms or facts.name == _LAYER_NORM:
                self._norms[symbol] = (made, place)
            if rows is not None:
                symbol = self._table.of("rows", symbol, *rows)
            writes.append((region, symbol if copied is None else copied))
        if op.mutates:
            writes += self._mutations(op, facts, given, made, operands, {region for region, _ in writes})
        trained = self._trained(op, facts) if facts.norms else None
        if facts.name in _STEPS_OF_A_NORM and not op.mutates:
            trained = self._normed(op, facts, writes[0][1])
        if trained is not None:
            writes[0] = (writes[0][0], trained)
        for region, symbol in writes:
            self.contents.write(region, symbol)
            if rows is not None:
                self._join_rows(region, rows)

    def _follows_from_numbers(self, op: Op, facts: _TargetFacts) -> bool:
        """Whether an op gives the same in every step; what it writes varies, or not, from here on."""
        reads = {r.buffer for r in op.inputs} | set(op.mutates)
        anew = any(isinstance(a, Number) for a in (*op.args, *op.kwargs.values()))
        same = not (facts.draws or anew or not facts.name.startswith("aten.") or reads & self._varies)
        for b in (*op.mutates, *(r.buffer for r in op.outputs)):
            if not same:
                self._varies.add(b)
            elif b not in reads:
                self._varies.discard(b)
        return same

    def _alone(self, op: Op, facts: _TargetFacts, given: list[tuple[str, Argument]], place: object) -> Symbol:
        """A result of an op that is told which ones to give: each is the same, whatever else is asked for."""
        assert isinstance(place, int)
        operands: list[object] = []
        for name, value in given:
            if name not in facts.unread[place]:
                operands.append((name, self._symbols(value)))
            elif isinstance(value, Region):
                operands.append((name, value.dtype, value.shape, value.stride))
        return self._table.of(facts.name, tuple(operands), place)

    def _mutations(
        self,
        op: Op,
        facts: _TargetFacts,
        given: list[tuple[str, Argument]],
        made: Symbol,
        operands: tuple[tuple[str, object], ...],
        returned: Collection[Region],
    ) -> Iterator[tuple[Region, Symbol]]:
        """The operands that an op writes and does not return: those that its schema names, or where it names none of a
        buffer, all looks at it (some kernels write what their schema does not say)."""
        declared = {r.buffer for name, value in given if name in facts.written for r in regions(value)}
        whole = self._table.of("with statistics", made, operands) if facts.norms else made
        for name, value in given:
            for k, region in enumerate(regions(value)):
                said = name in facts.written or region.buffer not in declared
                if region.buffer in op.mutates and said and region not in returned:
                    yield region, self._table.of("written", whole, name, k)

    def _expression(self, op: Op, facts: _TargetFacts, operands: tuple[tuple[str, object], ...]) -> Symbol:
        if facts.norms and bool(op.args[5]):
            # What a training norm gives does not depend on the running statistics that it updates.
            operands = tuple((n, v) for n, v in operands if n not in ("running_mean", "running_var", "momentum"))
        if not _draws(op, facts):
            filled = _filled(op) if facts.fills and self._fills else None
            return self._table.of(facts.name, operands) if filled is None else self._table.of("filled", *filled)
        given = (*zip(facts.parameters, op.args, strict=False), *op.kwargs.items())
        generator = next((value for name, value in given if name == "generator"), None)
        made = self._table.of(facts.name, operands, "drawn from", self._state(generator))
        self.random[_generator(generator)] = self._table.of("after", made)
        return made

    def _state(self, generator: Argument) -> Symbol:
        key = _generator(generator)
        return self.random.setdefault(key, self._table.of("state of", key))

    def _symbols(self, argument: Argument) -> object:
        kind = type(argument)
        if kind is Region:
            assert isinstance(argument, Region)
            held = self.contents.read(argument)
            return self._table.of("tensor", held, argument.dtype, argument.shape, argument.stride)
        if kind is tuple:
            assert isinstance(argument, tuple)
            return tuple(map(self._symbols, argument))
        if kind in _PLAIN:
            return (kind, argument)  # with its type: True is 1, and 1.0 too
        if isinstance(argument, HyperScalar):
            return ("scalar", argument.index)
        if isinstance(argument, Number):
            return ("number", id(argument))
        if isinstance(argument, float):
            return ("float", argument.hex())
        return ("object", id(argument))

    def _copied_whole(self, op: Op) -> bool:
        """Whether a copy is of a whole buffer, byte by byte: then it holds what that one holds, in the same places."""
        source, result = op.args[0], op.results[0]
        assert isinstance(source, Region)
        assert isinstance(result, Region)
        held = self.contents.layers(source.buffer)
        whole = self.contents.is_whole(source) and self.contents.is_whole(result)
        if not held or not whole or not source.same_place(result) or op.mutates:
            return False
        moved = (replace(layer, region=replace(layer.region, buffer=result.buffer)) for layer in held)
        self.contents.replace(result.buffer, tuple(moved))
        return True

    def _copied(self, op: Op) -> Symbol | None:
        """The value that a copy is a copy of."""
        source, result = op.args[0], op.results[0]
        assert isinstance(source, Region)
        assert isinstance(result, Region)
        alike = source.dtype == result.dtype and source.shape == result.shape
        return self.contents.read(source) if alike else None

    def _by_rows(self, op: Op, facts: _TargetFacts) -> tuple[Symbol, tuple[int, int, int]] | None:
        """Of an op on some rows: the op on all of them, and which rows these are (first, how many, of how many)."""
        values, result = op.args[1], op.results[0]
        if not isinstance(values, Region) or not isinstance(result, Region) or len(values.shape) != 2:
            return None
        row_bytes = values.shape[1] * values.dtype.itemsize
        total = self.program.buffers[values.buffer].size_bytes // max(1, row_bytes)
        if values.stride != (values.shape[1], 1) or total <= values.shape[0] or values.offset % values.shape[1]:
            return None
        rows = (values.offset // values.shape[1], values.shape[0], total)
        whole: list[object] = []
        for position, argument in enumerate(op.args):
            symbol: object = self._symbols(argument)
            if position == 1:
                symbol = self._whole_rows(values, rows, under=True)
            elif isinstance(argument, Region) and argument.shape[:1] == values.shape[:1]:
                symbol = self._whole_rows(argument, rows, under=False)
            if symbol is None:
                return None
            whole.append(symbol)
        return self._table.of(facts.name, tuple(zip(facts.parameters, whole, strict=False))), rows

    def _whole_rows(self, region: Region, rows: tuple[int, int, int], *, under: bool) -> Symbol | None:
        """The tensor that these are rows of."""
        first, _, total = rows
        shape, begin = (total, *region.shape[1:]), region.offset - first * region.stride[0]
        kind, *inside = self._table.expression(self.contents.read(region))
        if kind == "rows" and tuple(inside[1:]) == rows:
            symbol = inside[0]
        elif begin < 0 and not self.program.buffers[region.buffer].role.borrowed:
            return None
        else:
            all_rows = replace(region, shape=shape, offset=begin)
            symbol = self.contents.read_under(region, all_rows) if under else self.contents.read(all_rows)
        if symbol is None:
            return None
        return self._table.of("tensor", symbol, region.dtype, shape, region.stride)

    def _join_rows(self, region: Region, rows: tuple[int, int, int]) -> None:
        """When all rows of a result are there, they are the result."""
        whole = replace(region, shape=(rows[2], *region.shape[1:]), offset=0)
        if not self.contents.is_whole(whole):
            return
        expressions = [self._table.expression(layer.symbol) for layer in self.contents.layers(region.buffer)]
        found = [e for e in expressions if e[0] == "rows"]
        if len({e[1] for e in found}) == 1 and _all_of(rows[2], [(e[2], e[3]) for e in found]):
            symbol = found[0][1]
            assert isinstance(symbol, int)
            self.contents.write(whole, symbol)

    def _trained(self, op: Op, facts: _TargetFacts) -> Symbol | None:
        """Of a batch norm in its form for evaluation, on the mean and inverse deviation that one for training has saved
        for the same operands: the result of that. (invstd * weight for a weight, 1 for a variance, 0 for eps.)"""
        if bool(op.args[5]) or op.args[6:8] != (0.0, 0.0):
            return None
        x, weight, bias, mean, ones = op.args[:5]
        if not isinstance(mean, Region) or not isinstance(weight, Region) or not isinstance(ones, Region):
            return None
        made, place = self._norms.get(self.contents.read(mean), (None, None))
        if made is None or place != 1:
            return None
        name, operands = self._table.expression(made)[:2]
        assert isinstance(operands, tuple)
        trained = dict(operands)
        deviation = self._table.of("result", made, 2)
        held = self._table.of("tensor", deviation, mean.dtype, mean.shape, mean.stride)
        like: tuple[object, ...] = ("aten.ones_like.default", (("self", held),))
        if self._fills:
            like = ("filled", float(1).hex(), (mean.dtype, mean.shape))
        one = self._table.of("result", self._table.of(*like), 0)
        scale = deviation
        if trained.get("weight") != (type(None), None):
            product = self._table.of("aten.mul.Tensor", (("self", held), ("other", trained.get("weight"))))
            scale = self._table.of("result", product, 0)
        same = (
            name in _NORM_NAMES
            and trained.get("training") == (bool, True)
            and trained.get("input") == self._symbols(x)
            and trained.get("bias") == self._symbols(bias)
            and self.contents.read(ones) == one
            and self.contents.read(weight) == scale
        )
        return self._table.of("result", made, 0) if same else None

    def _normed(self, op: Op, facts: _TargetFacts, symbol: Symbol) -> Symbol | None:
        """Of the last of the steps that make a layer norm's result of the mean and inverse deviation that it gave,
        x - mean, * invstd, * weight, + bias: that result. `symbol` is what the step gives by itself."""
        value, other = op.args[:2]
        if len(op.args) != 2 or op.kwargs or not isinstance(value, Region) or not isinstance(other, Region):
            return None
        held = self.contents.read(other)
        if facts.name == "aten.sub.Tensor":
            made, place = self._norms.get(held, (None, None))
            if made is not None and place == 1 and self._operand(made, "input") == self._symbols(value):
                self._partly[symbol] = (made, "centred")
            return None
        made, done = self._partly.get(self.contents.read(value), (None, ""))
        if made is None or not self.contents.is_whole(value):
            return None
        plain = (type(None), None)
        if facts.name == "aten.add.Tensor":
            ready = done == "weighted" and self._operand(made, "bias") == self._symbols(other)
            return self._table.of("result", made, 0) if ready else None
        if done == "centred" and self._norms.get(held) == (made, 2):
            done = "weighted" if self._operand(made, "weight") == plain else "scaled"
        elif done == "scaled" and self._operand(made, "weight") == self._symbols(other):
            done = "weighted"
        else:
            return None
        if done == "weighted" and self._operand(made, "bias") == plain:
            return self._table.of("result", made, 0)
        self._partly[symbol] = (made, done)
        return None

    def _operand(self, made: Symbol, name: str) -> object:
        """Of a layer norm."""
        kind, operands = self._table.expression(made)[:2]
        assert isinstance(operands, tuple)
        return dict(operands).get(name) if kind == _LAYER_NORM else None


def _all_of(total: int, parts: list[tuple[object, object]]) -> bool:
    at = 0
    for first, count in sorted((f, c) for f, c in parts if isinstance(f, int) and isinstance(c, int)):
        if first > at:
            return False
        at = max(at, first + count)
    return at == total


@dataclass(frozen=True, slots=True)
class _TargetFacts:
    """What is asked of an operator in every op, found once."""

    name: str  #: the same for an op, its in-place form, and (of ops by rows) its form with `out=`
    parameters: tuple[str, ...]
    written: frozenset[str]  #: arguments that the schema writes
    outs: frozenset[str]  #: those that are `out=` ones
    is_empty: bool
    copies: bool
    fills: bool
    norms: bool
    by_rows: bool
    draws: bool  #: it is tagged so
    unread: tuple[frozenset[str], ...]  #: by result: operands of which it depends on no more than the geometry


@once_for_each
def _facts(target: OpOverload) -> _TargetFacts:
    schema = schema_of(target)
    in_place = schema.name.endswith("_") and not schema.name.endswith("__") and schema.parameters[0].is_written
    name = f"{target.namespace}.{schema.name[:-1] if in_place else schema.name}"
    by_rows = schema.name in _BY_ROWS
    return _TargetFacts(
        name if by_rows else f"{name}.{schema.overload}",
        tuple(p.name for p in schema.parameters),
        frozenset(p.name for p in schema.parameters if p.is_written),
        frozenset(p.name for p in schema.parameters if p.is_out),
        target in EMPTY,
        target in COPY,
        target in FILL,
        target in _BATCH_NORMS,
        by_rows,
        torch.Tag.nondeterministic_seeded in target.tags,
        _UNREAD.get(schema.name, ()),
    )


def _filled(op: Op) -> tuple[object, ...] | None:
    """What a fill gives, whatever tensor it is like: a number, as a dtype, in a shape. None if the number is read anew
    in each step."""
    assert not isinstance(op.target, Special)
    at, number = FILL[op.target]
    given: Argument = number if at is None else op.args[at]
    if type(given) not in (int, float, bool):
        return None
    assert isinstance(given, int | float)
    return (float(given).hex(), *((r.dtype, r.shape) for r in op.outputs))


def _numbered(results: tuple[Argument, ...]) -> Iterator[tuple[object, Region]]:
    """Every region among the results, by its place."""
    for i, result in enumerate(results):
        if type(result) is Region:
            yield i, result
        else:
            yield from (((i, k), region) for k, region in enumerate(regions(result)))


def _mutated(op: Op, given: list[tuple[str, Argument]], written: Collection[str]) -> Iterator[tuple[str, int, Region]]:
    """The operands that an op writes: those that its schema names, or where it names none of a buffer, all looks at it
    (some kernels write what their schema does not say)."""
    declared = {r.buffer for name, value in given if name in written for r in regions(value)}
    for name, value in given:
        for k, region in enumerate(regions(value)):
            if region.buffer in op.mutates and (name in written or region.buffer not in declared):
                yield name, k, region


def _draws(op: Op, facts: _TargetFacts) -> bool:
    """Whether an op draws random numbers. Attention without dropout does not, though it is tagged so."""
    if not facts.draws or "dropout_p" not in facts.parameters:
        return facts.draws
    place = facts.parameters.index("dropout_p")
    return (op.args[place] if len(op.args) > place else op.kwargs.get("dropout_p", 0.0)) != 0.0


def _generator(generator: Argument) -> object:
    """What tells generators apart. Ops that are given none draw from a default one."""
    if generator is None or generator is torch.default_generator:
        return "default"
    return id(generator)
