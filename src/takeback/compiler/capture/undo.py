"""Remembers what the forward and backward write into the user's tensors, so that it can be put back.

In: every tensor that an op is about to write. Out: `undo_`, which leaves each as it was before the step, as often as it
is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from takeback.compiler.capture.buffers import BufferTable
from takeback.compiler.program import BufferId, Phase, Role
from takeback.errors import CaptureError


class Undo:
    """Copies of what is overwritten, made just before. `held()`: the tensors that the model's attributes hold just
    now. `at()` says in an error where the step is."""

    def __init__(self, table: BufferTable, held: Callable[[], Iterable[torch.Tensor]], at: Callable[[], str]) -> None:
        self._table = table
        self._held = held
        self._at = at
        self._users: dict[BufferId, tuple[torch.Tensor, torch.Tensor]] = {}
        self._new: dict[BufferId, list[tuple[weakref.ref[torch.Tensor], torch.Tensor]]] = {}
        self._empty: list[tuple[torch.Tensor, torch.Size]] = []  #: an op may give them bytes

    def remember(self, mutated: Iterable[torch.Tensor], phase: Phase) -> None:
        """Called before an op that writes these; what the update writes is for good."""
        if phase is Phase.UPDATE:
            return
        for tensor in mutated:
            buffer = self._table.of(tensor)
            if buffer.role is Role.INTERNAL:
                if phase is Phase.FORWARD:
                    self._remember_new(buffer.id, tensor)
                continue
            if not buffer.size_bytes:
                self._empty.append((tensor, tensor.shape))
            if buffer.id not in self._users:
                # A write to one batch tensor that shows in another would have to be followed by bytes, not by tensors.
                if buffer.id in self._table.leaves and self._table.shares_memory(buffer.id):
                    raise CaptureError(
                        f"the step writes a batch tensor in place{self._at()}, and its memory is shared with another "
                        f"tensor of the batch or of the model. Write to a copy, or pass separate tensors."
                    )
                whole = self._table.whole(buffer.id).detach()
                self._users[buffer.id] = (whole, whole.clone())

    def _remember_new(self, buffer: BufferId, tensor: torch.Tensor) -> None:
        """The same for state that the step has made itself and put into the model before it writes it: a buffer that
        is allocated when it is first needed. The step is recorded once more, and must find there what it began with."""
        if buffer in self._new:
            return
        storage = tensor.untyped_storage()._cdata
        found = [t for t in self._held() if t.layout is torch.strided and t.untyped_storage()._cdata == storage]
        if found:  # by weak references: what the step lets go again is not kept alive
            self._new[buffer] = [(weakref.ref(t), t.detach().clone()) for t in found]

    @property
    def statistics(self) -> tuple[torch.Tensor, ...]:
        """What the forward and backward wrote of the user's."""
        return tuple(tensor for tensor, _ in self._users.values())

    @property
    def new_state(self) -> tuple[torch.Tensor, ...]:
        """What the step made, put into the model and then wrote; `undo_` takes back the writing."""
        made = (reference() for pairs in self._new.values() for reference, _ in pairs)
        return tuple(t for t in made if t is not None)

    def undo_(self) -> None:
        with torch.no_grad():
            for tensor, shape in self._empty:
                if tensor.shape != shape:
                    tensor.resize_(shape).untyped_storage().resize_(0)
            for tensor, before in self._users.values():
                tensor.copy_(before)
            for reference, before in (pair for pairs in self._new.values() for pair in pairs):
                if (made := reference()) is not None:
                    made.detach().copy_(before)
