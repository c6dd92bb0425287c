"""Tensors that the user puts anew into a place which the step reads, before each step: `self.real = batch["A"]`, a
buffer of fresh noise, the next batch of a prefetcher.

In: plans that could not be used because another tensor stood in such a place, twice in a row. Out: while a call lasts,
a tensor of takeback's own stands there, with the values of the user's: so plans know the place by the same tensor in
every step. Only what a step reads is stood in for: never what it writes, in whatever way, or gives back.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from takeback.compiler.capture.assumptions import Place, TensorPlace
from takeback.compiler.capture.batch import results_of, tensor_key
from takeback.compiler.run.plans import Plan
from takeback.engine import storage_key, version_of

_TIMES = 2  #: in a row: what is replaced once may stay
_MOST_PLACES = 64
_MOST_FORMS = 8  #: of one place: each takes memory


@dataclass(eq=False)
class _StoodIn:
    """A place, and by form what stands in there."""

    at: TensorPlace
    by_form: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    def tensor_for(self, users: torch.Tensor) -> torch.Tensor | None:
        """With the values of the user's tensor; None where there can be none."""
        if not _may_be_copied(users):
            return None
        form = tensor_key(users)
        found = self.by_form.get(form)
        if found is None:
            if len(self.by_form) == _MOST_FORMS:
                return None
            found = self.by_form[form] = torch.empty_strided(
                users.shape, users.stride(), dtype=users.dtype, device=users.device
            )
        with torch.no_grad():
            found.copy_(users)
        return found


@dataclass(frozen=True, eq=False)
class _Swap:
    """Of one call."""

    place: _StoodIn
    users: torch.Tensor
    ours: torch.Tensor
    version: int

    @property
    def was_written(self) -> bool:
        """What is only taken back, and put there again, has the values that it had."""
        return version_of(self.ours) != self.version and not torch.equal(_bytes(self.ours), _bytes(self.users))


class Rebound:
    """Of one compiled step."""

    def __init__(self) -> None:
        self._places: dict[Place, _StoodIn] = {}
        self._never: set[Place] = set()
        self._in_a_row: collections.Counter[Place] = collections.Counter()
        self._last: dict[Place, weakref.ref[torch.Tensor]] = {}  #: what was counted there
        self._swaps: list[_Swap] = []  #: of the call under way

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that stand in somewhere."""
        for place in self._places.values():
            yield from place.by_form.values()

    def steady(self) -> None:
        """A plan could be used."""
        self._in_a_row.clear()
        self._last.clear()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around one call of the step."""
        try:
            for place in self._places.values():
                self._put_(place)
            yield
        finally:
            swaps, self._swaps = self._swaps, []
            for swap in reversed(swaps):
                if swap.place.at.read() is swap.ours:
                    swap.place.at.write_(swap.users)
            for swap in swaps:
                if swap.was_written:
                    with torch.no_grad():
                        swap.users.copy_(swap.ours)
                    self._leave_(swap.place)

    def checked(self, returned: Any) -> Any:
        """What the step gave back: what shares memory with a tensor of ours is the caller's from now on."""
        if self._swaps:
            given = {storage_key(t.untyped_storage()) for t in results_of(returned) if t.layout is torch.strided}
            for swap in self._swaps:
                if storage_key(swap.ours.untyped_storage()) in given:
                    self._leave_(swap.place)
        return returned

    def not_in_batch_(self, leaves: Sequence[torch.Tensor]) -> None:
        """What is in the batch as well may be compared with it: it stays where it is, in this call."""
        if self._swaps:
            storages = {storage_key(t.untyped_storage()) for t in leaves if t.layout is torch.strided}
            self._put_back_(storages)

    def conflicts_(self, plan: Plan) -> bool:
        """Whether a tensor that something stands in for shares its bytes with one that this plan writes: then it is put
        back, for good."""
        if not self._swaps:
            return False
        return self._put_back_(plan.written_storages, for_good=True)

    @property
    def storages(self) -> frozenset[int]:
        """Of the tensors that something stands in for now."""
        return frozenset(storage_key(swap.users.untyped_storage()) for swap in self._swaps)

    def end_(self, *, for_good: bool = False) -> None:
        """The user's tensors are where they were, for the rest of the call."""
        self._put_back_(self.storages, for_good=for_good)

    def _put_back_(self, storages: Collection[int], *, for_good: bool = False) -> bool:
        """Whether one of these storages was stood in for."""
        shared = [swap for swap in self._swaps if storage_key(swap.users.untyped_storage()) in storages]
        for swap in shared:
            if swap.place.at.read() is swap.ours:
                swap.place.at.write_(swap.users)
            if for_good:
                self._leave_(swap.place)
        self._swaps = [swap for swap in self._swaps if swap not in shared]
        return bool(shared)

    def outdated_(self, plan: Plan, leaves: Sequence[torch.Tensor]) -> None:
        """This plan does not hold: from now on something may stand in for what was replaced."""
        for at in plan.watch.displaced():
            now, last = at.read(), self._last.get(at.place)
            if not isinstance(now, torch.Tensor) or (last is not None and last() is now):
                continue  # steps ran plainly since
            self._last[at.place] = weakref.ref(now)
            self._in_a_row[at.place] += 1
            known = at.place in self._never or at.place in self._places
            if self._in_a_row[at.place] < _TIMES or known or len(self._places) == _MOST_PLACES:
                continue
            if _only_reads(plan, at.then):
                self._places[at.place] = _StoodIn(replace(at, then=at.then.new_empty(0)))  # nor is the old one kept
                self._put_(self._places[at.place])
            else:
                self._never.add(at.place)
        self.not_in_batch_(leaves)

    def _put_(self, place: _StoodIn) -> None:
        users = place.at.read()
        is_ours = any(users is ours for ours in self.tensors)  # the same place, by another way
        ours = place.tensor_for(users) if isinstance(users, torch.Tensor) and not is_ours else None
        if ours is not None:
            self._swaps.append(_Swap(place, users, ours, version_of(ours)))
            place.at.write_(ours)

    def _leave_(self, place: _StoodIn) -> None:
        self._places.pop(place.at.place, None)
        self._never.add(place.at.place)


def _may_be_copied(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not vars(tensor)
    return plain and not (tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _only_reads(plan: Plan, tensor: torch.Tensor) -> bool:
    """Whether the step neither writes these bytes nor gives them back."""
    program, storage = plan.original, storage_key(tensor.untyped_storage())
    strided = [(b, t) for b, t in program.externals.items() if t.layout is torch.strided]
    mine = {b for b, t in strided if storage_key(t.untyped_storage()) == storage}
    written = {b for op in program.ops for b in op.mutates}
    returned = {region.buffer for region in (*program.returned, *program.grads.values())}
    return bool(mine) and mine.isdisjoint(written | returned)
