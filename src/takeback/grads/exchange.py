"""Averages a GradBuffer's slices over a process group, in a few large buckets that start while the backward runs.

In: slots, as the backward completes them. A bucket is a range of a flat tensor; it is sent as soon as it and all before
it are complete, straight from the flat tensor. The last bucket says which parameters had a gradient on any rank: those
that had none anywhere keep none. Every rank sends the same buckets in the same order, whatever its backward reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

from takeback.errors import GradBufferError
from takeback.grads.slots import Slot
from takeback.parallel import BUCKET_BYTES, Reducer, check_group


@dataclass(frozen=True)
class Bucket:
    """A range of a flat tensor, and the slots in it."""

    elements: torch.Tensor
    slots: tuple[Slot, ...]


def cut(flats: Sequence[torch.Tensor], slots: Sequence[Slot], bucket_bytes: int) -> list[Bucket]:
    """Buckets of about that size, the last slots first: a backward completes them in that order."""
    buckets: list[tuple[int, Bucket]] = []
    for index, flat in enumerate(flats):
        members: list[Slot] = []
        mine = [(i, slot) for i, slot in enumerate(slots) if slot.flat == index]
        for i, slot in reversed(mine):
            members.insert(0, slot)
            start, end = slot.offset, members[-1].offset + members[-1].numel
            if (end - start) * flat.itemsize >= bucket_bytes or slot is mine[0][1]:
                buckets.append((i, Bucket(flat[start:end], tuple(members))))
                members = []
    return [bucket for _, bucket in sorted(buckets, key=lambda pair: -pair[0])]


class Exchange:
    """One average for each `finish()`. Buckets are sent while the backward runs if `early`."""

    def __init__(
        self,
        flats: Sequence[torch.Tensor],
        slots: Sequence[Slot],
        group: dist.ProcessGroup | None,
        *,
        early: bool,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        group = dist.group.WORLD if group is None and dist.is_initialized() else group
        check_group(group)
        assert group is not None
        self.group, self.early = group, early
        self._slots = tuple(slots)
        self._buckets = cut(flats, slots, bucket_bytes)
        self._bucket_of = {slot: i for i, bucket in enumerate(self._buckets) for slot in bucket.slots}
        # In the first flat tensor's dtype, so that one bucket is like another.
        self._used = torch.zeros(len(slots), dtype=flats[0].dtype, device=flats[0].device)
        self._reducer = Reducer(group, len(self._buckets) + 1)
        self._waiting: list[set[Slot]] | None = None  #: for each bucket; None between rounds

    @property
    def under_way(self) -> bool:
        """Whether a round has begun that is not finished."""
        return self._waiting is not None

    def complete(self, slot: Slot) -> None:
        """A backward has done with this slot."""
        if self._waiting is None:
            self._begin()
        assert self._waiting is not None
        index = self._bucket_of[slot]
        if slot not in self._waiting[index]:
            raise GradBufferError(
                f"a second backward reached {slot.name} before all_reduce(): its gradient of the first is being "
                f"averaged over the group already. Call buf.all_reduce() after each backward; to accumulate, run all "
                f"but the last under `with buf.no_sync():`."
            )
        self._waiting[index].remove(slot)
        if not self._waiting[index]:
            self._send(index)

    def finish(self) -> None:
        """Sends what is left, waits for all, and leaves the mean over the ranks in every slice that any rank used."""
        if self._waiting is None:
            self._begin()
        assert self._waiting is not None
        for index, waiting in enumerate(self._waiting):
            if waiting:
                self._send(index)
        self._used.copy_(torch.tensor([float(slot.holds()) for slot in self._slots]))
        self._reducer.ready(len(self._buckets), [self._used])
        self._waiting = None
        self._reducer.finish()
        for slot, used in zip(self._slots, self._used.tolist(), strict=True):
            if used and not slot.holds():
                slot.give()

    def _begin(self) -> None:
        self._reducer.begin()
        self._waiting = [set(bucket.slots) for bucket in self._buckets]

    def _send(self, index: int) -> None:
        bucket = self._buckets[index]
        for slot in bucket.slots:
            slot.settle()
        self._reducer.ready(index, [bucket.elements])
