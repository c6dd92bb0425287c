"""A recorded program and a planned one come in; a `MeaningError` if the planned one gives anything else than that.

The borrow check proves that a plan does what its program says. That the program still says what was recorded is proved
here: both are walked op by op with symbols in place of values (contents.py), and what they leave behind must have the
same ones: every tensor of the user's, the random state, what is returned, what is read into Python. An op
that reads another operand, or comes before a write that it must come after, makes another symbol.

Of the passes it knows what each may change without changing a value, and shares no code with them:

    functionalize, chunk_loss   an op has one name, whether it returns its result or writes it into bytes that are given
    move                        a copy is the value it is a copy of
    chunk_loss                  the backward of a loss treats each row by itself, so rows of the result are all of it
    reduce                      from REDUCE to WAIT a slice is on its way; after it, the average of what it was
    advance                     order matters only where one op reads or writes what the other writes
    recompute                   the same op on the same values is the same value, unless it draws random numbers; a
                                batch norm in its form for evaluation is that for training, on the statistics of that
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from takeback.compiler.ownership.contents import Contents, Layer, Symbol, SymbolTable
from takeback.compiler.ownership.facts import COPY, EMPTY
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
    Special,
    regions,
    show_op,
)
from takeback.compiler.schema import once_for_each, schema_of

aten = torch.ops.aten

#: Ops that treat every row by itself, and their operands that have rows: the first of them is whole in its buffer.
_BY_ROWS = {"nll_loss_backward": (1, 2), "_log_softmax_backward_data": (1,)}
_BATCH_NORMS = frozenset((aten.native_batch_norm.default, aten.cudnn_batch_norm.default))


class MeaningError(AssertionError):
    """The passes made another step of the one that was recorded: a bug of takeback's, never the user's."""


def check_meaning(
    recorded: Program,
    planned: Program,
    kept: Collection[BufferId] = (),
    still_kept: Collection[BufferId] = (),
) -> None:
    """Raises `MeaningError` unless both programs give the same. `kept` are buffers that must last to the end of the
    recorded program, `still_kept` those of the planned one."""
    table = SymbolTable()
    then, now = _Walk(table, recorded), _Walk(table, planned)
    then.walk(averaged=planned.slices.keys())
    now.walk()
    wrong = _difference(then, now) or _lost(recorded, planned, kept, still_kept)
    if wrong is not None:
        raise MeaningError(f"{wrong}{_first_new(then, now)}")


def _difference(then: _Walk, now: _Walk) -> str | None:
    """The first thing that is not the same in the end, in words."""
    for b, buffer in then.program.buffers.items():
        if buffer.role.borrowed and then.contents.final(b) != now.contents.final(b):
            return f"the planned step leaves something else in {buffer.role.value} {buffer.name or f'%{b}'}"
    if then.random != now.random:
        return "the planned step draws other random numbers"
    if then.held != now.held:
        return "the planned step reads other values into Python"
    theirs = then.program
    ours = now.program
    fields = {
        "loss": ([theirs.loss], [ours.loss]),
        "aux": (theirs.aux, ours.aux),
        "grad_norm": ([theirs.grad_norm], [ours.grad_norm]),
        "found_inf": ([theirs.found_inf], [ours.found_inf]),
        "grads": ([theirs.grads[i] for i in sorted(theirs.grads)], [ours.grads[i] for i in sorted(ours.grads)]),
    }
    for name, (before, after) in fields.items():
        if [r and then.contents.read(r) for r in before] != [r and now.contents.read(r) for r in after]:
            return f"the planned step gives another {name}"
    return None


def _lost(recorded: Program, planned: Program, kept: Collection[BufferId], still_kept: Collection[BufferId]) -> str | None:
    """A gradient, or the scaler's flag, that was to be kept and is not."""
    for i, region in recorded.grads.items():
        if region.buffer in kept and planned.grads[i].buffer not in still_kept:
            return f"the gradient of parameter {i} is not kept any more"
    flag, here = recorded.found_inf, planned.found_inf
    if flag is not None and here is not None and flag.buffer in kept and here.buffer not in still_kept:
        return "what the scaler found is not kept any more"
    return None


def _first_new(then: _Walk, now: _Walk) -> str:
    """The first op that makes something which the recorded step never made."""
    known = {made for made, _ in then.made}
    for made, op in now.made:
        if made not in known:
            return f"; {show_op(op, now.program.buffers)[:200]} is the first op that was not recorded like this"
    return ""


class _Walk:
    """One program, walked from its first op to its last."""

    def __init__(self, table: SymbolTable, program: Program) -> None:
        self.program, self.contents = program, Contents(table, program.buffers)
        self.random: dict[object, Symbol] = {}  #: by generator: its state, where it is not as it was
        self.held: list[Symbol] = []  #: what was read into Python
        self.made: list[tuple[Symbol, Op]] = []
        self._table = table
        self._saved: dict[object, Symbol] = {}
        self._results: dict[Symbol, tuple[Symbol, object]] = {}

    def walk(self, averaged: Collection[int] = ()) -> None:
        """`averaged`: of these parameters the gradients are averaged over a group before the update."""
        waits = bool(averaged)
        for op in self.program.ops:
            if waits and op.phase is Phase.UPDATE:
                self._average(averaged)
                waits = False
            if isinstance(op.target, Special):
                self._special(op)
            elif op.target in EMPTY:
                for region in op.outputs:
                    self.contents.forget(region.buffer)
            else:
                self._run(op, op.target)
        if waits:
            self._average(averaged)

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
        """What a slice holds becomes what the group makes of it. It is looked at as a flat tensor, and keeps its form."""
        if not self.contents.is_whole(region):
            raise MeaningError(f"{op.name} is given a part of %{region.buffer}")
        layers: list[Layer] = []
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

    def _run(self, op: Op, target: OpOverload) -> None:
        names = _written_names(target)
        given = list(_named_arguments(op, target))
        outs = {name for name, is_out in names if is_out}
        operands = tuple((name, self._symbols(value)) for name, value in given if name not in outs)
        copied = self._copied(op, target)
        by_rows = self._by_rows(op, target)
        if by_rows is not None:
            made, rows = by_rows
        else:
            made, rows = self._expression(op, target, operands), None
        self.made.append((made, op))
        if op.expected is not None:
            self.held.append(made)
        writes: list[tuple[Region, Symbol]] = []
        for place, region in _numbered(op.results):
            symbol = self._table.of("result", made, place)
            self._results[symbol] = (made, place)
            writes.append((region, symbol))
        if rows is not None:
            writes = [(region, self._table.of("rows", symbol, *rows)) for region, symbol in writes]
        elif copied is not None:
            writes = [(region, copied) for region, _ in writes]
        normed = self._trained(op, target)
        if normed is not None:
            writes[0] = (writes[0][0], normed)
        returned = {region for region, _ in writes}
        full = self._table.of("with statistics", made, operands) if target in _BATCH_NORMS else made
        for name, k, region in _mutated(op, given, {name for name, _ in names}):
            if region not in returned:
                writes.append((region, self._table.of("written", full, name, k)))
        for region, symbol in writes:
            self.contents.write(region, symbol)
            if rows is not None:
                self._join_rows(region, rows)

    def _expression(self, op: Op, target: OpOverload, operands: tuple[tuple[str, object], ...]) -> Symbol:
        name = _name(target)
        if target in _BATCH_NORMS and bool(op.args[5]):
            # What a training norm gives does not depend on the running statistics that it updates.
            operands = tuple((n, v) for n, v in operands if n not in ("running_mean", "running_var", "momentum"))
        if not _draws(op, target):
            return self._table.of(name, operands)
        generator = next((v for n, v in _named_arguments(op, target) if n == "generator"), None)
        state = self._state(generator)
        made = self._table.of(name, operands, "drawn from", state)
        self.random[_generator(generator)] = self._table.of("after", made)
        return made

    def _state(self, generator: Argument) -> Symbol:
        key = _generator(generator)
        return self.random.setdefault(key, self._table.of("state of", key))

    def _symbols(self, argument: Argument) -> object:
        if isinstance(argument, Region):
            return self._table.of("tensor", self.contents.read(argument), argument.dtype, argument.shape, argument.stride)
        if isinstance(argument, tuple):
            return tuple(self._symbols(part) for part in argument)
        if isinstance(argument, HyperScalar):
            return ("scalar", argument.index)
        if isinstance(argument, Number):
            return ("number", id(argument))
        if isinstance(argument, float):
            return ("float", argument.hex())
        try:
            hash(argument)
        except TypeError:
            return ("object", id(argument))
        return (type(argument).__name__, argument)

    def _copied(self, op: Op, target: OpOverload) -> Symbol | None:
        """The value that a copy is a copy of."""
        source, result = op.args[0] if op.args else None, op.results[0] if op.results else None
        if target not in COPY or not isinstance(source, Region) or not isinstance(result, Region):
            return None
        alike = source.dtype == result.dtype and source.shape == result.shape
        return self.contents.read(source) if alike else None

    def _by_rows(self, op: Op, target: OpOverload) -> tuple[Symbol, tuple[int, int, int]] | None:
        """Of an op on some rows: the op on all of them, and which rows these are (first, how many, of how many)."""
        places = _BY_ROWS.get(schema_of(target).name)
        values, result = op.args[1] if len(op.args) > 1 else None, op.results[0] if op.results else None
        if places is None or not isinstance(values, Region) or not isinstance(result, Region) or len(values.shape) != 2:
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
        names = [p.name for p in schema_of(target).parameters]
        return self._table.of(_name(target), tuple(zip(names, whole, strict=False))), rows

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

    def _trained(self, op: Op, target: OpOverload) -> Symbol | None:
        """Of a batch norm in its form for evaluation, on the mean and inverse deviation that one for training has saved
        for the same operands: the result of that. (invstd * weight for a weight, 1 for a variance, 0 for eps.)"""
        if target not in _BATCH_NORMS or bool(op.args[5]) or op.args[6:8] != (0.0, 0.0):
            return None
        x, weight, bias, mean, ones = op.args[:5]
        if not isinstance(mean, Region) or not isinstance(weight, Region) or not isinstance(ones, Region):
            return None
        made, place = self._results.get(self.contents.read(mean), (None, None))
        if made is None or place != 1:
            return None
        name, operands = self._table.expression(made)[:2]
        assert isinstance(operands, tuple)
        trained = dict(operands)
        deviation = self._table.of("result", made, 2)
        held = self._table.of("tensor", deviation, mean.dtype, mean.shape, mean.stride)
        one = self._table.of("result", self._table.of("aten.ones_like.default", (("self", held),)), 0)
        scale = deviation
        if trained.get("weight") != ("NoneType", None):
            product = self._table.of("aten.mul.Tensor", (("self", held), ("other", trained.get("weight"))))
            scale = self._table.of("result", product, 0)
        same = (
            name == _name(target)
            and trained.get("training") == ("bool", True)
            and trained.get("input") == self._symbols(x)
            and trained.get("bias") == self._symbols(bias)
            and self.contents.read(ones) == one
            and self.contents.read(weight) == scale
        )
        return self._table.of("result", made, 0) if same else None


def _all_of(total: int, parts: list[tuple[object, object]]) -> bool:
    at = 0
    for first, count in sorted((f, c) for f, c in parts if isinstance(f, int) and isinstance(c, int)):
        if first > at:
            return False
        at = max(at, first + count)
    return at == total


@once_for_each
def _name(target: OpOverload) -> str:
    """The same for an op, its in-place form, and (of ops by rows) its form with `out=`."""
    schema = schema_of(target)
    if schema.name in _BY_ROWS:
        return f"{target.namespace}.{schema.name}"
    in_place = schema.name.endswith("_") and not schema.name.endswith("__") and schema.parameters[0].is_written
    return f"{target.namespace}.{schema.name[:-1] if in_place else schema.name}.{schema.overload}"


@once_for_each
def _written_names(target: OpOverload) -> tuple[tuple[str, bool], ...]:
    """The arguments that the schema writes, and whether each is an `out=` one."""
    return tuple((p.name, p.is_out) for p in schema_of(target).parameters if p.is_written)


def _named_arguments(op: Op, target: OpOverload) -> Iterator[tuple[str, Argument]]:
    names = [p.name for p in schema_of(target).parameters]
    yield from zip(names, op.args, strict=False)
    yield from sorted(op.kwargs.items())


def _numbered(results: tuple[Argument, ...]) -> Iterator[tuple[object, Region]]:
    """Every region among the results, by its place."""
    for i, result in enumerate(results):
        if isinstance(result, Region):
            yield i, result
        else:
            yield from (((i, k), region) for k, region in enumerate(regions(result)))


def _mutated(
    op: Op, given: list[tuple[str, Argument]], written: Collection[str]
) -> Iterator[tuple[str, int, Region]]:
    """The operands that an op writes: those that its schema names, or where it names none of a buffer, all looks at it
    (some kernels write what their schema does not say)."""
    declared = {r.buffer for name, value in given if name in written for r in regions(value)}
    for name, value in given:
        for k, region in enumerate(regions(value)):
            if region.buffer in op.mutates and (name in written or region.buffer not in declared):
                yield name, k, region


def _draws(op: Op, target: OpOverload) -> bool:
    """Whether an op draws random numbers. Attention without dropout does not, though it is tagged so."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    parameters = [p.name for p in schema_of(target).parameters]
    if "dropout_p" not in parameters:
        return True
    place = parameters.index("dropout_p")
    return (op.args[place] if len(op.args) > place else op.kwargs.get("dropout_p", 0.0)) != 0.0


def _generator(generator: Argument) -> object:
    """What tells generators apart. Ops that are given none draw from a default one."""
    if generator is None or generator is torch.default_generator:
        return "default"
    return id(generator)
