"""Records one real training step as a `Program`: a dispatch mode sees every op below autograd, with its real tensors.

Contract: the recorded step *is* eager's step, same kernels, same order, same results; the recorder only looks. It holds
no tensor alive that eager would have freed. What the forward and backward write into the user's tensors is remembered
(undo.py), so that it can be put back if the step does not complete.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from takeback.compiler.capture import outlives
from takeback.compiler.capture.batch import map_leaves
from takeback.compiler.capture.buffers import BufferTable
from takeback.compiler.capture.eager_forms import PickedSums, as_in_eager, filled_share
from takeback.compiler.capture.eager_products import cross_entropy
from takeback.compiler.capture.enclose import enclosed
from takeback.compiler.capture.known_values import known_value
from takeback.compiler.capture.looked_on import own_node, refuse_other_form
from takeback.compiler.capture.modes import WithoutDispatchModes, be_on_dispatch_stack_
from takeback.compiler.capture.op_facts import facts_of, written_tensors
from takeback.compiler.capture.own_thread import OwnThread
from takeback.compiler.capture.ran import Onlooker, origin_of_file, pause_profile_
from takeback.compiler.capture.randomness import RandomTrail
from takeback.compiler.capture.scratch import AllocatorEvent, AllocatorLog, attach_scratch
from takeback.compiler.capture.site import Sites, at
from takeback.compiler.capture.trial import OpForm, form_of_op
from takeback.compiler.capture.undo import Undo
from takeback.compiler.capture.unplannable import (
    may_hold_shape,
    refuse_dynamic,
    refuse_higher_order,
    refuse_lazy,
    refuse_resized,
    refuse_unusual,
)
from takeback.compiler.program import Argument, Op, Phase, Program, Region, Role, Site
from takeback.errors import CaptureError

aten = torch.ops.aten
_RESIZE = (aten.resize_.default, aten.resize_as_.default)
_CROSS_ENTROPY = (torch.nn.functional.cross_entropy.__code__, cross_entropy.__code__)

MOST_HELD_ELEMENTS = 1 << 16
"""Values that C++ read are compared in each replay: lengths, offsets, sizes. More than this is data."""


class Recorder(TorchDispatchMode):
    """Collects the ops of one step. Use as a context manager around the step, then call `program()`."""

    records = True  #: tells a recorder from other modes on the stack
    supports_higher_order_operators = True  #: they come here, to be refused; checked on 2.13

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
        own: OwnThread | None = None,
        onlooker: Onlooker | None = None,
        modules: Mapping[int, str] | None = None,
        answers: Sequence[Op] = (),
        took_: Callable[[int], None] | None = None,
        exact: bool = True,
        replaced: Collection[int] = (),
    ) -> None:
        """`held()`: the tensors that the model's attributes hold just now. `onlooker` sees the step's own code.
        `modules`: the paths of the model's modules, by id. `answers`: of a step that is not real, the ops that read a
        value into Python when it was, in order. `took_` is told how many bytes each op has made.
        `exact`: what torch computes another way while it is recorded becomes what eager computes. `replaced`: storages
        of tensors that others stand in for."""
        super().__init__()
        self.ops: list[Op] = []
        self.phase = Phase.FORWARD
        self._sites = Sites(modules)
        self.table = BufferTable(
            known, batch, reachable=reachable, addresses=log is not None, at=self._sites.at, replaced=replaced
        )
        self._undo = Undo(self.table, held, self._sites.at)
        self._log = log
        self._real = real
        self._onlooker = onlooker
        # Fake ops draw no numbers.
        self._random = RandomTrail(generators, self.table.device, own) if real else None
        self._answers = iter(answers)
        self._took_ = took_
        self._by_mask: list[int] = []
        self._sums = PickedSums(_is_in_cross_entropy) if exact else None
        self.seen: list[OpForm] | None = None  #: while it is a list: every op that is dispatched
        #: The ids of tensors whose `.grad` Python has asked for, or that have had one.
        self.grads_read = {id(t) for t in batch if t.is_leaf and t.grad is not None}
        self.read_before: set[int] = set()  #: of batch tensors that an op has read while they needed no gradient
        self._plain = {id(t) for t in batch if t.is_floating_point() or t.is_complex()}

    def __exit__(self, *error: Any) -> None:
        be_on_dispatch_stack_(self)
        super().__exit__(*error)

    # -- ops ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        onlooker = self._onlooker
        if onlooker is None or onlooker.paused:
            return self._dispatched(func, args, kwargs or {})
        # Nothing in here is the step's own code: what the kernel of a custom op reads, it reads in each replay.
        profile = pause_profile_()
        onlooker.note_stack()
        onlooker.paused = True
        try:
            return self._dispatched(func, args, kwargs or {})
        finally:
            onlooker.paused = False
            if profile is not None:
                sys.setprofile(profile)

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunction():  # what the recorder itself asks of tensors is no call of the step's
            refuse_higher_order(func, self._sites.at)
            if self.seen is not None:
                self.seen.append(form_of_op(func, args, kwargs))
            facts = facts_of(func)
            if not facts.is_view and (_has_lazy(args) or (kwargs and _has_lazy(kwargs.values()))):
                args, kwargs = self._resolve(func, args, kwargs)
            return self._record(func, args, kwargs)

    def _resolve(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Conjugates and negates for real what is so by a flag only, in an op of its own: a region has no such flag.
        Eager does the same inside of most ops. A view of such a tensor is still one."""
        lazy = [t for t in _tensors((args, tuple(kwargs.values()))) if t.is_conj() or t.is_neg()]
        refuse_lazy(written_tensors(func, args, kwargs), self._sites.at)
        resolved: dict[int, torch.Tensor] = {}
        for tensor in lazy:
            plain = tensor
            for flagged, flip, op in (
                (tensor.is_conj(), torch.conj, aten._conj_physical.default),
                (tensor.is_neg(), torch._neg_view, aten.neg.default),
            ):
                if flagged:
                    base = flip(plain)
                    self.table.follow_leaf(base, plain)
                    plain = self._record(op, (base,), {})
            resolved[id(tensor)] = plain
        change = functools.partial(map_leaves, kind=torch.Tensor, change=lambda t: resolved.get(id(t), t))
        return tuple(change(a) for a in args), {name: change(value) for name, value in kwargs.items()}

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts, table = facts_of(func), self.table
        if self._sums is not None:
            refuse_other_form(func, args, self._sites.at)
        if func in _RESIZE:
            return self._resize(func, args, kwargs)
        if facts.moves_no_bytes:
            return func(*args, **kwargs)  # later regions show what it did
        if self._sums is not None:
            shared = filled_share(func, args, self._record)
            if shared is not None:
                return shared
            func, args = self._sums.instead(func, args)
            facts = facts_of(func)
        position = len(self.ops)
        site = self._sites.here()
        if facts.dynamic and not (self._real and self.phase is not Phase.UPDATE and may_hold_shape(func)):
            refuse_dynamic(func, args, site)
        table.bury(position)

        if func is aten.lift_fresh.default:
            return self._lift(args[0], site)
        storages: dict[int, torch.Tensor] = {}
        if self._plain and func is not aten.detach.default:
            self._note_plain(args)
        described = tuple([self._describe(a, storages) for a in args])
        described_kw = {k: self._describe(v, storages) for k, v in kwargs.items()} if kwargs else {}
        if self._random is not None and isinstance(kwargs.get("generator"), torch.Generator):
            described_kw["generator"] = self._random.own(kwargs["generator"])
        mutated = () if facts.writes_nothing else written_tensors(func, args, kwargs)
        if mutated and self._real:
            self._undo.remember(mutated, self.phase)
        random = self._random if facts.random else None
        if random is not None:
            random.before(kwargs.get("generator"), position, site)

        cell = self._log.cell if self._log is not None else None
        if facts.reads_value and not self._real:
            out = self._answer(func, args, kwargs)
        elif cell is None:
            out = as_in_eager(func, args, kwargs)
        else:
            cell[0] = position
            try:
                out = as_in_eager(func, args, kwargs)
            finally:
                cell[0] = -1

        if random is not None:
            random.after(kwargs.get("generator"), position + 1)
        known = len(table.buffers)
        if mutated:
            refuse_resized(func, mutated, table, site)
        outs = out if isinstance(out, tuple | list) else (out,)
        if self._took_ is not None:
            tensors = (t for t in outs if isinstance(t, torch.Tensor) and t.layout is torch.strided)
            self._took_(sum(t.untyped_storage().nbytes() for t in tensors))
        described_out = tuple([self._result(v, storages) for v in outs])
        expected = outs[0] if facts.reads_value and not isinstance(outs[0], torch.Tensor) else None
        # A result that is a look into an operand, written by nobody, moves no bytes: it is a region, not an op.
        if len(table.buffers) > known or mutated or expected is not None:
            ids = tuple(dict.fromkeys(table.region(t).buffer for t in mutated)) if mutated else ()
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
                    expected,
                )
            )
            if func is aten.index.Tensor and self._is_by_mask():
                self._by_mask.append(position)
        if self._sums is not None:
            self._sums.ran_(func, args, out, position)
        return out

    def _resize(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where it gives bytes to a tensor that the step has made without any, the program has a new one."""
        tensor, table, position, site = args[0], self.table, len(self.ops), self._sites.here()
        table.bury(position)
        before = table.of(tensor)
        if self._real and not before.size_bytes:
            self._undo.remember((tensor,), self.phase)
        cell = self._log.cell if self._log is not None else [-1]
        cell[0] = position
        try:
            out = func(*args, **kwargs)
        finally:
            cell[0] = -1
        size = tensor.untyped_storage().nbytes()
        if before.size_bytes or before.role is not Role.INTERNAL or not size:
            refuse_resized(func, (tensor,), table, site)
            return out
        if self._took_ is not None:
            self._took_(size)
        table.made(tensor)
        region, how = table.region(tensor), {"dtype": tensor.dtype, "device": tensor.device}
        shape = (region.shape, region.stride)
        self.ops.append(Op(aten.empty_strided.default, shape, how, (region,), (), self.phase, False, site))
        return out

    def _note_plain(self, args: Sequence[Any]) -> None:
        for value in args:
            if isinstance(value, torch.Tensor):
                if id(value) in self._plain and not value.requires_grad:
                    self.read_before.add(id(value))
            elif isinstance(value, list | tuple):
                self._note_plain(value)

    def _is_by_mask(self) -> bool:
        """Whether autograd itself picks rows out of a gradient by a mask just now: no code of anybody's sees how many
        they are."""
        return self.ops[-1].has_data_in_shape and own_node() is not None

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a fake tensor cannot say, the real one has: the program holds it, and a replay compares. Where there was
        no real one, what depends on no data can be computed."""
        known = next(self._answers, None)
        if known is not None and known.target is func:
            return known.expected
        values = [
            known_value(self.ops, self.table.buffers, self.table.externals, self.table.region(a))
            for a in args
            if isinstance(a, torch.Tensor)
        ]
        if kwargs or len(values) != len(args) or any(value is None for value in values):
            return func(*args, **kwargs)
        with WithoutDispatchModes():
            return func(*values)

    def _lift(self, tensor: torch.Tensor, site: Site | None) -> torch.Tensor:
        """torch.tensor(data): the data is a constant of the program, and the tensor a copy of it, which the step may
        write (`total = torch.tensor(0.0); total += loss`)."""
        if not self.table.knows(tensor):
            source = self.table.constant(tensor)
            if not self._real:
                tensor = aten.lift_fresh.default(tensor)  # a fake one, which fake ops may write
            self.table.made(tensor)
            result = self.table.region(tensor)
            self.ops.append(Op(aten.clone.default, (source,), {}, (result,), (), self.phase, False, site))
        return tensor

    def hold(self, tensor: torch.Tensor, reader: str, *, changed: bool) -> None:
        """The values of `tensor`, which `reader` has just read in C++, become an assumption of the program. `changed`:
        the same call has overwritten them."""
        site = self._sites.here()
        if changed or tensor.numel() > MOST_HELD_ELEMENTS:
            raise CaptureError(
                f"{reader}{at(site)} reads the values of a tensor of {tensor.numel()} elements "
                f"{'and overwrites them ' if changed else ''}where no replay can follow, and takeback holds at most "
                f"{MOST_HELD_ELEMENTS} such values by content. Pass them as a list in the batch."
            )
        region = self.table.region(tensor)
        if self.table.buffers[region.buffer].role is not Role.CONSTANT:
            with WithoutDispatchModes():
                held = self.table.constant(tensor)
            self.ops.append(Op(aten.equal.default, (region, held), {}, (True,), (), self.phase, False, site, True))

    # These two are methods, not closures: a recursive closure is a cycle that would keep eager's tensors alive.

    def _describe(self, value: Any, storages: dict[int, torch.Tensor]) -> Argument:
        if isinstance(value, torch.Tensor):
            refuse_unusual(value, self._sites.at, real=self._real)
            storage = value.untyped_storage()._cdata
            storages[storage] = value
            return self.table.region(value, storage)
        if isinstance(value, list | tuple):
            return tuple([self._describe(v, storages) for v in value])
        return value

    def _result(self, value: Any, storages: dict[int, torch.Tensor]) -> Argument:
        if isinstance(value, torch.Tensor):
            refuse_unusual(value, self._sites.at, real=self._real)
            storage = value.untyped_storage()._cdata
            source = storages.get(storage)
            if source is not None:
                self.table.follow_leaf(value, source, storage)
            elif not self.table.knows(value):
                self.table.made(value)
            return self.table.region(value, storage)
        if isinstance(value, list | tuple):
            return tuple([self._result(v, storages) for v in value])
        return value

    # -- the end -----------------------------------------------------------------------------------------------

    def mark_end_of_backward(self) -> None:
        if self._random is not None:
            self._random.finish(len(self.ops))

    @property
    def statistics(self) -> tuple[torch.Tensor, ...]:
        """What the forward and backward wrote of the user's."""
        return self._undo.statistics

    @property
    def new_state(self) -> tuple[torch.Tensor, ...]:
        """What the step made, put into the model and then wrote; `undo_` takes back the writing."""
        return self._undo.new_state

    def undo_(self) -> None:
        """Puts back what the recorded forward and backward wrote into the user's tensors."""
        self._undo.undo_()

    def rewind_(self) -> None:
        """Back to before the step: the user's tensors, and where the random generators stood."""
        self.undo_()
        if self._random is not None:
            self._random.rewind_()

    @property
    def random_ends(self) -> dict[torch.Generator, torch.Tensor]:
        """Of the generators that the step drew from: the states it left them in."""
        return self._random.ends if self._random is not None else {}

    def escaped(self, allowed: Sequence[torch.Tensor]) -> Op | None:
        """The op whose result somebody still holds, though it is none of the allowed tensors; or None."""
        return outlives.escaped(self.table, self.ops, allowed)

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the step has made these bytes."""
        table = self.table
        return tensor.layout is torch.strided and table.knows(tensor) and table.of(tensor).role is Role.INTERNAL

    def held_besides(self, returned: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Op | None:
        """The op whose result is returned and held besides, by others than the given tensors; or None. Of fake tensors
        it is not known."""
        return outlives.held_besides(self.table, self.ops, returned, given) if self._real else None

    def orphan(self) -> Op | None:
        """The op that reads a tensor made inside the step behind torch's back (numpy, a C++ extension); or None."""
        return outlives.orphan(self.table, self.ops)

    def detached(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes without a graph, once the step is over."""
        plain = tensor.detach()
        self.table.follow_leaf(plain, tensor)
        return plain

    def region(self, tensor: torch.Tensor) -> Region:
        """Of a tensor that the step gives."""
        refuse_lazy((tensor,), self._sites.at)
        return self.table.region(tensor)

    def program(
        self,
        loss: Region,
        aux: tuple[Region, ...],
        grads: Mapping[int, Region],
        grad_norm: Region | None,
        events: Sequence[AllocatorEvent] = (),
    ) -> Program:
        """Everything recorded, with the scratch that the allocator saw inside each op."""
        table = self.table
        table.bury(len(self.ops))
        table.finish_()
        addressed = attach_scratch(self.ops, table.address, events)
        woven = self._random.weave(addressed) if self._random is not None else addressed
        shift = _positions(addressed, woven)
        spent = self._sums.spent if self._sums is not None else ()
        whole = enclosed(woven, [shift(p) for p in self._by_mask], spent=[shift(p) for p in spent])
        return Program(
            tuple(whole.ops),
            dict(table.buffers),
            dict(table.externals),
            dict(table.leaves),
            loss,
            aux,
            dict(grads),
            grad_norm,
            eager_death={b: whole.position(shift(p)) for b, p in table.death.items() if b not in whole.gone},
        )


def _is_in_cross_entropy() -> bool:
    """Whether torch's cross-entropy runs an op just now by itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CROSS_ENTROPY:
        if origin_of_file(frame.f_code.co_filename) == "user":
            return False
        frame = frame.f_back
    return frame is not None


def _has_lazy(values: Iterable[Any]) -> bool:
    """Whether one of the tensors in there is conjugated or negated by a flag only."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_conj() or value.is_neg():
                return True
        elif isinstance(value, list | tuple) and _has_lazy(value):
            return True
    return False


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _positions(before: list[Op], after: list[Op]) -> Callable[[int], int]:
    """Maps a position in `before` to the same op's position in `after`, which holds a few ops more."""
    if len(before) == len(after):
        return lambda position: position
    place = {id(op): i for i, op in enumerate(after)}
    table = [place[id(op)] for op in before] + [len(after)]
    return lambda position: table[position]
