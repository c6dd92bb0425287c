"""Records one real training step as a `Program`: a dispatch mode sees every op below autograd, with its real tensors.

Contract: the recorded step *is* eager's step, same kernels, same order, same results; the recorder only looks. It holds
no tensor alive that eager would have freed. What the forward and backward write into the user's tensors is remembered,
so that `undo_` can put it back if the step does not complete.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode  # checked on 2.11 and 2.13
from torch.utils.weak import WeakIdKeyDictionary

from takeback.compiler.capture.randomness import RandomTrail
from takeback.compiler.capture.scratch import AllocatorEvent, attach_scratch
from takeback.compiler.capture.site import Sites
from takeback.compiler.program import (
    Argument,
    Buffer,
    BufferId,
    Op,
    Phase,
    Program,
    Region,
    Role,
    Site,
)
from takeback.errors import CaptureError

aten = torch.ops.aten

#: Arguments that a kernel writes although its schema does not say so (by position), when training.
_HIDDEN_WRITES: dict[Any, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class AllocatorLog(Protocol):
    """What the recorder needs of the native allocator: where to say which op runs."""

    cell: Any


@dataclass(frozen=True, slots=True)
class _OpFacts:
    """What the schema says of an op, read once."""

    written: tuple[int, ...]
    written_names: tuple[str, ...]
    random: bool
    dynamic: bool
    reads_value: bool


def _facts(op: torch._ops.OpOverload) -> _OpFacts:
    arguments = op._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    tags = set(op.tags)
    return _OpFacts(
        tuple(i for i in written if not arguments[i].kwarg_only),
        tuple(arguments[i].name for i in written),
        torch.Tag.nondeterministic_seeded in tags,
        torch.Tag.dynamic_output_shape in tags,
        torch.Tag.data_dependent_output in tags,
    )


class Recorder(TorchDispatchMode):
    """Collects the ops of one step. Use as a context manager around the step, then call `program()`."""

    records = True  #: tells a recorder from other modes on the stack

    def __init__(
        self,
        known: Mapping[torch.Tensor, tuple[Role, str]],
        batch: Sequence[torch.Tensor],
        log: AllocatorLog | None = None,
        real: bool = True,
        *,
        reachable: Sequence[torch.Tensor] = (),
        generators: Sequence[torch.Generator] = (),
        held: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """`held()`: the tensors that the model's attributes hold just now."""
        super().__init__()
        self.ops: list[Op] = []
        self.buffers: dict[BufferId, Buffer] = {}
        self.phase = Phase.FORWARD
        self._externals: dict[BufferId, torch.Tensor] = {}
        self._leaves: dict[BufferId, int] = {}
        self._batch = tuple(batch)
        self._leaf_storages: set[int] = set()
        self._reachable = {t.untyped_storage()._cdata for t in reachable if t.layout is torch.strided}
        self._by_storage: dict[int, BufferId] = {}
        self._weak: dict[BufferId, StorageWeakRef] = {}
        self._leaf_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._alive: dict[BufferId, StorageWeakRef] = {}
        self._death: dict[BufferId, int] = {}
        self._address: dict[BufferId, int] = {}
        self._undo: dict[BufferId, tuple[torch.Tensor, torch.Tensor]] = {}
        self._held = held
        self._undo_new: dict[BufferId, list[tuple[weakref.ref[torch.Tensor], torch.Tensor]]] = {}
        self._facts: dict[Any, _OpFacts] = {}
        self._sites = Sites()
        self._device = next((t.device for t, (role, _) in known.items() if role is Role.PARAMETER), torch.device("cpu"))
        self._log = log
        self._real = real
        self._random = RandomTrail(generators, self._device) if real else None  # fake ops draw no numbers
        for tensor, (role, name) in known.items():
            self._adopt(tensor, role, name)
        for i, leaf in enumerate(batch):
            self._adopt_leaf(leaf, i)

    # -- buffers -----------------------------------------------------------------------------------------------

    def _new_buffer(self, tensor: torch.Tensor, role: Role, name: str = "") -> BufferId:
        ident = BufferId(len(self.buffers))
        storage = tensor.untyped_storage()
        self.buffers[ident] = Buffer(ident, storage.nbytes(), role, name, self._elsewhere(tensor))
        weak = self._weak[ident] = StorageWeakRef(storage)  # keeps the address from being used again
        self._by_storage[storage._cdata] = ident
        if role is Role.INTERNAL:
            self._alive[ident] = weak
            if self._log is not None:
                self._address[ident] = storage.data_ptr()
        return ident

    def _elsewhere(self, tensor: torch.Tensor) -> str:
        return "" if tensor.device.type == self._device.type else str(tensor.device)

    def _adopt(self, tensor: torch.Tensor, role: Role, name: str) -> BufferId:
        ident = self._by_storage.get(tensor.untyped_storage()._cdata)
        if ident is None:
            ident = self._new_buffer(tensor, role, name)
            self._externals[ident] = tensor.detach()
        return ident

    def _adopt_leaf(self, leaf: torch.Tensor, position: int) -> None:
        ident = BufferId(len(self.buffers))
        begin, end = Region(ident, leaf.dtype, tuple(leaf.shape), leaf.stride(), 0).span_bytes
        self.buffers[ident] = Buffer(ident, end - begin, Role.BATCH, f"batch{position}", self._elsewhere(leaf))
        self._leaves[ident] = position
        self._leaf_of[leaf] = (ident, leaf.storage_offset())
        # A leaf is known by the tensor object and its views, not by its storage: x and y may be slices of one tensor.
        self._leaf_storages.add(leaf.untyped_storage()._cdata)

    def _region(self, tensor: torch.Tensor) -> Region:
        leaf = self._leaf_of.get(tensor)
        if leaf is not None:
            ident, base = leaf
            offset = tensor.storage_offset() - base
        else:
            key = tensor.untyped_storage()._cdata
            found = self._by_storage.get(key)
            if found is None and key in self._leaf_storages and key not in self._reachable:
                raise CaptureError(
                    f"a view of the batch reached an op{self._at()} by a way that takeback cannot follow, so the next "
                    f"batch would not be read there. Make the view with ordinary tensor methods inside loss_fn."
                )
            if found is None:
                found = self._adopt(tensor, Role.CLOSURE, f"closure{len(self._externals)}")
            ident, offset = found, tensor.storage_offset()
        return Region(ident, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    def _refuse_unusual(self, tensor: torch.Tensor) -> None:
        if self._real and type(tensor) not in _PLAIN_TENSORS:
            raise CaptureError(
                f"a tensor subclass ({type(tensor).__module__}.{type(tensor).__qualname__}) takes part in the step"
                f"{self._at()}. takeback plans plain tensors only; convert it before the step."
            )
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"a tensor of layout {tensor.layout} takes part in the step{self._at()}. takeback plans strided "
                f"tensors only; for nn.Embedding use sparse=False."
            )
        if tensor.is_conj() or tensor.is_neg():
            raise CaptureError(
                f"a lazily conjugated or negated tensor takes part in the step{self._at()}. "
                f"Call .resolve_conj() or .resolve_neg() on it."
            )

    def _at(self) -> str:
        site = self._sites.here()
        return f" at {site.describe()}" if site else ""

    # -- ops ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler" or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)  # transpose_() and its like move no bytes: later regions show what they did
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _facts(func)
        position = len(self.ops)
        site = self._sites.here()
        self._refuse_dynamic(func, facts, args, site)
        self._bury(position)

        if func is aten.lift_fresh.default:
            return self._lift(args[0], site)
        storages: dict[int, torch.Tensor] = {}
        described = tuple(self._describe(a, storages) for a in args)
        described_kw = {k: self._describe(v, storages) for k, v in kwargs.items()}
        mutated = self._mutated(func, facts, args, kwargs)
        self._remember(mutated)
        generator = kwargs.get("generator")
        if facts.random and self._random is not None:
            self._random.before(generator, position, site)

        if self._log is not None:
            self._log.cell[0] = position
        try:
            out = func(*args, **kwargs)
        finally:
            if self._log is not None:
                self._log.cell[0] = -1

        if facts.random and self._random is not None:
            self._random.after(generator, position + 1)
        known = len(self.buffers)
        self._refuse_resized(func, mutated, site)
        outs = out if isinstance(out, tuple | list) else (out,)
        described_out = tuple(self._result(v, storages) for v in outs)
        holds = outs[0] if facts.reads_value and not isinstance(outs[0], torch.Tensor) else None
        # A result that is a look into an operand, written by nobody, moves no bytes: it is a region, not an op.
        if len(self.buffers) > known or mutated or holds is not None:
            ids = tuple(dict.fromkeys(self._region(t).buffer for t in mutated))
            self.ops.append(
                Op(
                    func,
                    described,
                    described_kw,
                    described_out,
                    ids,
                    self.phase,
                    torch.is_grad_enabled(),
                    site,
                    holds,
                )
            )
        return out

    def _lift(self, tensor: torch.Tensor, site: Site | None) -> torch.Tensor:
        """torch.tensor(data): the data is a constant of the program, and the tensor a copy of it, which the step may
        write (`total = torch.tensor(0.0); total += loss`)."""
        if tensor.untyped_storage()._cdata in self._by_storage and self._same_storage(tensor):
            return tensor
        ident = BufferId(len(self.buffers))
        constant = tensor.detach().clone()
        size, where = constant.untyped_storage().nbytes(), self._elsewhere(constant)
        self.buffers[ident] = Buffer(ident, size, Role.CONSTANT, f"constant{ident}", where)
        self._externals[ident] = constant
        source = Region(ident, constant.dtype, tuple(constant.shape), tuple(constant.stride()), 0)
        self._new_buffer(tensor, Role.INTERNAL)
        self.ops.append(Op(aten.clone.default, (source,), {}, (self._region(tensor),), (), self.phase, False, site))
        return tensor

    def _refuse_resized(self, func: Any, mutated: list[torch.Tensor], site: Site | None) -> None:
        for tensor in mutated:
            buffer = self.buffers[self._region(tensor).buffer]
            if buffer.role is not Role.BATCH and tensor.untyped_storage().nbytes() != buffer.size_bytes:
                where = f" at {site.describe()}" if site else ""
                raise CaptureError(
                    f"{func}{where} resized a tensor from {buffer.size_bytes} to {tensor.untyped_storage().nbytes()} "
                    f"bytes. A buffer has one size in a plan: give out= a tensor of the right shape."
                )

    # These two are methods, not closures: a recursive closure is a cycle that would keep eager's tensors alive.

    def _describe(self, value: Any, storages: dict[int, torch.Tensor]) -> Argument:
        if isinstance(value, torch.Tensor):
            self._refuse_unusual(value)
            storages[value.untyped_storage()._cdata] = value
            return self._region(value)
        if isinstance(value, list | tuple):
            return tuple(self._describe(v, storages) for v in value)
        return value

    def _result(self, value: Any, storages: dict[int, torch.Tensor]) -> Argument:
        if isinstance(value, torch.Tensor):
            self._refuse_unusual(value)
            key = value.untyped_storage()._cdata
            source = storages.get(key)
            if source is not None:
                trail = self._leaf_of.get(source)
                if trail is not None:
                    self._leaf_of[value] = trail
            elif key not in self._by_storage or not self._same_storage(value):
                self._new_buffer(value, Role.INTERNAL)
            return self._region(value)
        if isinstance(value, list | tuple):
            return tuple(self._result(v, storages) for v in value)
        return value

    def _same_storage(self, tensor: torch.Tensor) -> bool:
        """False if the address is known from a storage that has died since (its weak reference has expired)."""
        weak = self._weak.get(self._by_storage[tensor.untyped_storage()._cdata])
        return weak is None or not weak.expired()

    def _mutated(self, func: Any, facts: _OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        written = [args[i] for i in facts.written if i < len(args)]
        written += [kwargs[n] for n in facts.written_names if n in kwargs]
        hidden = _HIDDEN_WRITES.get(func)
        if hidden and args[5]:
            written += [args[i] for i in hidden]
        found: list[torch.Tensor] = []
        for value in written:
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, torch.Tensor):
                    found.append(item)
        return found

    def _remember(self, mutated: list[torch.Tensor]) -> None:
        """Keeps what the forward or backward is about to overwrite in the user's tensors."""
        if self.phase is Phase.UPDATE or not self._real:
            return
        for tensor in mutated:
            buffer = self._region(tensor).buffer
            if self.buffers[buffer].role is Role.INTERNAL:
                self._remember_new(buffer, tensor)
            elif buffer not in self._undo:
                if buffer in self._leaves:
                    self._refuse_shared(buffer)
                whole = self._externals[buffer] if buffer in self._externals else self._batch[self._leaves[buffer]]
                self._undo[buffer] = (whole.detach(), whole.detach().clone())

    def _remember_new(self, buffer: BufferId, tensor: torch.Tensor) -> None:
        """The same for state that the step has made itself and put into the model before it writes it: a buffer that
        is allocated when it is first needed. The step is recorded once more, and must find there what it began with."""
        if self.phase is not Phase.FORWARD or buffer in self._undo_new:
            return
        storage = tensor.untyped_storage()._cdata
        found = [t for t in self._held() if t.layout is torch.strided and t.untyped_storage()._cdata == storage]
        if found:  # by weak references: what the step lets go again is not kept alive
            self._undo_new[buffer] = [(weakref.ref(t), t.detach().clone()) for t in found]

    def _refuse_shared(self, buffer: BufferId) -> None:
        """A write to one batch tensor that shows in another would have to be followed by bytes, not by tensors."""
        mine = self._batch[self._leaves[buffer]].untyped_storage()._cdata
        sharing = [t for t in self._batch if t.untyped_storage()._cdata == mine]
        if len(sharing) > 1 or mine in self._reachable:
            raise CaptureError(
                f"the step writes a batch tensor in place{self._at()}, and its memory is shared with another tensor "
                f"of the batch or of the model. Write to a copy, or pass separate tensors."
            )

    @property
    def statistics(self) -> tuple[torch.Tensor, ...]:
        """What the forward and backward wrote of the user's."""
        return tuple(tensor for tensor, _ in self._undo.values())

    def rewind_(self) -> None:
        """Back to before the step: the user's tensors, and where the random generators stood."""
        self.undo_()
        if self._random is not None:
            self._random.rewind_()

    def undo_(self) -> None:
        """Puts back what the recorded forward and backward wrote into the user's tensors."""
        with torch.no_grad():
            for tensor, before in self._undo.values():
                tensor.copy_(before)
            for reference, before in (pair for pairs in self._undo_new.values() for pair in pairs):
                if (made := reference()) is not None:
                    made.detach().copy_(before)

    @property
    def new_state(self) -> tuple[torch.Tensor, ...]:
        """What the step made, put into the model and then wrote; `undo_` takes back the writing."""
        made = (reference() for pairs in self._undo_new.values() for reference, _ in pairs)
        return tuple(t for t in made if t is not None)

    def _refuse_dynamic(self, func: Any, facts: _OpFacts, args: tuple[Any, ...], site: Site | None) -> None:
        if not facts.dynamic:
            return
        if func is aten.index.Tensor and not any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            return
        where = f" at {site.describe()}" if site else ""
        raise CaptureError(
            f"{func} gives a tensor whose shape depends on the data{where}, so no plan can hold it. Keep the shape "
            f"fixed: multiply by the mask, use torch.where, or pass the selection as a part of the batch."
        )

    def _bury(self, position: int) -> None:
        """Notes which buffers eager has freed before the op at `position`."""
        dead = [ident for ident, weak in self._alive.items() if weak.expired()]
        for ident in dead:
            self._death[ident] = position
            del self._alive[ident]

    # -- the end -----------------------------------------------------------------------------------------------

    def mark_end_of_backward(self) -> None:
        if self._random is not None:
            self._random.finish(len(self.ops))

    def escaped(self, allowed: Sequence[torch.Tensor]) -> Op | None:
        """The op whose result somebody still holds, though it is none of the allowed tensors; or None."""
        keep = {self._region(t).buffer for t in allowed}
        held = [b for b, weak in self._alive.items() if b not in keep and not weak.expired()]
        if held:
            gc.collect()
            held = [b for b in held if not self._weak[b].expired()]
        if not held:
            return None
        first = held[0]
        return next((op for op in self.ops if any(r.buffer == first for r in op.outputs)), None)

    def orphan(self) -> Op | None:
        """The op that reads a tensor made inside the step behind torch's back (numpy, a C++ extension); or None."""
        for ident, tensor in self._externals.items():
            # Checked on 2.11 and 2.13: one use is our own alias of it, so nobody else holds these bytes.
            storage = tensor.untyped_storage()
            if self.buffers[ident].role is Role.CLOSURE and torch._C._storage_Use_Count(storage._cdata) <= 2:
                return next(op for op in self.ops if any(r.buffer == ident for r in op.inputs))
        return None

    def region(self, tensor: torch.Tensor) -> Region:
        return self._region(tensor)

    def program(
        self,
        loss: Region,
        aux: tuple[Region, ...],
        grads: Mapping[int, Region],
        grad_norm: Region | None,
        events: Sequence[AllocatorEvent] = (),
    ) -> Program:
        """Everything recorded, with the scratch that the allocator saw inside each op."""
        self._bury(len(self.ops))
        addressed = attach_scratch(self.ops, self._address, events)
        woven = self._random.weave(addressed) if self._random is not None else addressed
        shift = _positions(addressed, woven)
        return Program(
            tuple(woven),
            dict(self.buffers),
            dict(self._externals),
            dict(self._leaves),
            loss,
            aux,
            dict(grads),
            grad_norm,
            eager_death={b: shift(p) for b, p in self._death.items()},
        )


def _positions(before: list[Op], after: list[Op]) -> Callable[[int], int]:
    """Maps a position in `before` to the same op's position in `after`, which holds a few ops more."""
    if len(before) == len(after):
        return lambda position: position
    place = {id(op): i for i, op in enumerate(after)}
    table = [place[id(op)] for op in before] + [len(after)]
    return lambda position: table[position]
