"""Sizes and lifetimes as a `Problem`, offsets as a `Solution`: plain integers, checked when one is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

ItemId = NewType("ItemId", int)

# bytes
#   ^   ┌───────┐   ┌───┐   An item is a rectangle: its lifetime [start, end) wide, its size high.
#   │   │   b   │   │ c │   Only its offset is free; the arena is the height of the pile.
#   │ ┌─┴───────┴─┐ └───┘   (c could sink to 0: a has ended by then.)
#   │ │     a     │
#   └─┴───────────┴───────> time


@dataclass(frozen=True, slots=True)
class Item:
    """A buffer to place: `size_bytes` of it, needed during the half-open lifetime [start, end)."""

    id: ItemId
    size_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pack:
    """Items at fixed distances: each `(item, distance)` lies `distance` bytes above wherever the pack is put. Their
    bytes are still their own only during their lifetimes: at other times anything may lie between and on them."""

    members: tuple[tuple[ItemId, int], ...]


@dataclass(frozen=True)
class Problem:
    """All items that share one arena; every offset must be a multiple of `alignment_bytes`."""

    items: tuple[Item, ...]
    alignment_bytes: int = 64
    packs: tuple[Pack, ...] = ()

    def __post_init__(self) -> None:
        if self.alignment_bytes < 1 or self.alignment_bytes & (self.alignment_bytes - 1):
            raise ValueError(f"alignment_bytes must be a power of two, got {self.alignment_bytes}")
        seen: dict[ItemId, int] = {}
        for item in self.items:
            if item.size_bytes < 0:
                raise ValueError(f"item {item.id} has a negative size: {item.size_bytes} bytes")
            if item.start < 0 or item.end <= item.start:
                raise ValueError(
                    f"item {item.id} has the lifetime [{item.start}, {item.end}): "
                    "it must start at 0 or later and end after it starts"
                )
            if item.id in seen:
                raise ValueError(f"two items have the id {item.id}")
            seen[item.id] = item.size_bytes
        packed: set[ItemId] = set()
        for pack in self.packs:
            for member, distance_bytes in pack.members:
                if not seen.get(member):
                    raise ValueError(f"item {member} is packed, but is not there, or has no bytes")
                if member in packed:
                    raise ValueError(f"item {member} is packed twice")
                if distance_bytes < 0 or distance_bytes % self.alignment_bytes:
                    raise ValueError(
                        f"item {member} is packed at {distance_bytes} bytes, "
                        f"which is no multiple of {self.alignment_bytes} from 0 up"
                    )
                packed.add(member)


@dataclass(frozen=True)
class PlacingOrder:
    """How offsets were found, for who has a problem of the same items with other sizes."""

    name: str
    items: tuple[ItemId, ...]  #: in the order in which they were placed
    best_fit: bool
    hangs: frozenset[ItemId]  #: from the ceiling
    packed: bool  #: packs were put down before all else
    arena_bytes: int  #: what it came to: as large an arena is there anyway


@dataclass(frozen=True)
class Solution:
    """An offset for every item of a problem; `order` names the greedy order that found it."""

    offsets: Mapping[ItemId, int]
    arena_bytes: int
    order: str
    placing: PlacingOrder | None = None


def aligned_bytes(size_bytes: int, alignment_bytes: int) -> int:
    """`size_bytes` rounded up to a multiple of `alignment_bytes`."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def lower_bound_bytes(problem: Problem) -> int:
    """The most live bytes at one time, each size rounded up to the alignment: no arena can be smaller."""
    change_at: dict[int, int] = {}
    for item in problem.items:
        size_bytes = aligned_bytes(item.size_bytes, problem.alignment_bytes)
        change_at[item.start] = change_at.get(item.start, 0) + size_bytes
        change_at[item.end] = change_at.get(item.end, 0) - size_bytes
    live_bytes = peak_bytes = 0
    for time in sorted(change_at):
        live_bytes += change_at[time]
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes
