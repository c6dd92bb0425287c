"""Runs the user's step once under the recorder and returns a `Capture`: the program, the guards, and the results.

The forward and backward have run for real when this returns, and gradients lie in `.grad`; nothing of the model or
optimizer has been changed for good except what the step itself wrote, and `Capture.rewind_` takes that back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from takeback.compiler.capture.batch import map_tensors, microbatch, objects_of, tensors_of
from takeback.compiler.capture.guards import Guard
from takeback.compiler.capture.leaks import watch_leaks
from takeback.compiler.capture.randomness import default_generators
from takeback.compiler.capture.record import Recorder
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.scratch import AllocatorEvent
from takeback.compiler.program import Phase, Program, Role
from takeback.errors import CaptureError


@dataclass(frozen=True)
class AuxSlot:
    """Stands in aux for the tensor at `index`."""

    index: int


@dataclass(frozen=True)
class Capture:
    """What one recorded forward and backward gave."""

    program: Program
    guard: Guard
    loss: torch.Tensor
    aux: Any  #: as loss_fn returned it, detached; None if it returned the loss alone
    aux_form: Any  #: the same with an `AuxSlot` for every tensor
    has_aux: bool
    grad_norm: torch.Tensor | None
    rewind_: Callable[[], None]  #: takes back what the step wrote and drew, as often as it is called
    statistics: tuple[torch.Tensor, ...]  #: what the forward and backward wrote of the user's


@dataclass(frozen=True)
class Subject:
    """What is to be captured: the user's own objects, and how a step is put together from them."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    parameters: tuple[torch.nn.Parameter, ...]
    names: Mapping[int, str]  #: parameter names by id
    states: tuple[tuple[torch.Tensor, str], ...] = ()
    accumulate: int = 1
    clip_norm: float | None = None
    scaling: Scaling | None = None

    def known(self) -> dict[torch.Tensor, tuple[Role, str]]:
        found: dict[torch.Tensor, tuple[Role, str]] = {}
        for p in self.parameters:
            found[p] = (Role.PARAMETER, self.names[id(p)])
        for name, b in self.model.named_buffers():
            found.setdefault(b, (Role.BUFFER, name))
        for t, name in self.states:
            found.setdefault(t, (Role.STATE, name))
        if self.scaling is not None:
            found[self.scaling.scale_tensor] = (Role.STATE, "scaler.scale")
        return found


class Log(Protocol):
    """A recording of the native allocator: complete once its context has been left."""

    cell: Any

    @property
    def events(self) -> Sequence[AllocatorEvent]: ...


Recordings = Callable[[], contextlib.AbstractContextManager[Log]]


def capture(
    subject: Subject,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recording: Recordings | None = None,
    real: bool = True,
    on_abort: Callable[[Callable[[], None]], None] = lambda undo: None,
) -> Capture:
    """Records the step. A step that fills a cache the first time it runs is recorded a second time. `on_abort` is given
    what takes back all that the step writes, before it writes anything."""
    first = _guard(subject, args, kwargs)
    before = {
        t.untyped_storage()._cdata for t in _strided(*subject.known(), *first.tensors, *tensors_of((args, kwargs)))
    }
    device = next((p.device for p in subject.parameters), torch.device("cpu"))
    states = [(g, g.get_state()) for g in default_generators(device)] if real else []
    try:
        try:
            return _attempt(subject, args, kwargs, recording, real, on_abort)
        except _Unsettled as unsettled:
            for generator, state in states:
                generator.set_state(state)
            got = _attempt(subject, args, kwargs, recording, real, on_abort)
            taken_back = {t.untyped_storage()._cdata for t in unsettled.new_state}
            _refuse_unknown_state(got, subject, before | taken_back)
            return got
    except _Unsettled as unsettled:
        first.restore_()
        raise CaptureError(str(unsettled)) from None


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
            raise _Unsettled(
                f"the step makes a tensor of shape {tuple(tensor.shape)} the first time it runs, keeps it, and writes "
                f"it in the same run and in every later one. What it held before is not known, so its first update "
                f"would count twice. Make it before the first step, or keep it as a buffer of a module."
            )


def _guard(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guard:
    return Guard(model=subject.model, loss_fn=subject.loss_fn, arguments=tuple(objects_of((args, kwargs))))


class _Unsettled(Exception):
    """The step changed Python state, or left a tensor behind: right once (a cache), refused twice."""

    def __init__(self, reason: str, new_state: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(reason)
        self.new_state = new_state  #: what the step made and wrote, as it was before it was written


def _attempt(
    subject: Subject,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recording: Recordings | None,
    real: bool,
    on_abort: Callable[[Callable[[], None]], None],
) -> Capture:
    guard = _guard(subject, args, kwargs)
    for p in subject.parameters:
        p.grad = None
    torch.clear_autocast_cache()  # casts of the weights made before belong to the step, and must be in the program
    batch = tensors_of((args, kwargs))
    log: Log | None = None
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(recording()) if recording is not None else None
        recorder = Recorder(
            subject.known(),
            batch,
            log,
            real,
            reachable=guard.tensors,
            generators=guard.generators if real else (),
            held=functools.partial(_held_by, subject.model),
        )
        on_abort(recorder.undo_)
        try:
            with _tripwires(), torch.enable_grad():
                loss, aux, has_aux, norm = _run(subject, recorder, args, kwargs, guard.tensors)
                recorder.mark_end_of_backward()
        except BaseException:
            recorder.undo_()
            for p in subject.parameters:
                p.grad = None
            raise
    return _settle(subject, recorder, guard, loss, aux, has_aux, norm, log.events if log is not None else ())


def _held_by(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that are attributes of the model's modules, registered or not."""
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, torch.Tensor):
                yield value


def _run(
    subject: Subject,
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reachable: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, Any, bool, torch.Tensor | None]:
    """The eager recipe: forward, backward, sum over microbatches, unscale, clip."""
    count, scaling = subject.accumulate, subject.scaling
    if scaling is not None:
        scaling.begin_()
    total: torch.Tensor | None = None
    parts: list[Any] = []
    has_aux = False
    with recorder:
        for index in range(count):
            recorder.phase = Phase.FORWARD
            part_args, part_kwargs = (args, kwargs) if count == 1 else microbatch((args, kwargs), index, count)
            out = subject.loss_fn(subject.model, *part_args, **part_kwargs)
            loss, aux, has_aux = split_loss(out, subject.loss_fn)
            _check_loss(loss, subject, first=index == 0)
            _check_leaves(loss, subject, reachable)
            parts.append(aux)
            part = loss if count == 1 else loss / count
            root = part if scaling is None else scaling.scale(part)
            recorder.phase = Phase.BACKWARD
            _backward(root)
            detached = part.detach()
            total = detached if total is None else total + detached
            del loss, out, part, root
        if scaling is None:
            recorder.phase = Phase.UPDATE
        else:
            scaling.unscale_()  # still the backward, and so is clipping: eager does both, then decides on the update
        wanted = [p for p in subject.parameters if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(wanted, subject.clip_norm) if subject.clip_norm is not None else None
    assert total is not None
    return total, (parts[0] if count == 1 else tuple(parts)), has_aux, norm


def _backward(loss: torch.Tensor) -> None:
    try:
        loss.backward()
    except RuntimeError as error:
        if "second time" in str(error):
            raise CaptureError(
                "loss_fn ran the backward itself, so there is nothing left to differentiate. Return the loss; "
                "takeback runs forward, backward and update."
            ) from error
        raise


def _named(loss_fn: Callable[..., Any]) -> str:
    """loss_fn's name, with file and line where it has one."""
    function = inspect.unwrap(loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__", function)
    code = getattr(function, "__code__", None)
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def split_loss(out: Any, loss_fn: Callable[..., Any]) -> tuple[Any, Any, bool]:
    """(loss, aux, whether there is aux) of what loss_fn returned."""
    if isinstance(out, tuple) and not hasattr(out, "_fields") and len(out) == 2:
        return out[0], out[1], True
    if isinstance(out, torch.Tensor):
        return out, None, False
    raise CaptureError(
        f"{_named(loss_fn)} returned a {type(out).__name__}; it must return the loss, or (loss, aux). "
        f"A transformers model returns an output object: return its .loss."
    )


def _check_loss(loss: Any, subject: Subject, *, first: bool) -> None:
    name = _named(subject.loss_fn)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(f"the loss that {name} returned is a {type(loss).__name__}, not a tensor.")
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss that {name} returned has shape {tuple(loss.shape)}; it must be a scalar. "
            f"Reduce it with .mean() or .sum()."
        )
    if loss.is_complex():
        raise CaptureError(
            f"the loss that {name} returned is complex; a loss must be real. Take .abs() or .real of it."
        )
    if first and any(p.grad is not None for p in subject.parameters):
        raise CaptureError(
            f"{name} ran the backward itself (a parameter has a .grad). Return the loss; takeback runs forward, "
            f"backward and update."
        )
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss that {name} returned needs no gradient: no parameter with requires_grad=True led to it, or it "
            f"was detached, or computed under no_grad."
        )


def _check_leaves(loss: torch.Tensor, subject: Subject, reachable: Sequence[torch.Tensor]) -> None:
    """Eager would leave a gradient in every tensor that needs one; takeback does for the model's parameters only."""
    ours = {id(p) for p in subject.parameters}
    theirs = {id(t) for t in reachable if t.is_leaf and t.requires_grad} - ours
    if not theirs:
        return
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in theirs:
            raise CaptureError(
                f"a tensor of shape {tuple(variable.shape)} that requires grad takes part in the loss, but is not a "
                f"parameter of the model, so it would get no gradient. Make it a parameter of the model, or detach it."
            )
        pending.extend(following for following, _ in node.next_functions)


def _settle(
    subject: Subject,
    recorder: Recorder,
    guard: Guard,
    loss: torch.Tensor,
    aux: Any,
    has_aux: bool,
    norm: torch.Tensor | None,
    events: Sequence[AllocatorEvent],
) -> Capture:
    """Refuses what a replay would get wrong; else puts the capture together."""
    aux_tensors = tensors_of(aux)
    grads = {i: p.grad for i, p in enumerate(subject.parameters) if p.grad is not None}
    found_inf = subject.scaling.found_inf if subject.scaling is not None else None
    keep = [loss, *aux_tensors, *grads.values(), *(t for t in (norm, found_inf) if t is not None)]

    def refuse(reason: str) -> None:
        recorder.undo_()
        for p in subject.parameters:
            p.grad = None
        raise _Unsettled(reason, recorder.new_state)

    torch.clear_autocast_cache()
    escaped = recorder.escaped(keep)
    if escaped is not None:
        where = escaped.site.describe() if escaped.site else "unknown line"
        refuse(
            f"a tensor made in the step outlives it: the result of {escaped.name} at {where} is still held by your "
            f"objects after the step. A replay would leave a stale tensor there. Return it as aux instead: "
            f"loss_fn may return (loss, aux)."
        )
    orphan = recorder.orphan()
    if orphan is not None:
        where = f" at {orphan.site.describe()}" if orphan.site else ""
        refuse(
            f"{orphan.name}{where} reads a tensor that was made inside the step without torch's dispatcher (numpy, "
            f"a C++ extension). A replay would use the same data for ever. Make it before the step and pass it in."
        )
    drawn = guard.drawn()
    if drawn is not None:
        refuse(
            f"the step keeps state in Python: it draws from {drawn}, and a replay would use the first draw for ever. "
            f"Draw before the step and pass the result in as a tensor, or draw with torch."
        )
    changed = guard.change()
    if changed is not None:
        refuse(
            f"the step keeps state in Python: {changed}. A replay runs no Python, so this would stop changing. "
            f"Pass the value to the step as a tensor, or change it outside of loss_fn and the model."
        )

    program = recorder.program(
        recorder.region(loss),
        tuple(recorder.region(t) for t in aux_tensors),
        {i: recorder.region(g) for i, g in grads.items()},
        recorder.region(norm) if norm is not None else None,
        events,
    )
    if found_inf is not None:
        program = replace(program, found_inf=recorder.region(found_inf))
    aux = map_tensors(aux, lambda t: t.detach())
    counter = iter(range(len(aux_tensors)))
    form = map_tensors(aux, lambda _: AuxSlot(next(counter)))
    return Capture(program, guard, loss, aux, form, has_aux, norm, recorder.rewind_, recorder.statistics)


@contextlib.contextmanager
def _tripwires() -> Iterator[None]:
    """Refuses what leaves torch without a trace: a tensor turned into numpy or a list, and Python's random numbers."""
    python_random = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_random = repr(numpy.random.get_state(legacy=False)) if numpy is not None else ""
    with watch_leaks():
        yield
    drawn = None
    if random.getstate() != python_random:
        drawn = "Python's random module"
    elif numpy is not None and repr(numpy.random.get_state(legacy=False)) != numpy_random:
        drawn = "numpy.random"
    if drawn is not None:
        raise CaptureError(
            f"the step draws from {drawn}; a replay would use the first draw for ever. Draw before the step and pass "
            f"the result in as a tensor, or draw with torch."
        )
