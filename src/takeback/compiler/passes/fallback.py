"""A choice without a search, for when the time is over before the solver has found any: what is cheapest to rebuild for
its size is rebuilt first. It is right like every choice; it is only not the best one.
"""

from __future__ import annotations

from takeback.compiler.passes.choice import Choice, Rebuild
from takeback.compiler.passes.menu import Menu, Value
from takeback.compiler.program import BufferId


def cheapest_first(menu: Menu, most_seconds: float) -> list[tuple[Choice, float]]:
    """Some choices of growing size with the time they add, none above `most_seconds`.

    Considered is what lies over the peak of the step and can be made from what is there anyway when it is read again:
    whole chains are left to the solver.
    """
    top = max(range(len(menu.curve)), key=menu.curve.__getitem__, default=0)
    offers: list[tuple[float, int, Value, int]] = []
    for value in menu.values.values():
        stop = _stop_after(value, top)
        if value.maker is not None and stop is not None and (value.maker, stop) in menu.rebuild:
            offers.append((menu.units[value.maker].seconds / value.size_bytes, int(value.buffer), value, stop))
    dropped: dict[BufferId, int] = {}  # what is dropped, and where it is made again
    needed: dict[BufferId, int] = {}  # what must be there, and the first place where
    taken: list[tuple[Rebuild, ...]] = []
    seconds = [0.0]
    done: set[tuple[int, int]] = set()  # a unit may give two values
    for _, _, value, stop in sorted(offers, key=lambda offer: offer[:2]):
        assert value.maker is not None
        unit = menu.units[value.maker]
        there = all(b not in menu.values or _is_there(menu, b, stop, dropped) for b in unit.reads)
        if not there or needed.get(value.buffer, stop) < stop:
            continue
        added = 0.0 if (value.maker, stop) in done else unit.seconds
        if seconds[-1] + added > most_seconds:
            continue
        done.add((value.maker, stop))
        dropped[value.buffer] = stop
        for b in unit.reads:
            needed[b] = min(needed.get(b, stop), stop)
        taken.append(tuple(Rebuild(stop, op) for op in unit.ops))
        seconds.append(seconds[-1] + added)
    sizes = sorted({len(taken) * part // 4 for part in (1, 2, 3, 4)} - {0})
    return [(Choice(tuple(sorted({r for some in taken[:n] for r in some}))), seconds[n]) for n in sizes]


def _stop_after(value: Value, top: int) -> int | None:
    """Where a value that is only carried over the peak is read again."""
    before = value.start
    for first, last in value.episodes:
        if before < top < first:
            return first
        before = last
    return None


def _is_there(menu: Menu, buffer: BufferId, stop: int, dropped: dict[BufferId, int]) -> bool:
    return menu.alive_until(buffer) > stop and dropped.get(buffer, stop) <= stop
