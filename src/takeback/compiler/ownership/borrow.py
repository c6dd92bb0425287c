"""The byte ranges that the ops of a final plan read and write come in; a broken borrow raises `BorrowError`.

Guarantees: if `check` returns, every byte of every read was last written by exactly the value that is meant.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from takeback.errors import BorrowError

WHAT_TO_DO = "The plan must not be run; this is a bug in whatever placed these values."


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open byte range [start_bytes, end_bytes); an empty one touches nothing."""

    start_bytes: int
    end_bytes: int

    def __post_init__(self) -> None:
        if self.start_bytes < 0 or self.end_bytes < self.start_bytes:
            raise ValueError(f"a span must run upwards from 0 or more, got {self}")

    def __str__(self) -> str:
        return f"[{self.start_bytes}, {self.end_bytes})"

    def overlaps(self, other: Span) -> bool:
        return max(self.start_bytes, other.start_bytes) < min(self.end_bytes, other.end_bytes)


@dataclass(frozen=True, slots=True)
class Access:
    """The bytes of `value` that an op reads or writes."""

    value: int
    span: Span
    label: str

    def __str__(self) -> str:
        return f"value {self.value} '{self.label}' at bytes {self.span}"


@dataclass(frozen=True, slots=True)
class Effect:
    """All that one op does to memory.

    `may_overwrite` holds (written value, read value) pairs: the op is declared safe to write the one onto the
    other while it reads it. `scratch` is clobbered while the op runs, so no value survives there.
    """

    op: int
    label: object  #: its words are asked for in an error only
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    may_overwrite: frozenset[tuple[int, int]] = frozenset()
    scratch: tuple[Span, ...] = ()

    def __str__(self) -> str:
        return f"op {self.op} '{self.label}'"


@dataclass(frozen=True, slots=True)
class _Owner:
    """Who owns some bytes now: a value, or None where they are scratch left behind or were never written."""

    value: int | None
    access: Access | None = None
    effect: Effect | None = None  #: what wrote it, or left it behind

    @property
    def story(self) -> str:
        """In words, for an error."""
        if self.access is None:
            return (
                "nothing was ever written there"
                if self.effect is None
                else f"they are scratch that {self.effect} left behind"
            )
        how = "lives there from the start" if self.effect is None else f"was written by {self.effect}"
        return f"they belong to value {self.value} '{self.access.label}', which {how}"


_NOBODY = _Owner(None)


class _OwnerMap:
    """Which owner every byte has: `_owners[i]` owns the bytes from `_starts[i]` up to `_starts[i + 1]`."""

    def __init__(self) -> None:
        self._starts: list[int] = [0]
        self._owners: list[_Owner] = [_NOBODY]

    def give_(self, span: Span, owner: _Owner) -> None:
        """Makes `owner` the owner of the span, whoever owned it before."""
        if span.start_bytes == span.end_bytes:
            return
        first = bisect_left(self._starts, span.start_bytes)
        last = bisect_right(self._starts, span.end_bytes) - 1
        starts, owners = [span.start_bytes], [owner]
        if self._starts[last] < span.end_bytes:
            # The run that holds the span's end goes on after it, with the owner it had.
            starts.append(span.end_bytes)
            owners.append(self._owners[last])
            last += 1
        self._starts[first:last] = starts
        self._owners[first:last] = owners

    def first_not_owned(self, span: Span, value: int) -> tuple[Span, _Owner] | None:
        """The first run of bytes in the span with another owner than `value`, and that owner."""
        if span.start_bytes == span.end_bytes:
            return None
        run = bisect_right(self._starts, span.start_bytes) - 1
        while run < len(self._starts) and self._starts[run] < span.end_bytes:
            if self._owners[run].value != value:
                run_end = self._starts[run + 1] if run + 1 < len(self._starts) else span.end_bytes
                start = max(span.start_bytes, self._starts[run])
                return Span(start, min(span.end_bytes, run_end)), self._owners[run]
            run += 1
        return None


def check(effects: Iterable[Effect], initial: Iterable[Access] = ()) -> None:
    """Walks the ops in order; raises `BorrowError` at the first that reads or clobbers bytes it must not.

    `initial` is what lives in memory before the first op: parameters, optimizer state, the batch.
    """
    owners = _OwnerMap()
    for access in initial:
        owners.give_(access.span, _Owner(access.value, access))
    for effect in effects:
        for read in effect.reads:
            _check_read(effect, read, owners)
        _check_own_reads(effect)
        _check_own_writes(effect)
        _check_scratch(effect)
        for span in effect.scratch:
            owners.give_(span, _Owner(None, None, effect))
        for write in effect.writes:
            owners.give_(write.span, _Owner(write.value, write, effect))


def _check_read(effect: Effect, read: Access, owners: _OwnerMap) -> None:
    found = owners.first_not_owned(read.span, read.value)
    if found is not None:
        bad, owner = found
        raise BorrowError(f"{effect} reads {read}, but of bytes {bad}: {owner.story}. {WHAT_TO_DO}")


def _check_own_reads(effect: Effect) -> None:
    for write in effect.writes:
        for read in effect.reads:
            if write.span.overlaps(read.span) and (write.value, read.value) not in effect.may_overwrite:
                raise BorrowError(
                    f"{effect} writes {write} onto its operand {read}, and is not declared safe to do so. {WHAT_TO_DO}"
                )


def _check_own_writes(effect: Effect) -> None:
    if len(effect.writes) < 2:
        return
    # Sorted, two spans overlap only if two neighbours do, once the empty ones are gone.
    in_place = sorted((w for w in effect.writes if w.span.start_bytes < w.span.end_bytes), key=_placement)
    for below, above in pairwise(in_place):
        if below.span.overlaps(above.span):
            raise BorrowError(f"{effect} writes {below} and {above}, which overlap. {WHAT_TO_DO}")


def _placement(access: Access) -> tuple[int, int]:
    return access.span.start_bytes, access.span.end_bytes


def _check_scratch(effect: Effect) -> None:
    for span in effect.scratch:
        for verb, accesses in (("reads", effect.reads), ("writes", effect.writes)):
            for access in accesses:
                if span.overlaps(access.span):
                    raise BorrowError(
                        f"{effect} has scratch at bytes {span} on top of what it {verb}: {access}. {WHAT_TO_DO}"
                    )
