"""Averages a GradBuffer's slices over a process group, in a few large buckets that start while the backward runs.

In: slots, as the backward completes them. A bucket is a range of a flat tensor; it is sent as soon as it and all before
it are complete, straight from the flat tensor. The last bucket says which parameters had a gradient on any rank: those
that had none anywhere keep none. Every rank sends the same buckets in the same order, whatever its backward reached;
ranks whose slices differ are refused. After a failure nothing is sent or read any more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import distributed as dist

from takeback import flat, parallel
from takeback.errors import GradBufferError, ReduceError
from takeback.grads.slots import Slot


class Exchange:
    """One average for each `finish()`. A bucket whose slots are all `complete()` before it is sent before it."""

    def __init__(
        self,
        flats: Sequence[torch.Tensor],
        slots: Sequence[Slot],
        layout: flat.FlatLayout,
        group: dist.ProcessGroup,
    ) -> None:
        parallel.check_group(group)
        _compare(slots, group)
        self.group = group
        self._slots = tuple(slots)
        buckets = flat.cut(layout)
        self._elements = [flats[bucket.flat][bucket.start : bucket.end] for bucket in buckets]
        self._members = [tuple(slots[m] for m in bucket.members) for bucket in buckets]
        self._bucket_of = {slot: i for i, members in enumerate(self._members) for slot in members}
        # In the first flat tensor's dtype, so that one bucket is like another.
        self._used = torch.zeros(len(slots), dtype=flats[0].dtype, device=flats[0].device)
        self._reducer = parallel.Reducer(group, len(buckets) + 1)
        self._waiting: list[set[Slot]] | None = None  #: for each bucket; None between rounds
        self._lock = threading.Lock()  #: a backward has a thread for each device

    def check_finished(self) -> None:
        """Raises if the slices are on their way, or were when the group failed."""
        self._reducer.check()
        if self._waiting is not None:
            raise GradBufferError(
                "gradients are being averaged over the group: call buf.all_reduce() after the backward, before they "
                "are read or changed."
            )

    def complete(self, slot: Slot) -> None:
        """A backward has done with this slot."""
        with self._lock:
            waiting = self._round()
            index = self._bucket_of[slot]
            if slot not in waiting[index]:
                self._reducer.fail("a second backward changed gradients that were being averaged")
                raise GradBufferError(
                    f"a second backward reached {slot.name} before all_reduce(): its gradient of the first is being "
                    f"averaged over the group already. Call buf.all_reduce() after each backward; to accumulate, run "
                    f"all but the last under `with buf.no_sync():`."
                )
            waiting[index].remove(slot)
            if not waiting[index]:
                self._send(index)

    def finish(self) -> None:
        """Sends what is left, waits for all, and leaves the mean over the ranks in every slice that any rank used."""
        for index, waiting in enumerate(self._round()):
            if waiting:
                self._send(index)
        without = [slot for slot in self._slots if not slot.has_gradient_in_place()]
        for slot in without:
            if slot.param.grad is not None and slot.param.grad.requires_grad:
                self._reducer.fail(f"the gradient of {slot.name} has a history")
                raise GradBufferError(
                    f"the gradient of {slot.name} has a history (create_graph=True), and what is averaged over a group "
                    f"has none. Use no_sync() for that backward."
                )
            if slot.param.grad is not None:
                self._reducer.fail(f"the gradient of {slot.name} was assigned after it was sent")
                raise GradBufferError(
                    f"the .grad of {slot.name} was assigned between the backward and all_reduce(), when its slice was "
                    f"on its way to the group already. Assign it after all_reduce(), or make the GradBuffer without "
                    f"group= and call buf.all_reduce(group)."
                )
        self._used.copy_(torch.tensor([float(slot.has_gradient_in_place()) for slot in self._slots]))
        self._reducer.ready(len(self._members), [self._used])
        self._reducer.finish()
        self._waiting = None
        if without:  # what this rank has not used, another may have; to ask is to wait for a GPU
            used = dict(zip(self._slots, self._used.tolist(), strict=True))
            for slot in without:
                if used[slot]:
                    slot.give()

    def _round(self) -> list[set[Slot]]:
        """For each bucket, what the round still waits for. A new round, if none has begun."""
        self._reducer.check()
        if self._waiting is None:
            self._reducer.begin()
            self._waiting = [set(members) for members in self._members]
        return self._waiting

    def _send(self, index: int) -> None:
        for slot in self._members[index]:
            slot.refresh_()
        self._reducer.ready(index, [self._elements[index]])


def _compare(slots: Sequence[Slot], group: dist.ProcessGroup) -> None:
    """Raises unless every rank has the same slices: buckets of different sizes would be averaged to nonsense."""
    mine = [f"{slot.name} of shape {tuple(slot.view.shape)}, {slot.view.dtype}" for slot in slots]
    device = next((slot.view.device for slot in slots), torch.device("cpu"))
    try:
        ranks = parallel.gather_texts(mine, group, device)
    except (RuntimeError, ValueError) as error:
        raise ReduceError(f"the ranks' gradients could not be compared: {str(error).strip()}") from error
    for rank, theirs in enumerate(ranks):
        if theirs != ranks[0]:
            found = [(a, b) for a, b in zip(theirs, ranks[0], strict=False) if a != b]
            a, b = found[0] if found else (f"{len(theirs)} gradients", str(len(ranks[0])))
            raise ReduceError(
                f"rank {rank} has other gradients than rank 0: {a} there, {b} on rank 0. Build the model and its "
                f"GradBuffer the same way on every rank. Nothing has been averaged."
            )
