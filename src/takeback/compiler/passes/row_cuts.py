"""Which part of a region belongs to some of the rows: geometry alone, without any op.

A buffer whose bytes lie group after group, the same number for each, can be cut between groups (a group is a row, or
several). A region of it is cut along a `Run`: neighbouring dimensions that together count groups.

    [2, 6, 50] over 12 rows of 50 elements:  the run is (-3, -2); rows 3 to 7 of it are [1, 5, 50]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from takeback.compiler.program import Region


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring dimensions, counted from the end: -1 is the last. Both ends belong to it."""

    first: int
    last: int

    def __contains__(self, dim: int) -> bool:
        return self.first <= dim <= self.last


@dataclass(frozen=True, slots=True)
class RowPart:
    """The groups from `start` on, `count` of them, of `total`."""

    start: int
    count: int
    total: int


def collapsed(region: Region, run: Run) -> tuple[int, int] | None:
    """Extent and stride of a run as one dimension; None if no stride leads through it. What a region does not have
    is 1 long."""
    extent, stride = 1, 0
    for dim in range(run.last, run.first - 1, -1):
        if -dim > len(region.shape) or region.shape[dim] == 1:
            continue
        if extent == 1:
            extent, stride = region.shape[dim], region.stride[dim]
        elif region.stride[dim] == stride * extent:
            extent *= region.shape[dim]
        else:
            return None
    return extent, stride


def run_of(region: Region, groups: int, buffer_bytes: int) -> Run | None:
    """The run that counts the groups of a buffer, if the region looks at the same place of each group; the shortest."""
    group_bytes = groups * region.dtype.itemsize
    if region.numel == 0 or groups < 2 or buffer_bytes % group_bytes:
        return None
    size = buffer_bytes // group_bytes
    long = [dim for dim in range(-len(region.shape), 0) if region.shape[dim] > 1]
    for length in range(1, len(long) + 1):
        for first, last in zip(long, long[length - 1 :], strict=False):
            if _counts(region, Run(first, last), groups, size):
                return Run(first, last)
    return None


def _counts(region: Region, run: Run, groups: int, size: int) -> bool:
    one = collapsed(region, run)
    if one is None or one[0] % groups or one[1] * (one[0] // groups) != size or region.offset < 0:
        return False
    reach = region.offset + (one[0] // groups - 1) * one[1]
    reach += sum((region.shape[d] - 1) * region.stride[d] for d in range(-len(region.shape), 0) if d not in run)
    return reach < size


def cut_inside(region: Region, run: Run, part: RowPart) -> Region:
    """The same look into a buffer that has the groups of `part` alone."""
    return _cut(region, run, part, 0)


def cut_whole(region: Region, run: Run, part: RowPart) -> Region | None:
    """The rows of `part` of a region over all rows; itself where it is the same for every row; None where its rows do
    not follow one another."""
    one = collapsed(region, run)
    if one is None or (one[0] != 1 and one[0] % part.total):
        return None
    if one[0] == 1:
        return region
    return _cut(region, run, part, part.start)


def _cut(region: Region, run: Run, part: RowPart, start: int) -> Region:
    one = collapsed(region, run)
    assert one is not None
    rows, stride = one[0] // part.total, one[1]
    shape, strides = list(region.shape), list(region.stride)
    for dim in range(max(run.first, -len(shape)), run.last):
        shape[dim], strides[dim] = 1, rows * part.count * stride
    shape[run.last], strides[run.last] = rows * part.count, stride
    offset = region.offset + start * rows * stride
    return replace(region, shape=tuple(shape), stride=tuple(strides), offset=offset)


def cut_sizes(sizes: Iterable[object], run: Run, part: RowPart) -> tuple[object, ...]:
    """A shape as an argument of an op, for the rows of `part`."""
    shape = list(sizes)
    extent = 1
    for dim in range(run.first, run.last + 1):
        size = shape[dim]
        assert isinstance(size, int)
        extent *= size
        shape[dim] = 1
    shape[run.last] = extent // part.total * part.count
    return tuple(shape)
