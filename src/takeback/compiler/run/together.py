"""Results of one step that share memory, as they do in eager: whoever writes one of them sees it in the others.

In: a program as it was recorded. Out: which of its results go together, and, from what a replay has computed, their
tensors: one of them gets the bytes, as if it were alone, and the others look into it. Where none has all of the bytes,
these are copied once. Results that have no byte in common are not looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from takeback.compiler.program import BufferId, Program, Region
from takeback.compiler.run.codegen import over
from takeback.compiler.run.executor import Executor

_MOST_COMPARED = 32  #: results of one buffer; more, if their spans meet, go together without being looked at one by one
_MOST_WORK = 10_000  #: of a comparison; one that takes more counts as sharing


@dataclass(frozen=True)
class Together:
    """Results, by position: 0 is the loss, and aux comes after it."""

    members: tuple[int, ...]
    regions: tuple[Region, ...]  #: of the members, in eager
    begin_bytes: int  #: where the first of their bytes lies in eager's storage, or a little before
    end_bytes: int
    whole: int | None  #: the member that has all of them

    def give(self, executor: Executor, leaves: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Their tensors, of what the executor has just computed."""
        base = self._handed(executor, leaves)
        if base is None:
            base = self._copied(executor, leaves)
        return {i: self._look(base, region) for i, region in zip(self.members, self.regions, strict=True)}

    def _handed(self, executor: Executor, leaves: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The bytes of the member that has all; None if there is none, or if it has another form in the plan."""
        if self.whole is None:
            return None
        here, there = _results(executor.program)[self.whole], self.regions[self.members.index(self.whole)]
        alike = (here.dtype, here.shape, here.stride) == (there.dtype, there.shape, there.stride)
        return executor.give(here, leaves) if alike else None

    def _copied(self, executor: Executor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        results = _results(executor.program)
        dtype, device = self.regions[0].dtype, executor.tensor(results[self.members[0]], leaves).device
        count = -(-(self.end_bytes - self.begin_bytes) // dtype.itemsize)
        base = torch.empty(count, dtype=dtype, device=device)
        for i, region in zip(self.members, self.regions, strict=True):
            # Of what an expanded dimension repeats, one: torch writes no element twice.
            shape = tuple(1 if step == 0 else extent for extent, step in zip(region.shape, region.stride, strict=True))
            now = executor.tensor(replace(results[i], shape=shape), leaves)
            self._look(base, replace(region, shape=shape)).copy_(now)
        return base

    def _look(self, base: torch.Tensor, region: Region) -> torch.Tensor:
        start = base.storage_offset() * base.itemsize + region.offset * region.dtype.itemsize - self.begin_bytes
        offset = start // region.dtype.itemsize
        if base.dtype is region.dtype:
            return base.as_strided(region.shape, region.stride, offset)
        return over(base, region.dtype, region.shape, region.stride, offset)


def together(program: Program) -> tuple[Together, ...]:
    """The results that share memory in eager, but what is the user's, which each of them has anyway."""
    of_buffer: dict[BufferId, list[int]] = {}
    results = _results(program)
    for i, region in enumerate(results):
        if region.numel and not program.buffers[region.buffer].role.borrowed:
            of_buffer.setdefault(region.buffer, []).append(i)
    return tuple(
        _made_of(tuple(sorted(members)), results)
        for found in of_buffer.values()
        if len(found) > 1
        for spanned in _meeting(found, results)
        for members in _sharing(spanned, results)
        if len(members) > 1
    )


def _results(program: Program) -> tuple[Region, ...]:
    return (program.loss, *program.aux)


def _made_of(members: tuple[int, ...], results: Sequence[Region]) -> Together:
    regions = tuple(results[i] for i in members)
    begin, end = min(r.span_bytes[0] for r in regions), max(r.span_bytes[1] for r in regions)
    whole = next((i for i in members if results[i].packed and results[i].span_bytes == (begin, end)), None)
    begin -= begin % max(r.dtype.itemsize for r in regions) if whole is None else 0
    return Together(members, regions, begin, end, whole)


def _meeting(found: Sequence[int], results: Sequence[Region]) -> list[list[int]]:
    """Those whose spans meet, directly or by way of others."""
    groups: list[list[int]] = []
    end = 0
    for i in sorted(found, key=lambda i: results[i].span_bytes):
        begin, its_end = results[i].span_bytes
        if not groups or begin >= end:
            groups.append([])
        groups[-1].append(i)
        end = max(end, its_end)
    return groups


def _sharing(spanned: list[int], results: Sequence[Region]) -> list[list[int]]:
    """Those that have bytes in common, directly or by way of others."""
    if len(spanned) == 1 or len(spanned) > _MOST_COMPARED or _made_of(tuple(spanned), results).whole is not None:
        return [spanned]
    groups: list[list[int]] = []
    for i in spanned:
        mine = [g for g in groups if any(_share(results[i], results[j]) for j in g)]
        groups = [g for g in groups if g not in mine] + [[i, *(j for g in mine for j in g)]]
    return groups


class _Addresses:
    """The bytes of a region as numpy sees those of an array, of which nothing is read."""

    def __init__(self, region: Region) -> None:
        item = region.dtype.itemsize
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (_SOMEWHERE + region.offset * item, True),
            "shape": (*region.shape, item),
            "strides": (*(step * item for step in region.stride), 1),
        }


_SOMEWHERE = 1 << 20


def _share(one: Region, other: Region) -> bool:
    """Whether they have a byte in common."""
    try:
        return np.shares_memory(_array(one), _array(other), max_work=_MOST_WORK)  # type: ignore[arg-type]  # any number
    except np.exceptions.TooHardError:
        return True


def _array(region: Region) -> np.ndarray[Any, Any]:
    return np.asarray(_Addresses(region))
