"""Writes a layout as straight-line Python for a device whose own allocator places: values are local variables.

In: a layout for the home ALLOCATOR, in which only kernels that write into given bytes overwrite. Out: `AllocatorCode`,
whose source has passed the audit (audit.py) and defines `factory(env)` -> (compute(batch) -> held, update(batch,
scalars, held) -> held). A result is allocated by the op that makes it, and every name of a buffer's bytes is dropped
after the op at which its last owner dies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from takeback.compiler.layout import Layout
from takeback.compiler.ownership.kinds import Kind
from takeback.compiler.program import Argument, BufferId, Kernel, Op, Phase, Region, Special
from takeback.compiler.run.audit import audit
from takeback.compiler.run.codegen import Emitter, gives_one, over
from takeback.compiler.run.read_back import Meant

Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]
UpdateCode = Callable[[list[torch.Tensor], Sequence[float], list[torch.Tensor]], list[torch.Tensor]]

#: Kinds whose functional form allocates the result; the others need a place to write to.
_FUNCTIONAL = frozenset((Kind.ALLOCATE, Kind.OUT, Kind.FILL, Kind.COPY))


@dataclass(frozen=True)
class AllocatorCode:
    """Generated source, what its names stand for, and which owners `compute` and `update` hand on, in order."""

    source: str
    compiled: CodeType
    regions: Mapping[str, Region]  #: of borrowed tensors, which are built beforehand
    lists: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, object]
    crossing: tuple[BufferId, ...]  #: alive between compute and update
    surviving: tuple[BufferId, ...]  #: alive after the step: what it returns or keeps
    lines: tuple[tuple[int, str], ...]  #: every line of the two bodies, with the op it belongs to
    meant: Meant  #: what its names are said to stand for

    def bind(
        self, externals: Mapping[BufferId, torch.Tensor], extra: Mapping[str, object]
    ) -> tuple[Compute, UpdateCode]:
        """Builds every borrowed tensor and returns (compute, update)."""
        tensors = {
            name: over(externals[r.buffer], r.dtype, r.shape, r.stride, r.offset) for name, r in self.regions.items()
        }
        env: dict[str, object] = {**self.constants, **extra, **tensors}
        for name, members in self.lists.items():
            env[name] = [tensors[m] for m in members]
        scope: dict[str, Any] = {}
        exec(self.compiled, scope)
        compute, update = scope["factory"](env)
        return compute, update


HELPERS = ("as_strided", "empty_strided", "over", "raw", "fit", "begin", "seen", "poison", "reduce", "commits")
"""What the code calls besides kernels, given by the executor."""


class _AllocatorEmitter(Emitter):
    """Writes the two function bodies; `watched` code also measures and checks."""

    def __init__(self, layout: Layout, poison: bool, watched: bool, landed: Collection[int]) -> None:
        super().__init__(layout, poison=False)
        self._poisoned, self._watched, self._landed = poison, watched, landed
        self._held: dict[BufferId, dict[Region, str]] = {}  # names of each owner's bytes
        self._count = 0
        self._before: list[str] = []
        self._ends: dict[int, list[BufferId]] = {}
        last: dict[BufferId, int] = {}
        for b, life in layout.alive.items():
            last[layout.owners[b]] = max(last.get(layout.owners[b], 0), life.end)
        for owner, end in last.items():
            self._ends.setdefault(end, []).append(owner)
        self.crossing: tuple[BufferId, ...] | None = None
        self._commits = False  #: something of the user's has been updated
        self.lines: list[tuple[int, str]] = []
        self.claims: dict[str, Region] = {}

    def emit(self) -> None:
        count = len(self.program.ops)
        for position, (op, kind) in enumerate(zip(self.program.ops, self.layout.kinds, strict=True)):
            updating = self._updating = self._updating or op.phase is Phase.UPDATE
            if updating and self.crossing is None:
                self._cross_(position)
            if kind is not Kind.NOTHING:
                if self._grad[updating] is not op.grad_mode and kind is not Kind.RANDOM:
                    self._write_(position, f"grad_mode({op.grad_mode})")
                    self._grad[updating] = op.grad_mode
                if updating and not self._commits and self._writes_the_users(op):
                    self._commits = True
                    self._write_(position, "commits()")
                lines = self._lines(op, kind, position)
                if self._watched:
                    self._write_(position, "begin()")
                self._write_(position, *self._before, *lines)
                if self._watched:
                    self._write_(position, f"seen({position})")
                self._before = []
            if position + 1 < count:
                self._write_(position, *self._drop_(position + 1))
        if self.crossing is None:
            self._cross_(count)
        self.surviving = tuple(self._held)
        self._updating = True
        self._write_(count, f"return [{', '.join(self._base(s) for s in self.surviving)}]")

    def _writes_the_users(self, op: Op) -> bool:
        return any(b not in self.layout.owners for b in (*op.mutates, *(r.buffer for r in op.outputs)))

    def _write_(self, position: int, *lines: str) -> None:
        self.bodies[self._updating].extend(lines)
        self.lines.extend((position, line) for line in lines)

    def _cross_(self, position: int) -> None:
        """From compute to update: one name for each owner goes over."""
        self.crossing = tuple(self._held)
        names = [self._base(owner) for owner in self.crossing]
        self._updating = False
        self._write_(position, f"return [{', '.join(names)}]")
        self._updating = True
        if names:
            self._write_(position, f"{', '.join(names)}, = H", "H.clear()")
        self._held = {owner: dict([next(iter(known.items()))]) for owner, known in self._held.items()}

    def _drop_(self, end: int) -> list[str]:
        """The bytes whose last owner has died before the op at `end`."""
        names: list[str] = []
        lines: list[str] = []
        for owner in self._ends.get(end, ()):
            known = self._held.pop(owner, {})
            names += known.values()
            if self._poisoned and known:
                lines.append(f"poison({next(iter(known.values()))})")
        return [*lines, " = ".join([*names, "None"])] if names else lines

    # -- names -----------------------------------------------------------------------------------------------------

    def _base(self, owner: BufferId) -> str:
        return next(iter(self._held[owner].values()))

    def _key(self, region: Region) -> Region:
        return replace(region, buffer=self.layout.owners[region.buffer])

    def _internal(self, region: Region) -> bool:
        return region.buffer in self.layout.owners

    def _name_(self, region: Region) -> str:
        """A new name for a region."""
        key = self._key(region)
        self._count += 1
        name = f"v{self._count}"
        self._held.setdefault(key.buffer, {})[key] = name
        self.claims[name] = key
        return name

    def argument(self, arg: Argument) -> str:
        if isinstance(arg, Region) and self._internal(arg):
            key = self._key(arg)
            known = self._held[key.buffer]
            return known[key] if key in known else self._view_(arg, known)
        return super().argument(arg)

    def _storage(self, region: Region) -> str:
        """A value has a storage of its own here, as in eager."""
        return self.argument(region)

    def _view_(self, region: Region, known: Mapping[Region, str]) -> str:
        geometry = f"{tuple(region.shape)!r}, {tuple(region.stride)!r}, {region.offset}"
        same = next((name for other, name in known.items() if other.dtype is region.dtype), None)
        base = next(iter(known.values()))
        name = self._name_(region)
        if same is not None:
            self._before.append(f"{name} = as_strided({same}, {geometry})")
        else:
            self._before.append(f"{name} = over({base}, {self.names.constant(region.dtype)}, {geometry})")
        return name

    def _place_(self, region: Region) -> None:
        """Takes bytes for a region that an op is about to write to, if there are none yet."""
        if not self._internal(region) or self._key(region).buffer in self._held:
            return
        buffer = self.program.buffers[self._key(region).buffer]
        device = self.names.constant(torch.device(buffer.device) if buffer.device else self.program.device)
        dtype, name = self.names.constant(region.dtype), self._name_(region)
        shape, stride = tuple(region.shape), tuple(region.stride)
        if region.packed and region.span_bytes == (0, buffer.size_bytes):
            self._before.append(f"{name} = empty_strided({shape!r}, {stride!r}, dtype={dtype}, device={device})")
        else:
            self._before.append(
                f"{name} = raw({buffer.size_bytes}, {device}, {dtype}, {shape}, {stride}, {region.offset})"
            )
        if self._poisoned:
            self._before.append(f"poison({name})")

    # -- ops -------------------------------------------------------------------------------------------------------

    def _lines(self, op: Op, kind: Kind, position: int) -> list[str]:
        target = op.target
        fresh = [r for r in op.outputs if r.buffer not in op.mutates and self._internal(r)]
        given = any(self._key(r).buffer in self._held for r in fresh)
        if not isinstance(target, Special) and kind in _FUNCTIONAL and not given:
            return self._functional(op, target, position)
        assert kind is not Kind.ALLOCATE, f"{op.name} allocates its results, so none can be written onto an operand"
        for region in (*op.outputs, *op.inputs):
            self._place_(region)
        return super()._lines(op, kind, position)

    def _handover(self, op: Op) -> list[str]:
        number, _, members = op.args
        assert isinstance(members, tuple)
        return [f"reduce({number}, [{', '.join(self.argument(m) for m in members)}])"]

    def _functional(self, op: Op, target: Kernel, position: int) -> list[str]:
        for region in op.inputs:
            self._place_(region)  # what torch.empty gave may be read, or written by an op that has results of its own
        call = self._call(target, op.args, op.kwargs)
        made: list[tuple[str, Region]] = []

        def receive(result: Argument) -> str:
            if isinstance(result, tuple):
                return "(" + "".join(f"{receive(r)}, " for r in result) + ")"
            if not isinstance(result, Region) or not self._internal(result) or result.buffer in op.mutates:
                return "_"
            if self._key(result).buffer in self._held:
                return "_"  # a second look at bytes that have a name
            made.append((self._name_(result), result))
            return made[-1][0]

        single = gives_one(target)
        names = receive(op.results[0]) if single else "".join(f"{receive(r)}, " for r in op.results)
        lines = [f"{names} = {call}" if names else call]  # a cluster may only write in place
        if "_" in names:
            lines.append("_ = None")
        for name, r in made:
            lines += self.shape_check(op, position, name, r)
        if self._watched or position in self._landed:
            for name, r in made:
                size = self.program.buffers[r.buffer].size_bytes
                geometry = f"{tuple(r.shape)!r}, {tuple(r.stride)!r}, {r.offset}"
                lines.append(f"{name} = fit({name}, {position}, {size}, {self.names.constant(r.dtype)}, {geometry})")
        return lines


def generate_for_allocator(
    layout: Layout, *, poison: bool = False, watched: bool = False, landed: Collection[int] = ()
) -> AllocatorCode:
    """The step's source, compiled. `landed` are the ops whose results come in another geometry than was recorded."""
    emitter = _AllocatorEmitter(layout, poison, watched, landed)
    emitter.emit()
    names = emitter.names
    everything = [*names.regions.values(), *names.lists.values(), *names.constants, *names.numbers, *HELPERS]
    everything += ["grad_mode", "look", "same_value", "changed"]
    lines = ["def factory(env):"]
    lines += [f"    {name} = env[{name!r}]" for name in everything]
    lines.append("    def compute(B):")
    lines += [f"        {line}" for line in (*emitter.prologues[False], *emitter.bodies[False])]
    lines.append("    def update(B, S, H):")
    lines += [f"        {line}" for line in (*emitter.prologues[True], *emitter.bodies[True])]
    lines.append("    return compute, update")
    source = "\n".join(lines) + "\n"
    assert emitter.crossing is not None
    regions = {name: region for region, name in names.regions.items()}
    lists = {name: members for members, name in names.lists.items()}
    constants = {**names.constants, **names.numbers}
    looks = {name: region for (_, region), name in emitter.batch.items()}
    prologue = (*emitter.prologues[False], *emitter.prologues[True])
    meant = Meant(emitter.claims, {**regions, **looks}, lists, constants, prologue)
    audit(emitter.lines, meant, layout)
    return AllocatorCode(
        source,
        compile(source, "<takeback step>", "exec"),
        regions,
        lists,
        constants,
        emitter.crossing,
        emitter.surviving,
        tuple(emitter.lines),
        meant,
    )
