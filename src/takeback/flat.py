"""Where tensors lie in flat tensors, and the buckets that these are sent in: integers, the same on every rank.

In: sizes and dtypes, in order. Out: one flat tensor for each dtype (and device), an aligned slice of it for each
tensor, and ranges of whole slices. The gradients of a plan, of a group and of a `GradBuffer` and the states of the flat
optimizers all lie as this file says, so one's slices are another's.

    float32   | 0 ..... | 1 .. | 3 ......... |     slices in the order of the tensors, each at a multiple of 64 bytes
    float64   | 2 ... |
    buckets                    [-- first --]      a backward completes the last tensors first
              [---- last ---]                     so the bucket with tensor 0 is the last to be sent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNMENT_BYTES = 64
"""Of every slice. A cache line of a CPU, two sectors of a GPU, four of its widest loads, and what an arena is aligned
to: with more, packed gradients would need a larger arena than loose ones."""

BUCKET_BYTES = 25 << 20
"""What DistributedDataParallel takes too: large enough for the wire, small enough to start early."""


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """The elements [start, start + numel) of the flat tensor number `flat`."""

    flat: int
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class FlatKind:
    """What all slices of one flat tensor have in common. `device` is None where there is only one."""

    dtype: torch.dtype
    device: torch.device | None = None


@dataclass(frozen=True)
class FlatLayout:
    """A slice for each tensor, in order, and the flat tensors in the order of their first slices."""

    slices: tuple[FlatSlice, ...]
    kinds: tuple[FlatKind, ...]
    numels: tuple[int, ...]  #: of each flat tensor, with the padding after its last slice

    def start_bytes(self, tensor: int) -> int:
        """From the start of its flat tensor."""
        place = self.slices[tensor]
        return int(place.start * self.kinds[place.flat].dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The elements [start, end) of the flat tensor number `flat`; `members` are the tensors whose slices lie there."""

    flat: int
    dtype: torch.dtype
    start: int
    end: int
    members: tuple[int, ...]

    @property
    def numel(self) -> int:
        """With the padding between its slices."""
        return self.end - self.start

    @property
    def size_bytes(self) -> int:
        return int(self.numel * self.dtype.itemsize)


def lay_out(tensors: Sequence[tuple[int, torch.dtype]], devices: Sequence[torch.device] | None = None) -> FlatLayout:
    """Places tensors, given as (numel, dtype); with `devices`, each device has flat tensors of its own."""
    kinds: dict[FlatKind, int] = {}
    ends: list[int] = []
    slices: list[FlatSlice] = []
    for i, (numel, dtype) in enumerate(tensors):
        flat = kinds.setdefault(FlatKind(dtype, devices[i] if devices is not None else None), len(kinds))
        if flat == len(ends):
            ends.append(0)
        slices.append(FlatSlice(flat, ends[flat], numel))
        ends[flat] += rounded_up(numel, ALIGNMENT_BYTES // dtype.itemsize)
    return FlatLayout(tuple(slices), tuple(kinds), tuple(ends))


def cut(layout: FlatLayout, bucket_bytes: int | None = None) -> tuple[Bucket, ...]:
    """Buckets of `bucket_bytes` or more, and what is left of each flat tensor, in the order in which they are sent."""
    least_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    buckets: list[Bucket] = []
    for flat, kind in enumerate(layout.kinds):
        mine = [i for i, place in enumerate(layout.slices) if place.flat == flat]
        members: list[int] = []
        for i in reversed(mine):
            members.insert(0, i)
            start, end = layout.slices[i].start, layout.slices[members[-1]].end
            if i == mine[0] or (end - start) * kind.dtype.itemsize >= least_bytes:
                buckets.append(Bucket(flat, kind.dtype, start, end, tuple(members)))
                members = []
    return tuple(sorted(buckets, key=lambda bucket: -bucket.members[0]))


def rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
