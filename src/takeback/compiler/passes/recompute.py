"""Drops what is worth rebuilding, and rebuilds it just before it is read again, so that the planned peak meets a goal.

    keep:     v = gelu(h) ............ v is alive over the peak ............ mm(dy, v)
    rebuild:  v = gelu(h) .. v dies ..         (h is alive anyway)     .. v' = gelu(h); mm(dy, v')

The peak that counts is that of the whole step: transients, gradients and scratch included, dying operands overwritten.
What is rebuilt has eager's bits (again.py); which values it is, is data of its own (choice.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from takeback.compiler.ownership.curve import alive_bytes
from takeback.compiler.passes.choice import Choice, apply
from takeback.compiler.passes.draft import Draft, slot_of
from takeback.compiler.passes.fallback import cheapest_first
from takeback.compiler.passes.menu import Menu
from takeback.compiler.passes.overwrite import overwrite
from takeback.compiler.passes.solve import WORTH, Solution, Solver
from takeback.compiler.program import Op

_GROUPS = 4  #: copies of a repeated block are decided on in so many groups
_LEVELS = 12  #: peaks that a frontier is solved for, from the lowest to that without rebuilding
_LEAST_GAIN = 0.002  #: of the peak; less is not worth running anything twice

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Keep:
    """Nothing is rebuilt."""


@dataclass(frozen=True, slots=True)
class Below:
    """The cheapest below."""

    room_bytes: int


@dataclass(frozen=True, slots=True)
class Lowest:
    """The lowest peak worth its cost (solve.py says what is)."""


@dataclass(frozen=True, slots=True)
class Within:
    """The same for no more than this share of the step's time."""

    share: float


Goal = Keep | Lowest | Within | Below


@dataclass(frozen=True)
class Point:
    """A choice, and what it comes to: the peak of the planned values, and the time it adds to the step."""

    choice: Choice
    peak_bytes: int
    added_s: float


def recompute(
    draft: Draft, *, goal: Goal, seconds: Callable[[Op], float], limit_s: float, progress: Progress | None = None
) -> Draft:
    """The draft with the choice for `goal` made."""
    search = Search(draft, seconds, limit_s, progress)
    if isinstance(goal, Below):
        points = search.frontier() if search.keep.peak_bytes > goal.room_bytes else (search.keep,)
        lowest = min(points, key=lambda p: p.peak_bytes)
        point = next((p for p in points if p.peak_bytes <= goal.room_bytes), lowest)
        from dataclasses import replace

        return replace(apply(draft, point.choice), planned_peak_bytes=point.peak_bytes)
    return apply(draft, search.lowest(goal.share if isinstance(goal, Within) else None).choice)


def planned_peak(draft: Draft) -> int:
    """The most bytes alive at one time, once dying operands are overwritten."""
    placed = overwrite(draft)
    slots = {b: slot_of(placed, b) for b in placed.placements}
    return max(alive_bytes(draft.program, slots, draft.kept), default=0)


class Search:
    """Finds choices for one draft. All of them together take no more than about `limit_s`."""

    def __init__(
        self, draft: Draft, seconds: Callable[[Op], float], limit_s: float, progress: Progress | None = None
    ) -> None:
        self.draft = draft
        self._say = progress or (lambda text: None)
        self._deadline = time.monotonic() + limit_s
        self._menu = Menu(draft, seconds)
        self.step_s = sum(map(seconds, draft.program.ops))
        self.keep = Point(Choice(), planned_peak(draft), 0.0)
        self.cut_short = False  #: the time limit ended a search that might have found something lower
        self._solver = self._solver_of(_GROUPS) if self._menu.rebuild else None

    def lowest(self, share: float | None = None) -> Point:
        """The lowest peak, for no more than a share of the step's time if one is given."""
        solver = self._solver
        if solver is None or time.monotonic() >= self._deadline:
            self.cut_short = solver is not None
            return self.keep
        self._say("looking for the lowest peak")
        most = float("inf") if share is None else share * self.step_s
        # What is decided alike for all copies of a block is found soon, and a start for the rest.
        now = time.monotonic()
        alike = self._solver_of(1).lowest_peak(most, deadline=now + 0.4 * (self._deadline - now))
        now = time.monotonic()
        each = solver.lowest_peak(most, deadline=now + 0.5 * (self._deadline - now), start=alike)
        self.cut_short = self.cut_short or each is None or not each.proved
        points = [self._point(s) for s in (alike, each) if s is not None]
        if not points:  # nothing was found in time
            for choice, added in cheapest_first(self._menu, most):
                points.append(Point(choice, planned_peak(apply(self.draft, choice)), added))
        best = min(points, key=self._worth, default=self.keep)
        return best if best.peak_bytes <= self.keep.peak_bytes * (1 - _LEAST_GAIN) else self.keep

    def _worth(self, point: Point) -> tuple[float, int]:
        """What the solver minimises, with the peak that a choice really comes to."""
        return point.peak_bytes / self.keep.peak_bytes + WORTH * point.added_s / self.step_s, point.peak_bytes

    def _solver_of(self, groups: int) -> Solver:
        return Solver(self._menu, step_seconds=self.step_s, groups=groups)

    def frontier(self) -> tuple[Point, ...]:
        """Peaks against time, from no rebuilding to the lowest peak: each point cheaper than all that are lower. The
        same program has the same frontier whatever is asked of it, so a larger budget never costs more time."""
        end = self.lowest()
        if self._solver is None or end is self.keep:
            return (self.keep,)
        points = [self.keep, end]
        top, bottom = self.keep.peak_bytes, end.peak_bytes
        start: Solution | None = None
        for level in range(1, _LEVELS):
            target = bottom + (top - bottom) * level // _LEVELS
            self._say(f"the cheapest way to {target / 2**20:.1f} MiB ({level} of {_LEVELS - 1})")
            now = time.monotonic()
            share = max((self._deadline - now) / (_LEVELS - level), 0.25)
            found = self._solver.lowest_cost(target, deadline=now + share, start=start)
            if found is not None:
                start = found
                points.append(self._point(found))
        best: list[Point] = []
        for point in sorted(points, key=lambda p: (p.added_s, p.peak_bytes)):
            if not best or point.peak_bytes < best[-1].peak_bytes:
                best.append(point)
        return tuple(best)

    def _point(self, solution: Solution) -> Point:
        """What the solution really comes to: the model counts an overwriting less here and there."""
        choice = self._menu.choice(solution.ones)
        return Point(choice, planned_peak(apply(self.draft, choice)), solution.seconds)
