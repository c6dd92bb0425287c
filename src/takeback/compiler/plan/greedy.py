"""A `Problem` comes in, a `Solution` goes out: offsets found greedily, the same ones for the same problem.

Items are placed one by one into gaps that are free during their whole lifetime, by a handful of strategies:
an order, a fit, and which items hang from the ceiling. Items that stick out are promoted, and the strategy is
tried again. The smallest arena is kept; the search ends at the lower bound or when its work is spent.

Packs are put down before all else, hung from the ceiling or piled up from 0: what is left is placed around them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from takeback.compiler.plan.placing import PlaceFunction, Placer
from takeback.compiler.plan.problem import (
    Item,
    PlacingOrder,
    Problem,
    Solution,
    aligned_bytes,
    lower_bound_bytes,
)

# The search is bounded by placements, not by seconds: a plan must not depend on the machine that made it.
MOST_PLACEMENTS = 40_000
FEWEST_ATTEMPTS = 3
# More than a few promoted items at once would reshuffle everything and lose what the order was good at.
MOST_PROMOTED_MOMENTS = 8
# Items whose busiest moments differ by less than a twentieth of the peak count as equally contended.
PRESSURE_LEVELS = 20
# What an order that is known from other sizes may miss of the lower bound before all others are tried as well.
NEAR_ENOUGH = 0.02
# Where a pass over an array takes less time than a loop over rows, as measured on an AMD EPYC.
FEWEST_IN_COLUMNS = 400

# Fewer are placed before a library is opened.
FEWEST_IN_NATIVE = 50

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Table:
    """The items that occupy bytes, as columns.

    `busiest` is the moment of an item's lifetime with the most live bytes, `pressure` is how many there are.
    """

    sizes: Ints
    starts: Ints
    ends: Ints
    busiest: Ints
    pressure: Ints
    peak_at: int
    ceiling: int
    #: sizes, starts and ends once more: one element of a list is read faster than one of an array
    lists: tuple[list[int], list[int], list[int]]
    native: Placer | None  #: the loop of `_place` in C++


@dataclass(frozen=True)
class _Strategy:
    """`pinned` are the offsets of the packed items, by index; `order` holds the others."""

    name: str
    order: Ints
    best_fit: bool
    hangs: NDArray[np.uint8]
    pinned: dict[int, int]


@dataclass(frozen=True)
class _Attempt:
    """`sticking_out` holds the items above the ceiling; an attempt that was given up has no offsets."""

    offsets: list[int] | None
    arena_bytes: int
    sticking_out: Ints | list[int]
    placements: int


def solve(
    problem: Problem, native: Callable[[], PlaceFunction | None] | None = None, like: PlacingOrder | None = None
) -> Solution:
    """Places every item; zero-size items get offset 0, and `arena_bytes` is the end of the highest item. `native` is
    asked, for all but a few items, for the inner loop in C++, which gives the same offsets. `like`: how the same items
    were placed when they had other sizes, which is tried first, and alone if that is good enough."""
    occupying = [item for item in problem.items if item.size_bytes]
    offsets = {item.id: 0 for item in problem.items}
    if not occupying:
        return Solution(offsets, 0, "nothing to place")
    # Ties are broken by position in the table, hence by id.
    occupying.sort(key=lambda item: item.id)
    function = native() if native is not None and len(occupying) >= FEWEST_IN_NATIVE else None
    table = _table(occupying, problem, function)
    pins = _pins(table, occupying, problem)
    found: list[tuple[_Attempt, _Strategy]] = []
    if like is not None:
        known = (_known(like, occupying, pinned) for packing, pinned in pins if like.name.startswith(packing))
        found = [(_place(table, strategy, give_up_at=None), strategy) for strategy in itertools.islice(known, 1)]
    if like is None or not found or found[0][0].arena_bytes > enough_bytes(like, table.ceiling):
        found.append(_search(table, [s for pinned in pins for s in _strategies(table, *pinned)]))
    best, strategy = min(found, key=lambda each: each[0].arena_bytes)
    assert best.offsets is not None
    offsets.update((item.id, offset) for item, offset in zip(occupying, best.offsets, strict=True))
    return Solution(offsets, best.arena_bytes, strategy.name, _order_of(strategy, occupying, best.arena_bytes))


def enough_bytes(like: PlacingOrder, bound_bytes: int) -> int:
    """The largest arena with which the search ends that began with a known order."""
    return max(like.arena_bytes, int(bound_bytes * (1 + NEAR_ENOUGH)))


def _known(like: PlacingOrder, items: list[Item], pinned: dict[int, int]) -> _Strategy:
    """An order of other items of the same names: what is new comes last, the largest first."""
    rank = {ident: i for i, ident in enumerate(like.items)}
    order = sorted(range(len(items)), key=lambda i: (rank.get(items[i].id, len(rank)), -items[i].size_bytes))
    return _Strategy(
        name=like.name,
        order=np.array([index for index in order if index not in pinned], dtype=np.int64),
        best_fit=like.best_fit,
        hangs=np.array([item.id in like.hangs for item in items], dtype=np.uint8),
        pinned=pinned,
    )


def _order_of(strategy: _Strategy, items: list[Item], arena_bytes: int) -> PlacingOrder:
    return PlacingOrder(
        name=strategy.name,
        items=tuple(items[i].id for i in strategy.order.tolist()),
        best_fit=strategy.best_fit,
        hangs=frozenset(item.id for item, hung in zip(items, strategy.hangs, strict=True) if hung),
        packed=bool(strategy.pinned),
        arena_bytes=arena_bytes,
    )


def _search(table: _Table, strategies: list[_Strategy]) -> tuple[_Attempt, _Strategy]:
    """The best attempt and its strategy: first the plain orders, then rounds with promotions."""
    best: _Attempt | None = None
    winner: _Strategy | None = None
    attempts = placements = 0
    # What was tried since the best was found. Promotion leads round in circles: an order that comes up again while the
    # best is still the same will end as it did, and once all of them do, nothing better will ever come.
    tried: dict[tuple[str, bytes], _Attempt] = {}
    while strategies:
        next_round: list[_Strategy] = []
        news = False
        for strategy in strategies:
            key = (strategy.name, strategy.order.tobytes())
            attempt = tried.get(key)
            if attempt is None:
                news = True
                attempt = _place(table, strategy, give_up_at=best.arena_bytes if best else None)
                if attempt.offsets is not None:
                    best, winner = attempt, strategy
                    tried.clear()
                else:
                    tried[key] = attempt
            attempts, placements = attempts + 1, placements + attempt.placements
            assert best is not None
            spent = placements >= MOST_PLACEMENTS and attempts >= FEWEST_ATTEMPTS
            if spent or best.arena_bytes <= table.ceiling:
                assert winner is not None
                return best, winner
            order = _promote(table, strategy.order, attempt.sticking_out)
            # An order that promotion leaves as it is would only repeat itself.
            if not np.array_equal(order, strategy.order):
                next_round.append(_Strategy(strategy.name, order, strategy.best_fit, strategy.hangs, strategy.pinned))
        if not news:
            break
        strategies = next_round
    assert best is not None
    assert winner is not None
    return best, winner


def _table(items: list[Item], problem: Problem, function: PlaceFunction | None) -> _Table:
    sizes = np.array([aligned_bytes(item.size_bytes, problem.alignment_bytes) for item in items], dtype=np.int64)
    starts = np.array([item.start for item in items], dtype=np.int64)
    ends = np.array([item.end for item in items], dtype=np.int64)
    # Live bytes only grow where an item starts, so the starts are all the moments that matter.
    moments = np.unique(starts)
    changes = np.zeros(len(moments) + 1, dtype=np.int64)
    first, beyond = moments.searchsorted(starts), moments.searchsorted(ends)
    np.add.at(changes, first, sizes)
    np.subtract.at(changes, beyond, sizes)
    live = changes.cumsum()
    busiest = np.array([a + int(live[a:b].argmax()) for a, b in zip(first.tolist(), beyond.tolist(), strict=True)])
    return _Table(
        sizes=sizes,
        starts=starts,
        ends=ends,
        busiest=moments[busiest],
        pressure=live[busiest],
        peak_at=int(moments[live.argmax()]),
        ceiling=lower_bound_bytes(problem),
        lists=(sizes.tolist(), starts.tolist(), ends.tolist()),
        native=Placer(function, sizes, starts, ends) if function is not None else None,
    )


def _pins(table: _Table, items: list[Item], problem: Problem) -> list[tuple[str, dict[int, int]]]:
    """Where packs may be put, with a name for it: hung from the ceiling one below the other, or piled up from 0.

    Slices of a flat gradient lie in the order of the parameters, and the last parameter's gradient is born first. Hung
    from the ceiling they fill the arena downwards, while the pyramid of activations below is taken down from its top.
    """
    if not problem.packs:
        return [("", {})]
    at = {item.id: index for index, item in enumerate(items)}
    hung: dict[int, int] = {}
    piled: dict[int, int] = {}
    top, bottom = table.ceiling, 0
    for pack in problem.packs:
        members = {at[item_id]: distance for item_id, distance in pack.members if item_id in at}
        height = max((distance + int(table.sizes[index]) for index, distance in members.items()), default=0)
        top -= height
        hung |= {index: top + distance for index, distance in members.items()}
        piled |= {index: bottom + distance for index, distance in members.items()}
        bottom += height
    found = [("packs piled; ", piled)]
    # Packs that are higher than the lower bound together cannot hang from it.
    return found if top < 0 else [("packs hung; ", hung), *found]


def _strategies(table: _Table, packing: str, pinned: dict[int, int]) -> list[_Strategy]:
    """All strategies, the ones that win most often first.

    At the peak the arena must be full, so what lives then goes first, and the longest lived lowest: the
    activations of a step nest, and the pile becomes a pyramid in time. Gradients are born while it is taken
    down. Hung from the ceiling, they leave the free bytes between the two in one piece for scratch.

        ceiling ┌──────────────┬───────────
                │   scratch    │ gradients        forward ──> peak ──> backward ──> update
                │  ┌────────┐  └──┬────────
                │┌─┴────────┴─┐   └────────
        0       └┴────────────┴────────────
    """
    lengths = table.ends - table.starts
    at_peak = (table.starts <= table.peak_at) & (table.peak_at < table.ends)
    contention = table.pressure * PRESSURE_LEVELS // table.ceiling
    area = table.sizes.astype(np.float64) * lengths
    # np.lexsort takes its most significant key last, and is stable: remaining ties keep the order of the ids.
    orders = {
        "peak, lifetime": np.lexsort((-table.sizes, -lengths, ~at_peak)),
        "pressure, lifetime": np.lexsort((-table.sizes, -lengths, -table.pressure)),
        "contention, size": np.lexsort((-lengths, -table.sizes, -contention)),
        "contention, lifetime": np.lexsort((-table.sizes, -lengths, -contention)),
        "lifetime, size": np.lexsort((-table.sizes, -lengths)),
        "size": np.lexsort((-lengths, -table.sizes)),
        "area": np.lexsort((-table.sizes, -area)),
    }
    fits = [
        ("peak, lifetime", True),
        ("peak, lifetime", False),
        ("pressure, lifetime", True),
        ("pressure, lifetime", False),
        ("contention, size", False),
        ("contention, lifetime", True),
        ("lifetime, size", True),
        ("size", False),
        ("area", False),
    ]
    before, after = np.maximum(table.peak_at - table.starts, 0), table.ends - table.peak_at
    hanging = {
        "mostly after the peak hangs": after > 2 * before,
        "born after the peak hangs": table.starts > table.peak_at,
        "nothing hangs": np.zeros(len(lengths), dtype=np.bool_),
    }
    return [
        _Strategy(
            name=f"{packing}{order}; {'best' if best_fit else 'first'} fit; {hangs}",
            order=np.array([index for index in orders[order].tolist() if index not in pinned], dtype=np.int64),
            best_fit=best_fit,
            hangs=hanging[hangs].astype(np.uint8),
            pinned=pinned,
        )
        for hangs in hanging
        for order, best_fit in fits
    ]


def _place(table: _Table, strategy: _Strategy, *, give_up_at: int | None) -> _Attempt:
    """Places all items in the strategy's order; gives up once the arena is no smaller than `give_up_at`."""
    if table.native is not None:
        return _place_natively(table, table.native, strategy, give_up_at)
    sizes, starts, ends = table.lists
    offsets = [0] * len(sizes)
    arena_bytes = 0
    sticking_out: list[int] = []
    placed: _PlacedRows | _PlacedColumns = (
        _PlacedRows() if len(sizes) < FEWEST_IN_COLUMNS else _PlacedColumns(len(sizes))
    )
    for index, offset in strategy.pinned.items():
        offsets[index] = offset
        placed.put_(starts[index], ends[index], offset, offset + sizes[index])
        arena_bytes = max(arena_bytes, offset + sizes[index])
    if give_up_at is not None and arena_bytes >= give_up_at:
        return _Attempt(None, arena_bytes, sticking_out, len(strategy.pinned))
    hangs = strategy.hangs.tolist()
    for count, index in enumerate(strategy.order.tolist(), len(strategy.pinned)):
        start, end, size_bytes = starts[index], ends[index], sizes[index]
        offset = placed.lowest_or_best_offset(
            start, end, size_bytes, table.ceiling, best_fit=strategy.best_fit, hangs=bool(hangs[index])
        )
        top = offset + size_bytes
        offsets[index] = offset
        placed.put_(start, end, offset, top)
        arena_bytes = max(arena_bytes, top)
        if top > table.ceiling:
            sticking_out.append(index)
        if give_up_at is not None and arena_bytes >= give_up_at:
            return _Attempt(None, arena_bytes, sticking_out, count + 1)
    return _Attempt(offsets, arena_bytes, sticking_out, len(sizes))


def _place_natively(table: _Table, native: Placer, strategy: _Strategy, give_up_at: int | None) -> _Attempt:
    offsets = np.zeros(len(table.sizes), dtype=np.int64)
    pinned = np.fromiter(strategy.pinned, dtype=np.int64, count=len(strategy.pinned))
    offsets[pinned] = list(strategy.pinned.values())
    found = native.place(
        strategy.order,
        pinned,
        strategy.hangs,
        offsets=offsets,
        best_fit=strategy.best_fit,
        ceiling=table.ceiling,
        give_up_at=give_up_at,
    )
    gave_up = give_up_at is not None and found.arena_bytes >= give_up_at
    return _Attempt(None if gave_up else found.offsets.tolist(), found.arena_bytes, found.sticking_out, found.placed)


class _PlacedColumns:
    """What is placed already, sorted by offset: start, end, first byte, first byte above."""

    def __init__(self, most: int) -> None:
        self._table = np.empty((4, most), dtype=np.int64)
        self._count = 0

    def put_(self, start: int, end: int, offset: int, top: int) -> None:
        table, count = self._table, self._count
        at = int(table[2, :count].searchsorted(offset))
        table[:, at + 1 : count + 1] = table[:, at:count]
        table[:, at] = start, end, offset, top
        self._count = count + 1

    def lowest_or_best_offset(
        self, start: int, end: int, size_bytes: int, ceiling: int, *, best_fit: bool, hangs: bool
    ) -> int:
        """An offset where `size_bytes` touch no rival: in a gap below the ceiling, else on top of all rivals."""
        starts, ends, offsets, tops = self._table[:, : self._count]
        rivals = ((starts < end) & (ends > start)).nonzero()[0]
        gap_starts = np.zeros(len(rivals) + 1, dtype=np.int64)
        # Rivals need not overlap one another in time, so their bytes may: a gap starts above all rivals below it.
        np.maximum.accumulate(tops[rivals], out=gap_starts[1:])
        gap_ends = np.append(offsets[rivals], ceiling)
        gap_sizes = gap_ends - gap_starts
        fitting = (gap_sizes >= size_bytes).nonzero()[0]
        if not len(fitting):
            return int(gap_starts[-1])
        if best_fit:
            gap = fitting[gap_sizes[fitting].argmin()]
        else:
            gap = fitting[-1 if hangs else 0]
        return int(gap_ends[gap]) - size_bytes if hangs else int(gap_starts[gap])


class _PlacedRows:
    """`_PlacedColumns` for few items, of which a loop is through before an array is made."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []

    def put_(self, start: int, end: int, offset: int, top: int) -> None:
        bisect.insort(self._rows, (offset, top, start, end))

    def lowest_or_best_offset(
        self, start: int, end: int, size_bytes: int, ceiling: int, *, best_fit: bool, hangs: bool
    ) -> int:
        found, found_bytes = -1, 0
        floor = 0
        for offset, top, from_, to in self._rows:
            if from_ < end and to > start:
                gap_bytes = offset - floor
                if gap_bytes >= size_bytes and (found < 0 or (gap_bytes < found_bytes if best_fit else hangs)):
                    found, found_bytes = floor, gap_bytes
                floor = max(floor, top)
        gap_bytes = ceiling - floor
        if gap_bytes >= size_bytes and (found < 0 or (gap_bytes < found_bytes if best_fit else hangs)):
            found, found_bytes = floor, gap_bytes
        if found < 0:
            return floor
        return found + found_bytes - size_bytes if hangs else found


def _promote(table: _Table, order: Ints, sticking_out: Ints | list[int]) -> Ints:
    """The order with the items that found no gap first, then all that live at their busiest moments."""
    if not len(sticking_out):
        return order
    moments = table.busiest[sticking_out[:MOST_PROMOTED_MOMENTS]][:, None]
    crowd = ((table.starts <= moments) & (moments < table.ends)).any(axis=0)
    rank = np.where(crowd, np.int8(1), np.int8(2))
    rank[sticking_out] = 0
    found: Ints = order[np.argsort(rank[order], kind="stable")]
    return found
