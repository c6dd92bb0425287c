"""Writes a layout as straight-line Python: one call per op on tensors that were built beforehand, and nothing else.

In: a layout. Out: `Code`, whose source defines the two functions of a step, `compute(batch)` and `update(batch,
scalars)`; `bind` builds the tensors over an arena that their names stand for. Before each op the allocator's cell gets
its position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from takeback.compiler.layout import Layout
from takeback.compiler.ownership.facts import FILL, inplace_overload, out_overload, reads_storage
from takeback.compiler.ownership.kinds import Kind, may_vary
from takeback.compiler.program import Argument, Cluster, HyperScalar, Kernel, Number, Op, Phase, Region, Special
from takeback.compiler.run.bindings import fastest

Compute = Callable[[list[torch.Tensor]], None]
Update = Callable[[list[torch.Tensor], Sequence[float]], None]


class HeldValueChanged(Exception):
    """A value the recorded step had read into Python is another one this time, or a result has another shape;
    `position` is the op that read it or made it."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def same_value(now: object, then: object) -> bool:
    return now == then or (now != now and then != then)


@dataclass(frozen=True)
class Code:
    """Generated source, and what its names stand for."""

    source: str
    compiled: CodeType
    regions: Mapping[str, Region]
    storages: Mapping[str, Region]  #: in a storage that ends where the buffer does, for ops that look at it
    addresses: Mapping[str, Region]
    spans: Mapping[str, tuple[int, int]]  #: byte ranges of the arena that poison mode fills
    lists: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, object]

    def bind(
        self,
        arena: torch.Tensor,
        layout: Layout,
        externals: Mapping[Any, torch.Tensor],
        extra: Mapping[str, object],
    ) -> tuple[Compute, Update, dict[str, torch.Tensor]]:
        """Builds every tensor over `arena` and returns (compute, update, the tensors by name)."""
        base = arena.storage_offset()
        tensors: dict[str, torch.Tensor] = {}
        for name, region in self.regions.items():
            tensors[name] = place(region, layout, arena, base, externals)
        env: dict[str, object] = {**self.constants, **extra, **tensors}
        for name, region in self.storages.items():
            env[name] = tensors[name] = place_alone(region, layout, arena, externals)
        for name, region in self.addresses.items():
            env[name] = place(region, layout, arena, base, externals).data_ptr()
        for name, (start, end) in self.spans.items():
            env[name] = arena[start:end]
        for name, members in self.lists.items():
            env[name] = [tensors[m] for m in members]
        scope: dict[str, Any] = env
        exec(self.compiled, scope)
        return scope["compute"], scope["update"], tensors


def place(
    region: Region, layout: Layout, arena: torch.Tensor, base: int, externals: Mapping[Any, torch.Tensor]
) -> torch.Tensor:
    """The tensor that looks at a region's bytes."""
    external = externals.get(region.buffer)
    if external is not None:
        return over(external, region.dtype, region.shape, region.stride, region.offset)
    empty = torch.empty(0, dtype=region.dtype, device="cpu")
    start = base + layout.placed.offsets[region.buffer]
    assert start % region.dtype.itemsize == 0
    offset = start // region.dtype.itemsize + region.offset
    return empty.set_(arena.untyped_storage(), offset, region.shape, region.stride)


def place_alone(
    region: Region, layout: Layout, arena: torch.Tensor, externals: Mapping[Any, torch.Tensor]
) -> torch.Tensor:
    """The same bytes in a storage of the buffer's own size, as eager has it."""
    external = externals.get(region.buffer)
    if external is None:
        start = layout.placed.offsets[region.buffer]
        size = layout.draft.program.buffers[region.buffer].size_bytes
        external = torch.from_numpy(arena[start : start + size].numpy())  # keeps the arena, from there on
    return over(external, region.dtype, region.shape, region.stride, region.offset)


def over(
    tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A look into the storage of a tensor, of any dtype."""
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, shape, stride)


class _Names:
    """Gives every distinct thing one name."""

    def __init__(self) -> None:
        self.regions: dict[Region, str] = {}
        self.storages: dict[Region, str] = {}
        self.addresses: dict[Region, str] = {}
        self.spans: dict[tuple[int, int], str] = {}
        self.lists: dict[tuple[str, ...], str] = {}
        self.constants: dict[str, object] = {}
        self.numbers: dict[str, int | tuple[int, ...]] = {}
        self._known: dict[object, str] = {}
        self._shapes: dict[tuple[int, ...], torch.Size] = {}

    def region(self, region: Region) -> str:
        return self.regions.setdefault(region, f"t{len(self.regions)}")

    def storage(self, region: Region) -> str:
        return self.storages.setdefault(region, f"o{len(self.storages)}")

    def address(self, region: Region) -> str:
        return self.addresses.setdefault(region, f"a{len(self.addresses)}")

    def span(self, start: int, end: int) -> str:
        return self.spans.setdefault((start, end), f"p{len(self.spans)}")

    def list(self, members: tuple[str, ...]) -> str:
        return self.lists.setdefault(members, f"l{len(self.lists)}")

    def shape(self, shape: tuple[int, ...]) -> str:
        return self.constant(self._shapes.setdefault(shape, torch.Size(shape)))

    def number(self, value: int | tuple[int, ...]) -> str:
        """By where it stands, not by what it is: siblings have the same source."""
        name = f"n{len(self.numbers)}"
        self.numbers[name] = value
        return name

    def constant(self, value: object, prefix: str = "k") -> str:
        key = (type(value), id(value))
        if key not in self._known:
            self._known[key] = f"{prefix}{len(self._known)}"
            self.constants[self._known[key]] = value
        return self._known[key]


class Emitter:
    """Writes the two function bodies."""

    def __init__(self, layout: Layout, poison: bool) -> None:
        self.layout = layout
        self.program = layout.draft.program
        self.names = _Names()
        self.prologues: dict[bool, list[str]] = {False: [], True: []}
        self.bodies: dict[bool, list[str]] = {False: [], True: []}
        self.batch: dict[tuple[bool, Region], str] = {}
        self._updating = False  # once it has begun, what is left of the backward belongs to it
        self._grad: dict[bool, bool | None] = {False: None, True: None}
        self._holds: dict[bool, bool] = {False: False, True: False}  # whether `r` still is an op's result
        self._poison = _deaths(layout) if poison else {}

    def emit(self) -> None:
        for position, (op, kind) in enumerate(zip(self.program.ops, self.layout.kinds, strict=True)):
            updating = self._updating = self._updating or op.phase is Phase.UPDATE
            body = self.bodies[updating]
            if kind is not Kind.NOTHING:
                if self._grad[updating] is not op.grad_mode and kind is not Kind.RANDOM:
                    body.append(f"grad_mode({op.grad_mode})")
                    self._grad[updating] = op.grad_mode
                if self._holds[updating] and any(e.result is None for e in self.layout.placed.requests[position]):
                    # The last result's bytes may be this op's scratch now. Let go of it first, or the allocator's log
                    # would take the scratch's release for that of the result.
                    body += ["cell[0] = -1", "r = None"]
                    self._holds[updating] = False
                body.append(f"cell[0] = {position}")
                body.extend(self._lines(op, kind, position))
                self._holds[updating] |= kind is Kind.ALLOCATE
            for start, end in self._poison.get(position, ()):
                body.append(f"{self.names.span(start, end)}.fill_(255)")

    def _lines(self, op: Op, kind: Kind, position: int) -> list[str]:
        target = op.target
        if kind is Kind.WAIT:
            return []
        if kind is Kind.REDUCE:
            return self._handover(op)
        if isinstance(target, Special):
            slot, generator = op.args
            name = self.names.constant(generator, "g")
            if target is Special.SAVE_RANDOM:
                return [f"r{slot} = {name}.get_state()"]
            return [f"{name}.set_state(r{slot})"]
        if kind is Kind.FILL:
            place, number = FILL[target]
            value = number if place is None else op.args[place]
            onto = self.argument(op.results[0])
            return [f"{onto}.zero_()" if place is None and number == 0 else f"{onto}.fill_({self.argument(value)})"]
        if kind is Kind.COPY:
            return [f"{self.argument(op.results[0])}.copy_({self.argument(op.args[0])})"]
        if kind is Kind.OUT:
            overload = out_overload(target)
            assert overload is not None
            outs = [a for a in overload._schema.arguments if a.is_out]
            if len(outs) == 1 and str(outs[0].type) == "List[Tensor]":
                return [self._call(overload, op.args, {**op.kwargs, outs[0].name: op.results})]
            named = {a.name: op.results[i] for i, a in enumerate(outs)}
            return [self._call(overload, op.args, {**op.kwargs, **named})]
        if kind is Kind.INSTEAD:
            overload = inplace_overload(target)
            assert overload is not None
            return [self._call(overload, op.args, op.kwargs)]
        if kind is Kind.INPLACE:
            return [self._call(target, op.args, op.kwargs)]
        if kind is Kind.HOLD:
            held = self.names.constant(op.expected)
            call = self._call(target, op.args, op.kwargs)
            return [f"if not same_value({call}, {held}): raise changed({position})"]
        return self._allocating(op, target, position)

    def _handover(self, op: Op) -> list[str]:
        return ["cell[0] = -1", f"reduce({op.args[0]})"]

    def _allocating(self, op: Op, target: Kernel, position: int) -> list[str]:
        single = gives_one(target)
        lines = ["r = " + self._call(target, op.args, op.kwargs)]
        made = [(i, r) for i, r in enumerate(op.results) if isinstance(r, Region) and r.buffer not in op.mutates]
        for i, result in made:
            lines += self.shape_check(op, position, "r" if single else f"r[{i}]", result)
        # A kernel may hand out a look into its own, larger allocation, so compare the first element.
        if isinstance(target, Cluster) and len(made) > 1:
            elsewhere = " or ".join(f"r[{i}].data_ptr() != {self.names.address(result)}" for i, result in made)
            homes = ", ".join(self.argument(result) for _, result in made)
            lines.append(f"if {elsewhere}: land_all(r, [{homes}])")
            return lines
        for i, result in made:
            got = "r" if single else f"r[{i}]"
            lines.append(f"if {got}.data_ptr() != {self.names.address(result)}: land({got}, {self.argument(result)})")
        return lines

    def shape_check(self, op: Op, position: int, name: str, result: Region) -> list[str]:
        """A line that gives the plan up where a result comes in another shape than was recorded."""
        if not may_vary(op):
            return []
        return [f"if {name}.shape != {self.names.shape(result.shape)}: raise changed({position})"]

    def _call(self, target: Any, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> str:
        if isinstance(target, Cluster):
            return f"{self.names.constant(target, 'c')}([{', '.join(map(self.argument, args))}])"
        binding = fastest(target)
        if any(isinstance(a, tuple) and None in a for a in args):
            binding = target._op  # index_put's binding takes no None among its indices
        function = self.names.constant(binding, "f")
        alone = reads_storage(target)
        parts = [self._storage(a) if alone and isinstance(a, Region) else self.argument(a) for a in args]
        parts += [f"{k}={self.argument(v)}" for k, v in {**_defaults(target, len(args)), **kwargs}.items()]
        return f"{function}({', '.join(parts)})"

    def _storage(self, region: Region) -> str:
        if self.program.buffers[region.buffer].role.handed:
            return self._batch_region(region)
        return self.names.storage(region)

    def argument(self, arg: Argument) -> str:
        if isinstance(arg, Region):
            if self.program.buffers[arg.buffer].role.handed:
                return self._batch_region(arg)
            return self.names.region(arg)
        if isinstance(arg, HyperScalar):
            return f"S[{arg.index}]"
        if isinstance(arg, Number):
            return f"{self.names.constant(arg)}.now"
        if isinstance(arg, tuple):
            if arg and all(type(a) is int for a in arg):
                return self.names.number(arg)
            members = tuple(self.argument(a) for a in arg)
            if members and all(m.startswith("t") for m in members):  # names of tensors that are built beforehand
                return self.names.list(members)
            return "[" + ", ".join(members) + "]"
        if type(arg) is int:
            return self.names.number(arg)
        if arg is None or isinstance(arg, bool | int | str):
            return repr(arg)
        if isinstance(arg, float) and math.isfinite(arg):
            return repr(arg)
        return self.names.constant(arg)

    def _batch_region(self, region: Region) -> str:
        key = (self._updating, region)
        if key not in self.batch:
            name = f"x{len(self.batch)}"
            leaf = self.program.leaves[region.buffer]
            dtype = self.names.constant(region.dtype)
            geometry = (tuple(region.shape), tuple(region.stride), region.offset)
            numbers = ", ".join(self.names.number(part) for part in geometry)
            self.prologues[self._updating].append(f"{name} = look(B[{leaf}], {dtype}, {numbers})")
            self.batch[key] = name
        return self.batch[key]


def gives_one(target: Any) -> bool:
    """Whether an operator gives one tensor, and not several or a list. A cluster gives a list, also of one."""
    if isinstance(target, Cluster):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _defaults(target: Any, given: int) -> dict[str, Argument]:
    """What the dispatcher dropped because it was the default: a binding may read a default otherwise than the schema
    (checked on 2.13: `reduction` of the losses is Mean in the schema and None in torch._C._nn)."""
    rest = target._schema.arguments[given:]
    return {a.name: a.default_value for a in rest if a.name == "reduction" and a.has_default_value()}


def look(
    leaf: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A view of a batch tensor, by geometry."""
    if leaf.dtype is dtype:
        if offset == 0 and leaf.shape == shape and leaf.stride() == stride:
            return leaf
        return leaf.as_strided(shape, stride, leaf.storage_offset() + offset)
    start_bytes = leaf.storage_offset() * leaf.dtype.itemsize
    return over(leaf, dtype, shape, stride, start_bytes // dtype.itemsize + offset)


def _deaths(layout: Layout) -> dict[int, list[tuple[int, int]]]:
    """Which bytes die after which op: the end of a owner's last owner, and every op's scratch."""
    ends: dict[Any, int] = {}
    for b, life in layout.alive.items():
        ends[layout.owners[b]] = max(ends.get(layout.owners[b], 0), life.end)
    last = len(layout.kinds)
    found: dict[int, list[tuple[int, int]]] = {}
    for owner, end in ends.items():
        size = layout.draft.program.buffers[owner].size_bytes
        if end < last and size:
            found.setdefault(end - 1, []).append((layout.placed.offsets[owner], layout.placed.offsets[owner] + size))
    for position, entries in enumerate(layout.placed.requests):
        for e in entries:
            if e.result is None and e.offset_bytes >= 0:
                # Scratch that was released inside the op may lie where a result of the op lies now.
                span = (e.offset_bytes, e.offset_bytes + e.size_bytes)
                if not any(_overlap(span, r) for r in _results(layout, position)):
                    found.setdefault(position, []).append(span)
    return found


def _results(layout: Layout, position: int) -> list[tuple[int, int]]:
    program = layout.draft.program
    buffers = [r.buffer for r in program.ops[position].outputs if r.buffer in layout.placed.offsets]
    return [(layout.placed.offsets[b], layout.placed.offsets[b] + program.buffers[b].size_bytes) for b in buffers]


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def generate(layout: Layout, *, poison: bool = False, codes: dict[str, CodeType] | None = None) -> Code:
    """The step's source, compiled; one that is among `codes` already is not compiled again."""
    emitter = Emitter(layout, poison)
    emitter.emit()
    names = emitter.names
    program = layout.draft.program
    for region in (*program.returned, *program.grads.values()):
        if region.buffer in layout.placed.offsets:
            names.region(region)
    # Names are globals of the two functions: as variables of a function around them they would compile in five times
    # the time, measured on 24,000 lines.
    lines = ["def compute(B):"]
    lines += [f"    {line}" for line in emitter.prologues[False]]
    if poison:
        lines.append("    whole.fill_(255)")
    lines += [f"    {line}" for line in emitter.bodies[False]]
    lines.append("    cell[0] = -1")
    lines.append("def update(B, S):")
    lines += [f"    {line}" for line in emitter.prologues[True]]
    lines += [f"    {line}" for line in emitter.bodies[True]]
    lines.append("    cell[0] = -1")
    source = "\n".join(lines) + "\n"
    codes = {} if codes is None else codes
    if source not in codes:
        codes[source] = compile(source, "<takeback step>", "exec")
    return Code(
        source,
        codes[source],
        {name: region for region, name in names.regions.items()},
        {name: region for region, name in names.storages.items()},
        {name: region for region, name in names.addresses.items()},
        {name: span for span, name in names.spans.items()},
        {name: members for members, name in names.lists.items()},
        {**names.constants, **names.numbers},
    )
