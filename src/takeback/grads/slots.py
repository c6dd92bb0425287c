"""One slice of a flat buffer for each parameter, and the ways a gradient gets into it.

In: parameters. Out: flat tensors, one for each (device, dtype), and a `Slot` for each parameter in their order. A slot
is written in one of two ways, and keeps `.grad` pointing at its slice in both:

    a Function of ours    with writing(): a kernel writes or adds into `view`; wrote()   no copy
    the framework         AccumulateGrad puts a gradient in `.grad` -> arrived()         copied or added, counted
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from takeback import flat as flat_layouts
from takeback.engine import GradientUse, cuda_stream, has_hooks, use_of, version_of
from takeback.errors import GradBufferError
from takeback.grads.half_way import completed, now_running

ROW_BYTES = 4096
"""A flat buffer is a whole number of rows, so that one pass can reduce it row by row."""

_SLOTS: dict[int, weakref.ref[Slot]] = {}


class Slot:
    """The slice of one parameter. `view` has the parameter's shape and strides, and a version counter of its own."""

    __slots__ = (
        "__weakref__",
        "_given",
        "_open_in",
        "_spoiled_at",
        "accumulate",
        "attached",
        "copies",
        "dirty",
        "flat",
        "lock",
        "name",
        "numel",
        "offset",
        "param",
        "param_dtype",
        "pending",
        "reason",
        "standing",
        "stream",
        "view",
    )

    def __init__(self, name: str, param: torch.nn.Parameter, flat: int, offset: int, view: torch.Tensor) -> None:
        self.name, self.param, self.flat, self.offset, self.view = name, param, flat, offset, view
        self.numel, self.param_dtype = param.numel(), param.dtype
        self.accumulate = get_gradient_edge(param).node  #: held, or its hooks would die with it
        self.stream = cuda_stream(param.device.index) if param.device.type == "cuda" else None
        self.attached = True
        self.lock = threading.RLock()  #: held while the slice is written
        self.copies = 0  #: made for the gradient that the slice holds now
        self.dirty = False  #: whether the slice may hold anything but zeros
        self.reason = ""  #: why they were made
        self.pending = ""  #: why the gradient that is on its way was not written straight into the slice
        self.standing = ""  #: why every gradient of this parameter is copied, if so
        self._given: torch.Tensor | None = None
        self._open_in: dict[int, bool] = {}  #: backwards that wrote a part: whether the slice was theirs alone
        self._spoiled_at: int | None = None  #: the version of the slice when one of them raised

    def has_gradient_in_place(self) -> bool:
        """Whether the parameter has a gradient, and it is this slice."""
        grad = self.param.grad
        if grad is None:
            return False
        if grad is not self._given and (grad.layout is not torch.strided or not self._fits(grad)):
            return False
        return bool(grad.data_ptr() == self.view.data_ptr())

    def _fits(self, grad: torch.Tensor) -> bool:
        view = self.view
        return bool(grad.shape == view.shape and grad.stride() == view.stride() and grad.dtype == view.dtype)

    def give(self) -> None:
        """Makes the slice the parameter's gradient. An alias: whoever replaces its data does not move the slice."""
        if self._given is None or self._given.data_ptr() != self.view.data_ptr():
            self._given = self.view.detach()
        self.param.grad = self._given
        self.dirty = True  # from now on anybody may write it

    # -- straight into the slice -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool | None]:
        """Inside a backward: may the gradient be written into `view` here? False: overwrite. True: add. Then `wrote` is
        to be called. None: hand it to the framework, for the reason in `pending`. One thread at a time, as
        AccumulateGrad has it."""
        with self.lock:
            yield self._open()

    def wrote(self, added: bool) -> None:
        """The slice has been written as `writing` allowed."""
        if not added:
            self.give()

    def _open(self) -> bool | None:
        if not self.attached or use_of(self.accumulate) is not GradientUse.ACCUMULATED:
            return None
        self.pending = self._objection()
        if self.pending:
            return None
        self.check_unmoved()
        self.check_whole()
        added = self.param.grad is not None
        if not added:
            self.copies = 0
        number, backward = now_running()
        if number not in self._open_in:
            self._not_alone()
            self._open_in[number] = not added and not self._open_in
            backward.add(self)
        return added

    def _objection(self) -> str:
        """Why the framework must see the gradient that is being computed, if it must."""
        if torch.is_grad_enabled():
            return "create_graph=True: the gradient has a history of its own"
        if has_hooks(self.param):
            return "a hook on the parameter must see the gradient"
        if getattr(self.param, "_post_accumulate_grad_hooks", None):
            return "a post-accumulate hook on the parameter must be called"
        if self.stream is not None and cuda_stream(self.view.device.index) != self.stream:
            return "computed on another CUDA stream than the one the buffer was made on"
        if self.param.grad is not None and not self.has_gradient_in_place():
            return ".grad was assigned from outside"
        return ""

    # -- a backward that raises half-way -----------------------------------------------------------------------------

    def complete(self) -> None:
        """AccumulateGrad has run: what the running backward gives to this parameter is all there."""
        with self.lock:
            self._open_in.pop(completed(self), None)
            self._not_alone()

    def _not_alone(self) -> None:
        for other in self._open_in:
            self._open_in[other] = False

    def abandoned(self, backward: int) -> None:
        """A part of the gradient was written, and the rest never came: torch would have added none of it. Where the
        slice held a gradient before, that cannot be told from the part any more."""
        with self.lock:
            alone = self._open_in.pop(backward, None)
            if alone is None or not self.has_gradient_in_place():
                return
            if alone:
                self.param.grad = None
            else:
                self._spoiled_at = version_of(self.view)

    def check_whole(self, *, added: bool = False) -> None:
        """Raises while the slice holds a gradient together with a part of one that never became whole. `added`: the
        framework has just added another."""
        if self._spoiled_at is None:
            return
        zeroed = version_of(self.view) > self._spoiled_at + 1 if added else not bool(self.view.any())
        if self.has_gradient_in_place() and not zeroed:
            raise GradBufferError(
                f"a backward raised half-way, when a part of the gradient of {self.name}, which is used more than "
                f"once, had been added to the one from before. Call zero_grad() and run these backwards again."
            )
        self._spoiled_at = None

    def converted(self, reason: str) -> None:
        """What was written came out of a temporary of another dtype."""
        self.copies += 1
        self.reason = reason

    # -- through the framework ---------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """AccumulateGrad has put a gradient into `.grad` that no Function of ours wrote."""
        with self.lock:
            grad = self.param.grad
            reason, self.pending = self.pending or self.standing, ""
            if grad is None or grad.requires_grad:
                return  # a gradient with a history stays what it is
            self.check_unmoved()
            self.check_whole(added=True)
            if self.has_gradient_in_place():
                self.copies += 1  # added by the framework
            else:
                self.take_(grad)
                self.copies = 1
            self.reason = reason or "computed outside of its module's forward (torch.compile, a functional call)"

    def refresh_(self) -> None:
        """Makes the slice what it stands for: the gradient, wherever that was assigned, or zeros if there is none. A
        gradient with a history stays outside, and its values are copied each time."""
        self.check_whole()
        if self.has_gradient_in_place():
            return
        grad = self.param.grad
        if grad is not None:
            self.check_unmoved()
            if grad.requires_grad:
                self.view.copy_(grad.detach())
                self.dirty = True
                return
            self.take_(grad)
            self.copies, self.reason = 1, ".grad was assigned from outside"
        elif self.dirty:
            self.view.zero_()
            self.dirty = False

    def take_(self, grad: torch.Tensor) -> None:
        """Copies a gradient from elsewhere into the slice."""
        if grad.layout is not torch.strided:
            raise GradBufferError(
                f"the gradient of {self.name} is sparse, and a flat buffer is dense. Use sparse=False, or leave this "
                f"parameter out of the buffer."
            )
        self.view.copy_(grad.detach())
        self.give()

    def check_unmoved(self) -> None:
        """Raises if the parameter has left the place the slice was made for."""
        p, view = self.param, self.view
        moved = p.device != view.device or p.shape != view.shape or p.stride() != view.stride()
        if moved or p.dtype is not self.param_dtype:
            raise GradBufferError(
                f"{self.name} is {p.dtype} on {p.device} with strides {p.stride()} now; the buffer was made for "
                f"{self.param_dtype} on {view.device} with {view.stride()}. Move the model first, then make the "
                f"GradBuffer."
            )


def lay_out(
    named: Sequence[tuple[str, torch.nn.Parameter]], dtype: torch.dtype | None
) -> tuple[flat_layouts.FlatLayout, tuple[torch.Tensor, ...], tuple[Slot, ...]]:
    """Where the slices lie, the flat tensors, and a slot for each parameter in order."""
    params = [p for _, p in named]
    layout = flat_layouts.lay_out([(p.numel(), dtype or p.dtype) for p in params], [p.device for p in params])
    with torch.inference_mode(False):
        flats = tuple(
            torch.zeros(
                flat_layouts.rounded_up(max(numel, 1), ROW_BYTES // kind.dtype.itemsize),
                device=kind.device,
                dtype=kind.dtype,
            )
            for kind, numel in zip(layout.kinds, layout.numels, strict=True)
        )
        slots = tuple(
            Slot(name, p, place.flat, place.start, _slice(flats[place.flat], p, place.start))
            for (name, p), place in zip(named, layout.slices, strict=True)
        )
    return layout, flats, slots


def _slice(flat: torch.Tensor, p: torch.Tensor, offset: int) -> torch.Tensor:
    """Not a view in autograd's eyes: those would share one version counter, and a write into one slice would make every
    other look changed."""
    return flat.new_empty(0).set_(flat.untyped_storage(), offset, p.shape, p.stride())


def padding_of(flat: torch.Tensor, slots: Iterable[Slot]) -> torch.Tensor:
    """The elements of a flat tensor that belong to no slot."""
    mine = list(slots)
    ends = [slot.offset + slot.numel for slot in mine]
    starts = [*(slot.offset for slot in mine[1:]), flat.numel()]
    gaps = [torch.arange(end, start) for end, start in zip(ends, starts, strict=True)]
    return torch.cat(gaps).to(flat.device)


def register(slots: Iterable[Slot]) -> list[tuple[int, weakref.ref[Slot]]]:
    """Lets `slot_of` find them. Returns what `unregister` takes, which keeps nothing alive."""
    entries = [(id(slot.param), weakref.ref(slot)) for slot in slots]
    _SLOTS.update(entries)
    return entries


def unregister(entries: Iterable[tuple[int, weakref.ref[Slot]]]) -> None:
    for key, slot in entries:
        if _SLOTS.get(key) is slot:
            del _SLOTS[key]
        found = slot()
        if found is not None:  # a graph from before still has it
            found.attached = False


def slot_of(tensor: torch.Tensor | None) -> Slot | None:
    """The slot of a parameter, if it has one."""
    found = _SLOTS.get(id(tensor))
    slot = found() if found is not None else None
    return slot if slot is not None and slot.param is tensor else None
