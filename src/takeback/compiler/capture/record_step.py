"""Runs the user's step once under the recorder and returns a `Capture`: program, assumptions and results.

The forward and backward have run for real when this returns, and gradients lie in `.grad`; nothing of the model or
optimizer has been changed for good except what the step itself wrote, and `Capture.rewind_` takes that back.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from takeback.compiler.capture.aside import Aside
from takeback.compiler.capture.assumptions import Assumptions, Place, Varying
from takeback.compiler.capture.aux_objects import close_objects, open_objects, without_graph
from takeback.compiler.capture.batch import cut, map_leaves, map_tensors, objects_of, results_of, tensors_of
from takeback.compiler.capture.batch_grads import as_before, drop_
from takeback.compiler.capture.derived import (
    Buffers,
    Derived,
    derived_of,
    forget_,
    hidden,
    put_holders_back_,
    refuse_aliases,
    settle_,
    shared,
    write_,
)
from takeback.compiler.capture.drawers import Drawer, Learner
from takeback.compiler.capture.drawn import Calls
from takeback.compiler.capture.eager_products import EagerProducts
from takeback.compiler.capture.given import WatchedCall, handed_dicts, looks_past, watched_call
from takeback.compiler.capture.kin import Kin
from takeback.compiler.capture.leaks import tripwires
from takeback.compiler.capture.loss import Leaves, check_loss, leaves_of, split_loss
from takeback.compiler.capture.modes import be_off_function_stack_, modes, unnoticed
from takeback.compiler.capture.moved_data import ParameterData
from takeback.compiler.capture.numbers import (
    Trace,
    TracedNumber,
    bound,
    check_out,
    handed,
    may_be_looked_at,
    put_back_,
    traced,
)
from takeback.compiler.capture.one_hot import OneHots
from takeback.compiler.capture.own_thread import watching
from takeback.compiler.capture.ran import Onlooker, Seen
from takeback.compiler.capture.randomness import DrawsFromNumpy, NumpyGenerator, default_generators
from takeback.compiler.capture.reads import Reads
from takeback.compiler.capture.recorder import Recorder
from takeback.compiler.capture.scratch import AllocatorEvent, AllocatorLog
from takeback.compiler.capture.site import at
from takeback.compiler.capture.subject import Subject
from takeback.compiler.capture.uncompiled import SCRIPTED, notes_of, uncompiled, unscripted
from takeback.compiler.capture.unplannable import RunsOtherwiseFirst
from takeback.compiler.program import Op, Phase, Program
from takeback.errors import CaptureError

_NOTHING = Varying()
_NEAR = 1e-6  #: two runs of one step: kernels that add atomically round as it comes
_NEAR_ON_A_GPU = 1e-3

_CACHED = (
    "If a cache of a function holds it (functools.lru_cache), train with the function that the cache wraps (its "
    "__wrapped__)."
)


@dataclass(frozen=True)
class AuxSlot:
    """Stands in aux for the tensor at `index`."""

    index: int

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tensors[self.index]


@dataclass(frozen=True)
class AuxNumber(AuxSlot):
    """Stands in aux for a number that was traced: what it is now."""

    read: Callable[[], float]

    def value(self, tensors: Sequence[torch.Tensor]) -> float:
        return self.read()


@dataclass(frozen=True)
class Capture:
    """What one recorded forward and backward gave."""

    program: Program
    assumptions: Assumptions
    loss: torch.Tensor
    aux: Any  #: as loss_fn returned it, detached; None if it returned the loss alone
    aux_form: Any  #: the same with an `AuxSlot` for every tensor and traced number
    has_aux: bool
    grad_norm: torch.Tensor | None
    trace: Trace | None = field(default=None, kw_only=True)  #: of numbers that the step only computed with
    rewind_: Callable[[], None]  #: takes back what the step wrote and drew, as often as it is called
    statistics: tuple[torch.Tensor, ...]  #: what the forward and backward wrote of the user's
    aside: Aside = field(default_factory=Aside)
    notes: tuple[str, ...] = ()
    random_ends: Mapping[torch.Generator, torch.Tensor] = field(default_factory=dict)  #: where the step left them
    kin: Kin | None = None  #: for a recording of the same step with other shapes


Recordings = Callable[[], contextlib.AbstractContextManager[AllocatorLog]]


@dataclass(frozen=True)
class _How:
    """How a step is recorded, whatever it is."""

    recording: Recordings | None
    real: bool
    on_abort: Callable[[Callable[[], None]], None]
    answers: Sequence[Op]
    took_: Callable[[int], None] | None


def capture(
    subject: Subject,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recording: Recordings | None = None,
    real: bool = True,
    on_abort: Callable[[Callable[[], None]], None] = lambda undo: None,
    varying: Varying = _NOTHING,
    kin: Kin | None = None,
    answers: Sequence[Op] = (),
    took_: Callable[[int], None] | None = None,
    once: bool = False,
) -> Capture:
    """Records the step. A step that fills a cache the first time it runs is recorded a second time, unless `once` is
    true: then it is refused, and what it kept is taken out again. `on_abort` is given what takes back all that the step
    writes, before it writes anything. What is `varying` is traced, if the step lets it. `kin`: of an earlier recording,
    whose assumptions all hold. `answers` and `took_` are for the recorder."""
    how = _How(recording, real, on_abort, answers, took_)
    first = _look(subject, args, kwargs) if kin is None else kin.before
    before = {
        t.untyped_storage()._cdata for t in _strided(*subject.known(), *first.tensors, *tensors_of((args, kwargs)))
    }
    buffers = Buffers(subject.modules)
    device = next((p.device for p in subject.parameters), torch.device("cpu"))
    states = [(g, g.get_state()) for g in default_generators(device)] if real else []
    if subject.drawers.known:
        states.append((subject.drawers.generator, subject.drawers.generator.get_state()))

    def put_back_() -> None:
        buffers.put_back_()
        for generator, state in states:
            generator.set_state(state)

    try:
        try:
            if varying:
                with contextlib.suppress(
                    Exception
                ):  # what a step does not take of a traced number, it takes of a plain one
                    return _attempt(subject, args, kwargs, first, how, varying)
                put_back_()
            got = _attempt_drawing(subject, args, kwargs, first, how, put_back_, kin)
            if kin is None:
                _refuse_holders_elsewhere(got, subject, args, kwargs)
            return got
        except _KeptState as kept:
            if once or kept.otherwise_first or kept.replaced:  # it would begin with what this run has left in buffers
                raise
            for generator, state in states:
                generator.set_state(state)
            again = _look(subject, args, kwargs)
            try:
                with unscripted() if kept.unseen else contextlib.nullcontext(()) as as_written:
                    got = _attempt_drawing(subject, args, kwargs, again, how, put_back_)
            except CaptureError as error:
                _leave_nothing_(first, buffers, kept)
                raise CaptureError(f"{kept} When the step ran once more: {error}") from error
            except Exception as error:
                if not isinstance(error, _KeptState):
                    _leave_nothing_(first, buffers, kept)
                raise
            if as_written:
                got = replace(got, notes=(*got.notes, SCRIPTED))
            taken_back = {t.untyped_storage()._cdata for t in kept.new_state}
            _refuse_unknown_state(got, subject, before | taken_back)
            _refuse_holders_elsewhere(got, subject, args, kwargs, kept.within)
            _refuse_other_draws(got, subject, kept)
            _refuse_other_numbers(got, subject, kept)
            return _with_generators_left(got, kept)
    except _KeptState as kept:
        _leave_nothing_(first, buffers, kept)
        if kept.replaced:
            for generator, state in states:
                generator.set_state(state)
            _refuse_shared_writes(subject, args, kwargs, kept)
            settle_(kept.replaced)
            holding = replace(subject, derived=derived_of(subject.modules))
            try:
                return capture(
                    *(holding, args, kwargs),
                    recording=recording,
                    real=real,
                    on_abort=on_abort,
                    varying=varying,
                    answers=answers,
                    took_=took_,
                    once=once,
                )
            except BaseException:
                forget_(kept.replaced)
                buffers.put_back_()
                raise
        raise (RunsOtherwiseFirst if kept.otherwise_first else CaptureError)(str(kept)) from None


def _leave_nothing_(before: Assumptions, buffers: Buffers, kept: _KeptState) -> None:
    """Takes out again what a recording has kept that is refused."""
    before.restore_(kept.within)
    buffers.put_back_()


def _strided(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from (t for t in tensors if t.layout is torch.strided)


def _refuse_unknown_state(got: Capture, subject: Subject, known: Collection[int]) -> None:
    """State that the first recording made and wrote, and that the second wrote again, would be one step ahead of
    eager's: what it held in between is not known."""
    for tensor in got.statistics:
        if tensor.untyped_storage()._cdata not in known:
            got.rewind_()
            for p in subject.parameters:
                p.grad = None
            raise _KeptState(
                f"the step makes a tensor of shape {tuple(tensor.shape)} the first time it runs, keeps it, and writes "
                f"it in the same run and in every later one. What it held before is not known, so its first update "
                f"would count twice. Make it before the first step, or keep it as a buffer of a module."
            )


def _refuse_holders_elsewhere(
    got: Capture, subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], within: set[Place] | None = None
) -> None:
    """Whoever keeps the tensor of a buffer that is replaced has its old value in eager, and would see the new one."""
    if not any(a.is_buffer for a in subject.derived):
        return
    with hidden(subject.derived) as values:
        found = shared(values, (*_look(subject, args, kwargs).tensors, *subject.known()))
    if found:
        got.rewind_()
        for p in subject.parameters:
            p.grad = None
        raise _KeptState(
            f"{found[0].described()} is replaced by the step, and its tensor is kept elsewhere in the step's reach, "
            f"where it would have to stay as it was. Keep a copy there (.clone()), or write the buffer in place "
            f"(copy_).",
            within=within,
        )


def _refuse_shared_writes(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], kept: _KeptState) -> None:
    """A buffer that is written in place, and then replaced, must not have been anyone else's, too: they get a holder
    of their own before the step."""
    with hidden(kept.replaced) as values:
        found = shared(values, (*_look(subject, args, kwargs).tensors, *subject.known()))
        tensors = dict(values)
    for attribute in found:
        if tensors[attribute].untyped_storage()._cdata in kept.written:
            raise CaptureError(
                f"{attribute.described()} is written in place and replaced in one step, and its tensor is kept "
                f"elsewhere, too, where eager would see what is written. Keep a copy there (.clone()), or only write "
                f"the buffer in place (copy_)."
            )


def _refuse_other_draws(got: Capture, subject: Subject, kept: _KeptState) -> None:
    """Where the second run draws as well, it must have drawn the same numbers as the first."""
    if any(not torch.equal(kept.random_ends.get(g, end), end) for g, end in got.random_ends.items()):
        got.rewind_()
        for p in subject.parameters:
            p.grad = None
        raise _KeptState(
            "the step draws other random numbers the first time it runs than in every later run: it makes a module or "
            "a tensor with random values and keeps it. Recorded a second time, what it draws besides (dropout) would "
            "not be what eager draws. Run the model once on such a batch before the first step.",
            within=kept.within,
            otherwise_first=True,
        )


def _refuse_other_numbers(got: Capture, subject: Subject, kept: _KeptState) -> None:
    """The second run counts as the step, so it must have computed what the first did."""
    if kept.unseen or kept.numbers is None:  # TorchScript's kernels may round otherwise
        return
    numbers = _numbers(subject, got.loss)
    if not _are_near(numbers, kept.numbers):
        got.rewind_()
        for p in subject.parameters:
            p.grad = None
        raise _KeptState(
            f"the step computes something else the first time it runs than when it is run once more (loss "
            f"{kept.numbers[0].item():.6g}, then {numbers[0].item():.6g}): what the first run keeps changes the "
            f"result. Run the model once on such a batch before the first step, or keep such state in buffers that are "
            f"written in place (copy_).",
            within=kept.within,
            otherwise_first=True,
        )


def _numbers(subject: Subject, loss: torch.Tensor) -> torch.Tensor:
    """The loss, and how large each gradient is: two runs of one step that differ in neither are one."""
    with torch.no_grad():
        grads = [p.grad.detach() for p in subject.parameters if p.grad is not None]
        sizes = [torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g).double() for g in grads]
        return torch.stack([n.to(loss.device) for n in (loss.detach().double(), *sizes)])


def _are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Gradients that are noise beside the largest one, as a bias before a norm has them, may differ by that."""
    if one.shape != other.shape:
        return False
    near = _NEAR if one.is_cpu else _NEAR_ON_A_GPU
    largest = max((n for n in one[1:].tolist() if math.isfinite(n)), default=0.0)
    within = torch.full_like(one, near * largest)
    within[0] = 0.0
    return bool(
        (torch.isclose(one, other, rtol=near, atol=0.0, equal_nan=True) | ((one - other).abs() <= within)).all()
    )


def _with_generators_left(got: Capture, kept: _KeptState) -> Capture:
    """The second recording, with the generators as the first run has left them, which is what eager does."""
    alone = {g: end for g, end in kept.random_ends.items() if g not in got.random_ends}

    def leave_() -> None:
        for generator, end in alone.items():
            generator.set_state(end)

    def rewind_() -> None:  # to where the second run begins, not the first: what that made is still there
        got.rewind_()
        leave_()

    leave_()
    return replace(got, rewind_=rewind_)


def _look(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen | None = None) -> Assumptions:
    """What the step reads, if it was seen; else whatever is in its reach."""
    arguments = tuple(objects_of((args, kwargs)))
    roots = {"model": subject.model, "loss_fn": subject.loss_fn, "arguments": arguments, "modes": modes()}
    return Assumptions(seen, subject.given, **roots)


class _KeptState(Exception):
    """The step changed Python state, or left a tensor behind: right once (a cache), refused twice."""

    def __init__(
        self,
        reason: str,
        new_state: Sequence[torch.Tensor] = (),
        within: set[Place] | None = None,
        random_ends: Mapping[torch.Generator, torch.Tensor] | None = None,
        otherwise_first: bool = False,
        unseen: bool = False,
        replaced: Sequence[Derived] = (),
        written: Collection[int] = (),
        numbers: torch.Tensor | None = None,
    ) -> None:
        super().__init__(reason)
        self.replaced = replaced  #: buffers in whose place the step has left other tensors
        self.unseen = unseen  #: a tensor was made where the dispatcher does not see it
        self.otherwise_first = otherwise_first  #: the first run draws or computes other numbers than later ones
        self.written = written  #: the storages that the step wrote
        self.numbers = numbers  #: what it computed, if it ran for real
        self.random_ends = random_ends or {}
        self.new_state = new_state  #: what the step made and wrote, as it was before it was written
        self.within = within  #: the places that it read


_OF_A_STAND_IN = (CaptureError, TypeError, ValueError, AttributeError)
"""What may be raised where something stands for a call, or for what it gives."""


def _attempt_drawing(
    subject: Subject,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: Assumptions,
    how: _How,
    put_back_: Callable[[], None],
    kin: Kin | None = None,
) -> Capture:
    """A recording in which functions that draw from numpy's generator become ops: those that are known, and those that
    are found where the step draws besides. `put_back_` takes back what an attempt leaves."""
    attempt = functools.partial(_attempt, subject, args, kwargs, before, how)
    if not (how.real and NumpyGenerator.can_be_followed()):
        return attempt(kin=kin)
    subject.drawers.forget_()
    drawers, known = subject.drawers, subject.drawers.known
    stood = drawers.generator.get_state()

    def again_() -> None:
        put_back_()
        drawers.generator.set_state(stood)

    try:
        return attempt(kin=kin, drawers=known)
    except DrawsFromNumpy:
        pass  # and go on out of here, since a traceback holds what was recorded
    except _OF_A_STAND_IN:
        if not known:
            raise
        again_()
        return attempt(kin=kin)
    again_()
    with contextlib.suppress(CaptureError, _KeptState), Learner() as learner:
        attempt(drawers=known)
    again_()
    if not drawers.learn_(learner.found):
        raise DrawsFromNumpy(learner.refused)
    try:
        return attempt(kin=kin, drawers=drawers.known)
    except _OF_A_STAND_IN as error:
        again_()
        drawers.known = known
        if isinstance(error, DrawsFromNumpy):
            raise
        raise CaptureError(f"{DrawsFromNumpy('')} Here that cannot be done: {error}") from error


def _attempt(
    subject: Subject,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: Assumptions,
    how: _How,
    varying: Varying = _NOTHING,
    kin: Kin | None = None,
    drawers: Sequence[Drawer] = (),
) -> Capture:
    real, on_abort, recording = how.real, how.on_abort, how.recording
    buffers = Buffers(subject.modules)
    data = ParameterData({"": subject.model, **subject.beside} if real else {})

    def look() -> Kin:
        seen = onlooker.seen
        if kin is not None and kin.covers(seen):
            return kin
        assumptions = _look(subject, args, kwargs, seen)
        return Kin(before, assumptions, assumptions.places(), seen)

    on_abort(data.put_back_)
    on_abort(functools.partial(put_holders_back_, subject.derived))
    for p in subject.parameters:
        p.grad = None
    torch.clear_autocast_cache()  # casts of the weights made before belong to the step, and must be in the program
    batch = tensors_of((args, kwargs))
    log: AllocatorLog | None = None
    with contextlib.ExitStack() as stack:
        trace = stack.enter_context(traced(varying.numbers))
        on_abort(functools.partial(put_back_, trace))
        watch = functools.partial(watched_call, args, kwargs, subject.arguments, subject.given, subject.loss_fn)
        handed_over = varying.given or any(place.container is subject.given for place in varying.numbers)
        call = watch(notes=bool(varying.given)) if handed_over else WatchedCall(args, kwargs)
        onlooker = Onlooker((*before.objects, *call.objects.values()))
        numbers, dicts = handed(trace), handed_dicts()
        onlooker.also = (numbers.note, dicts.note) if varying else ()
        on_abort(onlooker.stop_)
        stack.enter_context(uncompiled())
        stack.enter_context(unnoticed())
        log = stack.enter_context(recording()) if recording is not None else None
        device = next((p.device for p in subject.parameters), torch.device("cpu"))
        own = stack.enter_context(watching(device))
        calls = Calls(drawers, subject.drawers.generator, device)
        recorder = Recorder(
            subject.known(),
            batch,
            log,
            real,
            reachable=before.tensors,
            generators=(*before.generators, *((subject.drawers.generator,) if drawers else ())) if real else (),
            held=_Attributes(subject.model).tensors,
            own=own,
            onlooker=onlooker,
            modules={id(module): path for path, module in subject.model.named_modules()},
            answers=how.answers,
            took_=how.took_,
            exact=subject.exact,
            replaced=subject.replaced,
        )

        def take_back_() -> None:
            recorder.rewind_()
            put_holders_back_(subject.derived)
            for p in subject.parameters:
                p.grad = None

        stack.enter_context(as_before(batch, but=recorder.read_before))
        on_abort(recorder.rewind_)
        reads = Reads(recorder) if real else contextlib.nullcontext()
        products = EagerProducts() if subject.exact else contextlib.nullcontext()
        hots = OneHots()
        try:
            wires = tripwires(own, follows_numpy=bool(drawers))
            with wires, torch.enable_grad(), onlooker, reads, products, hots, calls.of(recorder):
                ran = _run(subject, recorder, call, batch, before.tensors)
                call.check_out()
                check_out(ran.aux, trace)
        except BaseException as error:
            be_off_function_stack_(reads, products, hots)
            take_back_()
            if isinstance(error, RunsOtherwiseFirst):
                raise _KeptState(str(error), within=look().within, otherwise_first=True) from None
            raise
    # Not before the backward, in which a hook may fill a dict that is returned.
    ran = replace(ran, aux=without_graph(ran.aux, recorder.detached))

    got = _finish(subject, recorder, look, ran, log.events if log is not None else (), buffers, data, real)
    got = replace(got, notes=(*got.notes, *notes_of(onlooker.seen), *calls.notes()))
    shown = trace.asked or numbers.met or may_be_looked_at(onlooker.seen, varying.numbers)
    past = looks_past(onlooker.seen)
    read = dicts.met or not all(call.is_unread(path, onlooker.seen) and not past for path in varying.given)
    if varying and (shown or read or not _as_before(got.program, trace, varying)):
        # Code that asks for the very type of a dict, or of a number, computes something else with what stands for one.
        take_back_()
        data.put_back_()
        raise CaptureError("the step is not the one before with other values: it is recorded with the user's own")
    return replace(got, trace=trace) if varying else got


def _as_before(program: Program, trace: Trace, varying: Varying) -> bool:
    """Whether a recording with what stands for the values of the batch is, but for these, the one before."""
    then = [place.then for place in varying.numbers]
    return varying.of is not None and bound(program, trace, varying.of, then) is not None


class _Attributes:
    """The attributes of a model's modules. Asked for before many ops: modules are walked only if they are others."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._children: list[Mapping[str, torch.nn.Module | None]] = []
        self._known: list[torch.nn.Module | None] = []
        self._tables: list[Mapping[str, Any]] = []

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that are tensors, registered or not."""
        now = [child for table in self._children for child in table.values()]
        if not self._tables or len(now) != len(self._known) or not all(map(operator.is_, now, self._known)):
            modules = list(self._model.modules())
            self._children = [m._modules for m in modules]
            self._known = [child for table in self._children for child in table.values()]
            self._tables = [table for m in modules for table in (vars(m), m._buffers)]
        for table in self._tables:
            for value in table.values():
                if isinstance(value, torch.Tensor):
                    yield value


@dataclass(frozen=True)
class _Ran:
    """What a run of the step gave, besides the gradients in `.grad`."""

    loss: torch.Tensor
    aux: Any
    has_aux: bool
    grad_norm: torch.Tensor | None
    foreign: dict[torch.nn.Parameter, str]  #: parameters of other modules that the loss depends on, with their names


def _run(
    subject: Subject,
    recorder: Recorder,
    call: WatchedCall,
    batch: Sequence[torch.Tensor],
    reachable: Sequence[torch.Tensor],
) -> _Ran:
    """The eager recipe: forward, backward, sum over microbatches, unscale, clip. `batch`: the call's tensors."""
    parted, scaling = cut(call.both, subject.accumulate), subject.scaling
    if scaling is not None:
        scaling.begin_()
    total: torch.Tensor | None = None
    parts: list[Any] = []
    has_aux = False
    foreign: dict[torch.nn.Parameter, str] = {}
    with recorder:
        for index in range(parted.count):
            recorder.phase = Phase.FORWARD
            part_args, part_kwargs = parted.part(call.both, index)
            out = subject.loss_fn(subject.model, *part_args, **part_kwargs)
            loss, aux, has_aux = split_loss(out, subject.loss_fn)
            check_loss(loss, subject, first=index == 0)
            leaves = leaves_of(loss, subject, reachable)
            parts.append(aux)
            part = parted.weigh(loss, index)
            root = part if scaling is None else scaling.scale(part)
            recorder.phase = Phase.BACKWARD
            foreign |= _backward(root, subject, leaves)
            held = batch if parted.count == 1 else tensors_of((part_args, part_kwargs))
            drop_(held, recorder.grads_read, recorder.read_before)
            detached = part.detach()
            total = detached if total is None else total + detached
            del loss, out, part, root, leaves
        for p in subject.parameters:
            if p.grad is not None and (p.grad.is_conj() or p.grad.is_neg()):  # a complex one may be left so by autograd
                p.grad = p.grad.resolve_conj().resolve_neg()
        with torch.no_grad():
            others = (*reachable, *subject.parameters, *(t for t, _ in subject.states), *batch)
            refuse_aliases(subject.derived, others)
            write_(subject.derived)
    recorder.mark_end_of_backward()
    assert total is not None
    aux = open_objects(parts[0] if subject.accumulate == 1 else tuple(parts))
    if not subject.updates:
        return _Ran(total, aux, has_aux, None, foreign)
    with recorder:
        if scaling is None:
            recorder.phase = Phase.UPDATE
        else:
            scaling.unscale_()  # still the backward, and so is clipping: eager does both, then decides on the update
        wanted = [p for p in subject.parameters if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(wanted, subject.clip_norm) if subject.clip_norm is not None else None
    return _Ran(total, aux, has_aux, norm, foreign)  # what runs in here counts as the step's: no code of a library's


def _backward(loss: torch.Tensor, subject: Subject, leaves: Leaves) -> dict[torch.nn.Parameter, str]:
    """Of the parameters of other modules no gradient is computed, unless a checkpoint asks for the whole backward.
    Gives those that would have got one."""
    wanted = [p for p in subject.parameters if p.requires_grad]
    narrow = bool(leaves.foreign) and not leaves.reentrant
    try:
        with Aside(tuple(leaves.foreign)).around():
            # What loss.backward() does. That itself would set aside the mode that sees the calls of a custom backward.
            one = torch.ones_like(loss, memory_format=torch.preserve_format)
            torch.autograd.graph._engine_run_backward(  # checked on 2.11 and 2.13
                (loss,),
                (one,),
                False,
                False,
                tuple(wanted) if narrow else (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
            return {p: name for p, name in leaves.foreign.items() if narrow or p.grad is not None}
    except RuntimeError as error:
        if "second time" in str(error):
            raise CaptureError(
                "loss_fn ran the backward itself, so there is nothing left to differentiate. Return the loss; "
                "takeback runs forward, backward and update."
            ) from error
        raise


def _finish(
    subject: Subject,
    recorder: Recorder,
    look: Callable[[], Kin],
    ran: _Ran,
    events: Sequence[AllocatorEvent],
    buffers: Buffers,
    data: ParameterData,
    real: bool,
) -> Capture:
    """Refuses what a replay would get wrong; else puts the capture together."""
    aux_tensors = results_of(ran.aux)
    grads = {i: p.grad for i, p in enumerate(subject.parameters) if p.grad is not None}
    found_inf = subject.scaling.found_inf if subject.scaling is not None and subject.updates else None
    given = [ran.loss, *aux_tensors, *grads.values(), *(t for t in (ran.grad_norm, found_inf) if t is not None)]
    torch.clear_autocast_cache()
    kin = look()
    before, assumptions, within = kin.before, kin.assumptions, kin.within
    returned = (ran.loss, *aux_tensors)
    reason = _moved(recorder, data) or _kept(recorder, before, assumptions, within, given, returned)
    if reason is not None:
        written = {t.untyped_storage()._cdata for t in _strided(*recorder.statistics)}
        numbers = _numbers(subject, ran.loss) if real else None
        recorder.rewind_()
        for p in subject.parameters:
            p.grad = None
        unseen = recorder.orphan() is not None
        replaced = buffers.replaced()
        raise _KeptState(
            *(reason, recorder.new_state, within, recorder.random_ends),
            unseen=unseen,
            replaced=replaced,
            written=written,
            numbers=numbers,
        )
    program = recorder.program(
        recorder.region(ran.loss),
        tuple(recorder.region(t) for t in aux_tensors),
        {i: recorder.region(g) for i, g in grads.items()},
        recorder.region(ran.grad_norm) if ran.grad_norm is not None else None,
        events,
    )
    if found_inf is not None:
        program = replace(program, found_inf=recorder.region(found_inf))
    assumptions.hold_(before, list(program.externals.values()))
    aux = map_tensors(ran.aux, lambda t: t.detach())
    counter = iter(range(len(aux_tensors)))
    numbered = map_leaves(aux, TracedNumber, lambda number: AuxNumber(0, number.read))
    form = map_tensors(numbered, lambda _: AuxSlot(next(counter)))
    aux = map_leaves(aux, TracedNumber, lambda number: number.read())
    return Capture(
        program,
        assumptions,
        ran.loss,
        close_objects(aux),
        form,
        ran.has_aux,
        ran.grad_norm,
        recorder.rewind_,
        recorder.statistics,
        Aside(tuple(ran.foreign), subject.derived),
        (*_notes(ran.foreign), *_frozen_notes(subject, grads), *_shape_notes(program)),
        recorder.random_ends,
        kin,
    )


def _notes(foreign: Mapping[torch.nn.Parameter, str]) -> Iterator[str]:
    if foreign:
        yield (
            f"the loss depends on {len(foreign)} parameters of other modules ({next(iter(foreign.values()))}, ...), "
            f"which this step does not train: their gradients are not computed, and their .grad is left as it is. "
            f"Eager would add to it what zero_grad() throws away before those modules are trained"
        )


def _shape_notes(program: Program) -> Iterator[str]:
    met = [op for op in program.ops if op.has_data_in_shape]
    if met:
        yield (
            f"{len(met)} results have a shape that depends on the data ({met[0].name}{at(met[0].site)}): this plan is "
            f"for the shapes that were recorded, and a step with others is recorded anew"
        )


def _frozen_notes(subject: Subject, grads: Mapping[int, torch.Tensor]) -> Iterator[str]:
    """LoRA and the like: what the frozen part would take, and does not."""
    frozen = [p for p in subject.parameters if not p.requires_grad]
    if frozen and grads:
        taken, spared = (sum(t.nbytes for t in tensors) / 2**20 for tensors in (grads.values(), frozen))
        yield (
            f"gradients take {taken:.2f} MiB: {len(grads)} of {len(subject.parameters)} parameters have one; the "
            f"{len(frozen)} that are frozen ({spared:.2f} MiB) have none, not even inside of the backward"
        )


def _moved(recorder: Recorder, data: ParameterData) -> str | None:
    """Why a parameter cannot be given memory that the step has made."""
    name = next((name for name, p in data.moved() if recorder.has_made(p)), None)
    if name is None:
        return None
    return (
        f"the step gives the parameter {name} other memory (p.data = ...), and a replay would go on in the old one. "
        f"Write it in place: p.data.copy_(...) with what stands on the right now, or, for a moving average, "
        f"p.data.mul_(m).add_(q.data, alpha=1 - m)."
    )


def _where(op: Op) -> str:
    return op.site.describe() if op.site else "unknown line"


def _kept(
    recorder: Recorder,
    before: Assumptions,
    assumptions: Assumptions,
    within: set[Place],
    given: Sequence[torch.Tensor],
    returned: Sequence[torch.Tensor],
) -> str | None:
    """What the step has left behind besides the tensors it gave, of which some are returned to its caller, and why a
    replay would get it wrong; or None."""
    escaped = recorder.escaped(given)
    if escaped is not None:
        return (
            f"a tensor made in the step outlives it: the result of {escaped.name} at {_where(escaped)} is still held "
            f"by your objects after the step. A replay would leave a stale tensor there. Return it as aux instead: "
            f"loss_fn may return (loss, aux). {_CACHED}"
        )
    orphan = recorder.orphan()
    if orphan is not None:
        return (
            f"{orphan.name}{at(orphan.site)} reads a tensor that was made inside the step without torch's dispatcher "
            f"(numpy, a TorchScript function, a C++ extension). A replay would use the same data for ever. Make it "
            f"before the step and pass it in; TorchScript can be turned off by PYTORCH_JIT=0 in the environment."
        )
    drawn = before.drawn(within) or assumptions.iterator()
    if drawn is not None:
        return (
            f"the step keeps state in Python: it draws from {drawn}, and a replay would use the first draw for ever. "
            f"Draw before the step and pass the result in as a tensor, or draw with torch."
        )
    changed = before.change(within)
    if changed is not None:
        return (
            f"the step keeps state in Python: {changed}. A replay runs no Python, so this would stop changing. "
            f"Pass the value to the step as a tensor, or change it outside of loss_fn and the model. For a metric or a "
            f"history, return the tensor as aux and update it outside."
        )
    held = recorder.held_besides(returned, given)
    if held is not None:
        return (
            f"a tensor made in the step outlives it: the result of {held.name} at {_where(held)} is returned, and is "
            f"still held by your objects as well. A replay would leave a stale tensor there. Keep what the step has "
            f"returned instead, outside of loss_fn and the model. {_CACHED}"
        )
    return None
