"""How one look into a buffer is made of another by steps that a tracer understands: permute, reshape, slice, expand.

In: the region in which a buffer was written whole, and one that is read of it. Out: a `ViewPath`, or None where there
is no such way (windows that overlap, other dtypes): then the value needs bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from takeback.compiler.program import Region


@dataclass(frozen=True)
class ViewPath:
    """From a tensor: its dimensions in the order of memory, in new sizes, a stretch of each, in another order again,
    with dimensions of extent 1 put in and stretched."""

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    extents: tuple[int, ...]
    back: tuple[int, ...]
    ones: tuple[int, ...]  #: where dimensions of extent 1 are put in, in order
    shape: tuple[int, ...]

    def walk(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.permute(self.order).reshape(self.sizes)
        for dim, (size, start, extent) in enumerate(zip(self.sizes, self.starts, self.extents, strict=True)):
            if extent != size:
                found = found.narrow(dim, start, extent)
        found = found.squeeze(-1).permute(self.back)  # the last one was a remainder
        for dim in self.ones:
            found = found.unsqueeze(dim)
        return found.expand(self.shape)


def path(written: Region, read: Region) -> ViewPath | None:
    """The way from the one to the other, both over the same buffer."""
    if written.dtype != read.dtype or written.offset != 0 or not written.packed or 0 in read.shape:
        return None
    return _path(written.shape, written.stride, read.shape, read.stride, read.offset)


@functools.lru_cache(maxsize=4096)  # a program has few geometries
def _path(
    shape: tuple[int, ...], stride: tuple[int, ...], wanted: tuple[int, ...], steps: tuple[int, ...], offset: int
) -> ViewPath | None:
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim] if shape[dim] != 1 else 0, dim))
    moving = [dim for dim, (n, step) in enumerate(zip(wanted, steps, strict=True)) if n != 1 and step != 0]
    by_step = sorted(moving, key=lambda dim: -steps[dim])
    left = functools.reduce(lambda a, b: a * b, shape, 1)
    sizes: list[int] = []
    starts: list[int] = []
    extents: list[int] = []
    for dim in by_step:
        step = steps[dim]
        if step < 1 or left % step:
            return None
        sizes.append(left // step)
        starts.append(offset // step)
        extents.append(wanted[dim])
        if starts[-1] + extents[-1] > sizes[-1]:
            return None
        left, offset = step, offset % step
    sizes.append(left)
    starts.append(offset)
    extents.append(1)
    if offset >= left:
        return None
    back = tuple(by_step.index(dim) for dim in moving)
    ones = tuple(dim for dim in range(len(wanted)) if dim not in moving)
    return ViewPath(tuple(order), tuple(sizes), tuple(starts), tuple(extents), back, ones, wanted)
