"""The recorded step as plain data: a `Program` is a list of `Op`s over `Region`s of `Buffer`s, and nothing else.

Views are not ops here: a view is a `Region`, a geometry over the buffer it looks into, so a program holds only what
moves bytes. Every write to a buffer makes a new value of that buffer; program order says which value a read means.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NewType, TypeAlias, overload

import torch

BufferId = NewType("BufferId", int)
OpOverload: TypeAlias = torch._ops.OpOverload  # has no public name; checked on 2.11 and 2.13
Kernel: TypeAlias = "OpOverload | Cluster"  #: what an op calls

#: An argument of an op: a Region, a HyperScalar, a plain Python constant, or a tuple of these.
Argument = object


class Role(enum.Enum):
    """Who owns a buffer, which decides who may write it and when."""

    PARAMETER = "parameter"
    BUFFER = "module buffer"
    STATE = "optimizer state"
    BATCH = "batch"
    GRADIENT = "pending gradients"
    CLOSURE = "closure tensor"
    CONSTANT = "constant"
    INTERNAL = "internal"

    def __init__(self, owner: str) -> None:
        self.borrowed = owner != "internal"  # no property: those of an enum are slow, and this is asked most of all

    @property
    def handed(self) -> bool:
        """Whether other tensors may come with every call: the batch, and gradients that wait for their update."""
        return self in (Role.BATCH, Role.GRADIENT)


class Phase(enum.Enum):
    """The part of the step an op belongs to. Only UPDATE ops may change what the user owns for good."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Special(enum.Enum):
    """Ops that are not kernels: they carry the random state through the step, and gradients to a group of ranks."""

    SAVE_RANDOM = "random.save"
    RESTORE_RANDOM = "random.restore"
    REDUCE = "group.reduce"
    WAIT = "group.wait"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes with one owner at a time. `size_bytes` is the size of the storage eager gave it."""

    id: BufferId
    size_bytes: int
    role: Role
    name: str = ""
    device: str = ""  #: where it lies, if not on the device that the program runs on


@dataclass(frozen=True, slots=True)
class Region:
    """A strided look into a buffer. `offset` counts elements from the start of the buffer's storage;
    for a batch leaf it counts from the leaf's own first element, since its storage differs in every step."""

    buffer: BufferId
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def span_bytes(self) -> tuple[int, int]:
        """The half-open byte range this region can touch inside its buffer."""
        if self.numel == 0:
            return (0, 0)
        last = sum((extent - 1) * step for extent, step in zip(self.shape, self.stride, strict=True))
        item = self.dtype.itemsize
        return (self.offset * item, (self.offset + last + 1) * item)

    @property
    def packed(self) -> bool:
        """True if every element of the span is touched exactly once, in whatever order of dimensions."""
        expected = 1
        for step, extent in sorted((s, n) for s, n in zip(self.stride, self.shape, strict=True) if n != 1):
            if step != expected:
                return False
            expected *= extent
        return True

    @property
    def contiguous(self) -> bool:
        """True if the elements lie one after the other, the last dimension running fastest."""
        expected = 1
        for extent, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and step != expected:
                return False
            expected *= extent
        return True

    def same_place(self, other: Region) -> bool:
        """True if both name the same elements in the same order, whatever buffer they are in."""
        return (
            self.dtype == other.dtype
            and self.shape == other.shape
            and self.offset == other.offset
            and self.stride == other.stride
        )


#: One region in place of another. `same` leaves every region as it is.
Change: TypeAlias = Callable[[Region], Region]


def same(region: Region) -> Region:
    return region


def renaming(table: Mapping[BufferId, BufferId]) -> Change:
    """Changes the buffer of a region, for the buffers of `table`; the place in it stays."""

    def change(region: Region) -> Region:
        target = table.get(region.buffer)
        return region if target is None else replace(region, buffer=target)

    return change


@dataclass(frozen=True, slots=True)
class HyperScalar:
    """A number that is read afresh in every step: the one at `index` among the update's scalars."""

    index: int
    text: str


class Number(float):
    """An operand that is read afresh in every step: `now` is what a replay uses, and `read_` brings it up to date. To
    every pass it is the number it was when the step was recorded."""

    now: float
    _read: Callable[[], float]

    @classmethod
    def made(cls, value: float, read: Callable[[], float]) -> Number:
        self = cls(value)
        self.now, self._read = value, read
        return self

    def read_(self) -> None:
        self.now = self._read()


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the user's code."""

    file: str
    line: int
    function: str
    text: str = ""
    module: str = ""  #: the path of the innermost submodule that ran: `layers.3.mlp.up_proj`; of the model itself ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def describe(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes an op takes from the allocator inside, between its own `start`-th and `end`-th allocator event.
    `result` is the buffer if these bytes are a result of the op, else None. `end` None: outlived the op."""

    size_bytes: int
    start: int
    end: int | None
    result: BufferId | None = None

    def renamed(self, results: Mapping[BufferId, BufferId]) -> Scratch:
        """The same of an op whose results are in other buffers."""
        return self if self.result is None else replace(self, result=results[self.result])


@dataclass(frozen=True)
class Op:
    """One kernel call as eager made it, its tensors replaced by regions."""

    target: OpOverload | Special | Cluster
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    results: tuple[Argument, ...]
    mutates: tuple[BufferId, ...] = ()
    phase: Phase = Phase.FORWARD
    grad_mode: bool = False
    site: Site | None = None
    expected: object = None  #: for an op that reads a tensor into Python: the value it must give again
    scratch: tuple[Scratch, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        return str(self.target).removeprefix("aten.").removesuffix(".default")

    @functools.cached_property
    def has_data_in_shape(self) -> bool:
        """Whether the shape of a result depends on values, so that a plan holds for the recorded shape only."""
        if isinstance(self.target, Special | Cluster) or torch.Tag.dynamic_output_shape not in self.target.tags:
            return False
        if self.target is not torch.ops.aten.index.Tensor:
            return True
        return any(r.dtype in (torch.bool, torch.uint8) for r in _regions(self.args[1:2]))

    @property
    def may_send_back(self) -> bool:
        """Whether a replay may find here that another plan is needed: it reads a value into Python, or gives a result
        in another shape."""
        return self.expected is not None or self.has_data_in_shape

    @functools.cached_property  # asked by every pass, of ops that most passes leave as they are
    def inputs(self) -> tuple[Region, ...]:
        return (*_regions(self.args), *_regions(tuple(self.kwargs.values())))

    @functools.cached_property
    def outputs(self) -> tuple[Region, ...]:
        return tuple(_regions(self.results))

    def map(self, *, reads: Change = same, writes: Change = same) -> Op:
        """The op with each operand replaced by `reads(region)` and each result by `writes(region)`. What it mutates
        and which of its scratch is a result follow. What it writes in place is operand and result: both must become the
        same."""
        if all(reads(r) is r for r in self.inputs) and all(writes(r) is r for r in self.outputs):
            return self
        in_place = [r for r in self.outputs if r.buffer in self.mutates]
        assert all(reads(r) == writes(r) for r in in_place), f"{self.name} would write another buffer than it reads"
        moved: dict[BufferId, dict[BufferId, None]] = {}
        for old, change in (*((r, reads) for r in self.inputs), *((r, writes) for r in self.outputs)):
            moved.setdefault(old.buffer, {})[change(old).buffer] = None
        results = {r.buffer: writes(r).buffer for r in self.outputs}
        return replace(
            self,
            args=map_regions(self.args, reads),
            kwargs={name: map_regions(value, reads) for name, value in self.kwargs.items()},
            results=map_regions(self.results, writes),
            mutates=tuple(dict.fromkeys(new for old in self.mutates for new in moved[old])),
            scratch=tuple(s.renamed(results) for s in self.scratch),
        )


@dataclass(frozen=True, eq=False)
class Cluster:
    """Ops that run as one kernel, or few: a small program of its own, which stands where an operator does. Its buffers
    are numbered from 0; the first are what comes in, and of the others only those that leave it have bytes.

    `inputs` are what the op's operands are inside, each in a buffer of its own; `results` what its results are;
    `writes` the inputs that it writes in place."""

    ops: tuple[Op, ...]
    buffers: Mapping[BufferId, Buffer]
    inputs: tuple[Region, ...]
    results: tuple[Region, ...]
    writes: tuple[int, ...] = ()

    namespace: ClassVar[str] = "takeback"
    tags: ClassVar[tuple[torch.Tag, ...]] = ()

    def __str__(self) -> str:
        names = list(dict.fromkeys(op.name for op in self.ops))
        return f"cluster[{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}]"

    @functools.cached_property
    def key(self) -> str:
        """Equal for clusters that compute the same on operands of the same geometry, wherever they are in a step."""
        lines = [show_geometry(self.inputs), show_geometry(self.results), repr(self.writes)]
        for op in self.ops:
            named = [(name, show_geometry(value)) for name, value in sorted(op.kwargs.items())]
            lines.append(f"{op.target} {show_geometry(op.args)} {named} {show_geometry(op.results)}")
        return "\n".join(lines)


def show_geometry(arg: Argument) -> str:
    """An argument as text that says all there is to say about it."""
    if isinstance(arg, Region):
        return f"%{arg.buffer}:{arg.dtype}{list(arg.shape)}{list(arg.stride)}+{arg.offset}"
    if isinstance(arg, tuple):
        return f"({', '.join(map(show_geometry, arg))})"
    return arg.hex() if isinstance(arg, float) else repr(arg)


def regions(tree: Argument) -> Iterator[Region]:
    """Every region in an argument, in order."""
    return iter(_regions((tree,)))


def _regions(tree: tuple[Argument, ...]) -> list[Region]:
    found: list[Region] = []
    for leaf in tree:
        if isinstance(leaf, Region):
            found.append(leaf)
        elif isinstance(leaf, tuple):
            found += _regions(leaf)
    return found


@overload
def map_regions(tree: tuple[Argument, ...], change: Callable[[Region], Argument]) -> tuple[Argument, ...]: ...
@overload
def map_regions(tree: Argument, change: Callable[[Region], Argument]) -> Argument: ...
def map_regions(tree: Argument, change: Callable[[Region], Argument]) -> Argument:
    """The same argument with every region replaced by `change(region)`."""
    if isinstance(tree, Region):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(map_regions(leaf, change) for leaf in tree)
    return tree


@dataclass(frozen=True)
class Program:
    """One recorded training step: what is read, what is written, and whose bytes they are."""

    ops: tuple[Op, ...]
    buffers: Mapping[BufferId, Buffer]
    externals: Mapping[BufferId, torch.Tensor]  #: every borrowed tensor but what is handed over with a call
    leaves: Mapping[
        BufferId, int
    ]  #: what is handed over with a call, by position there: the batch's tensors come first
    loss: Region
    aux: tuple[Region, ...] = ()
    grads: Mapping[int, Region] = field(default_factory=dict)  #: by position among the model's parameters
    grad_norm: Region | None = None
    found_inf: Region | None = None  #: with a scaler: not 0 if a gradient is not finite; last of the backward
    eager_death: Mapping[BufferId, int] = field(default_factory=dict)  #: the op before which eager had freed it
    slices: Mapping[int, Region] = field(default_factory=dict)  #: with a group: of every trainable parameter
    flags: Region | None = None  #: with a group: which of these have a gradient

    @property
    def device(self) -> torch.device:
        """Where the step runs: where the parameters lie."""
        found = (t.device for b, t in self.externals.items() if self.buffers[b].role is Role.PARAMETER)
        return next(found, torch.device("cpu"))

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda": a pass that was proved for one kind of kernels asks here."""
        return str(self.device.type)

    @property
    def returned(self) -> tuple[Region, ...]:
        """What the caller receives, and so must outlive the arena."""
        return (self.loss, *self.aux) + ((self.grad_norm,) if self.grad_norm else ())

    @functools.cached_property  # asked in every plain step of a shape that has no plan
    def mutated(self) -> tuple[BufferId, ...]:
        """What the forward and backward mutate, in order."""
        return tuple(dict.fromkeys(b for op in self.ops if op.phase is not Phase.UPDATE for b in op.mutates))

    @functools.cached_property
    def drawing(self) -> tuple[Op, ...]:
        """The ops that draw random numbers."""
        seeded = torch.Tag.nondeterministic_seeded
        return tuple(op for op in self.ops if not isinstance(op.target, Special) and seeded in op.target.tags)

    def named_regions(self) -> Iterator[tuple[str, Region]]:
        """Every region that a field names (not those of the ops), with the field's name: what must be there at the
        end of the step. A new field is found by what it holds."""
        for each in fields(self):
            if each.name != "ops":
                yield from ((each.name, region) for region in _regions_in(getattr(self, each.name)))

    def map_named(self, change: Change) -> Program:
        """The program with each of `named_regions` replaced. Nothing else names a region; what is named by buffer
        stays: `buffers`, the borrowed ones (`externals`, `leaves`) and `eager_death`, which is of the step as it was
        recorded, and is read from that program alone."""
        new = {f.name: _map_value(getattr(self, f.name), change) for f in fields(self) if f.name != "ops"}
        return replace(self, **new)  # type: ignore[arg-type]  # each value keeps its type

    def map(self, change: Change) -> Program:
        """The program with every region replaced, in its ops and wherever a field names one."""
        return replace(self.map_named(change), ops=tuple(op.map(reads=change, writes=change) for op in self.ops))

    def __str__(self) -> str:
        return "\n".join(f"{i:4d}  {show_op(op, self.buffers)}" for i, op in enumerate(self.ops))


def _regions_in(value: object) -> Iterator[Region]:
    """Every region in the value of a field: one, none, or a tuple or mapping of them."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    yield from regions(value)


def _map_value(value: object, change: Change) -> object:
    if isinstance(value, Mapping):
        changed = {key: map_regions(item, change) for key, item in value.items()}
        return value if all(changed[key] is item for key, item in value.items()) else changed
    return map_regions(value, change)


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def show_region(region: Region, buffers: Mapping[BufferId, Buffer]) -> str:
    buffer = buffers[region.buffer]
    name = buffer.name or f"%{region.buffer}"
    dtype = _SHORT.get(region.dtype, str(region.dtype).removeprefix("torch."))
    return f"{name}:{dtype}[{','.join(map(str, region.shape))}]"


def show_op(op: Op, buffers: Mapping[BufferId, Buffer]) -> str:
    def show(arg: Argument) -> str:
        if isinstance(arg, Region):
            return show_region(arg, buffers)
        if isinstance(arg, HyperScalar):
            return f"<{arg.text}>"
        if isinstance(arg, tuple):
            return "[" + ", ".join(map(show, arg)) + "]"
        return repr(arg)

    parts = [show(a) for a in op.args] + [f"{k}={show(v)}" for k, v in op.kwargs.items()]
    results = ", ".join(show(r) for r in op.results)
    wrote = f"  writes {', '.join(buffers[b].name or f'%{b}' for b in op.mutates)}" if op.mutates else ""
    return f"{results or '()'} = {op.name}({', '.join(parts)}){wrote}"
