"""Drops what is worth rebuilding, and rebuilds it just before it is read again, so that the planned peak meets a goal.

    keep:     v = gelu(h) ............ v is alive over the peak ............ mm(dy, v)
    rebuild:  v = gelu(h) .. v dies ..         (h is alive anyway)     .. v' = gelu(h); mm(dy, v')

The peak that counts is that of the whole step: transients, gradients and scratch included, dying operands overwritten.
What is rebuilt has eager's bits (rebuildable.py). Which values it is, is an integer problem (candidates.py poses it,
plan/ solves and checks it) and then data of its own (choice.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from takeback.compiler.passes.candidates import NS, candidates, choice_of
from takeback.compiler.passes.choice import apply
from takeback.compiler.passes.cost import again_s
from takeback.compiler.passes.draft import Choice, Chosen, Draft, Rebuild
from takeback.compiler.passes.overwrite import planned_curve
from takeback.compiler.passes.rebuildable import may_rebuild, rebuild_reads
from takeback.compiler.passes.siblings import aligned
from takeback.compiler.plan.rebuild_check import check_answer
from takeback.compiler.plan.rebuild_greedy import cheapest_first, with_less
from takeback.compiler.plan.rebuild_problem import RebuildAnswer
from takeback.compiler.plan.rebuild_rows import RebuildRows
from takeback.compiler.plan.rebuild_solve import WORTH, Effort, RebuildSolver, SolverOutcome
from takeback.compiler.program import BufferId, Op

_GROUPS = 4  #: copies of a repeated block are decided on in so many groups
LEVELS = 12  #: peaks that a frontier is solved for, from the lowest to that without rebuilding
_LEAST_GAIN = 0.002  #: of the peak; less is not worth running anything twice
#: How far one run of the solver goes (plan/rebuild_solve.py): the root node with its cuts and heuristics takes 30 to 50
#: visits on the models of the zoo, and what comes after it hardly pays with more than a few hundred unknowns.
_ALIKE_VISITS = 40
_LOWEST_VISITS = 60
_LEVEL_VISITS = 60

_STRUCK = (
    "The search for what to rebuild was ended by solve_s={limit_s:g} seconds: on a busier or an idler machine the plan "
    "may be another one, and a larger solve_s may find a lower peak."
)
_UNPROVED = (
    "The search for what to rebuild ended with its budget of work, which is the same on every machine, and not with a "
    "proof that no choice is better: a lower peak may exist."
)
_UNPROVED_LEVEL = (
    "For some peaks the search for the cheapest way to keep below it ended with its budget of work, which is the same "
    "on every machine, and not with a proof: a cheaper way may exist."
)
_GREEDY = (
    "The search for what to rebuild found no choice within its limits: what is cheapest to rebuild for its size is "
    "rebuilt instead, and a lower peak may exist."
)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Keep:
    """Nothing is rebuilt."""


@dataclass(frozen=True, slots=True)
class Lowest:
    """The lowest peak worth its cost (plan/rebuild_solve.py says what is)."""


@dataclass(frozen=True, slots=True)
class Within:
    """The same for no more than this share of the step's time, with what clusters make on their way (shadow.py). A
    percent of that time must buy so many percent of the peak as `worth` says."""

    share: float
    worth: float = WORTH


@dataclass(frozen=True, slots=True)
class Below:
    """The cheapest choice that keeps the planned values below `room_bytes`; the lowest peak where there is none."""

    room_bytes: int


@dataclass(frozen=True, slots=True)
class Again:
    """What was chosen for a sibling of the program. Where its ops are not those of this one, `otherwise`."""

    chosen: Chosen
    otherwise: Goal


@dataclass(frozen=True, slots=True)
class Remembered:
    """What an earlier search found for this very program, and the peak it comes to. Where it does not, `otherwise`."""

    choice: Choice
    peak_bytes: int
    notes: tuple[str, ...]
    otherwise: Goal


Goal = Keep | Lowest | Within | Below | Again | Remembered


@dataclass(frozen=True)
class Point:
    """A choice, and what it comes to: the peak of the planned values, and the time that all of what is computed twice
    adds to the step."""

    choice: Choice
    peak_bytes: int
    added_s: float


def recompute(draft: Draft, *, goal: Goal, chooser: Chooser) -> Draft:
    """The draft with the choice for `goal` made, and what is to be known of the search among its notes. Where nothing
    is below the room of a `Below`, the lowest peak is taken: the caller compares."""
    while isinstance(goal, Again | Remembered):
        if isinstance(goal, Again):
            choice = _translated(goal.chosen, draft.program.ops)
            if choice is not None:
                return _made(draft, choice, goal.chosen.notes)
        elif _can_be(goal.choice, draft):
            made = _made(draft, goal.choice, goal.notes)
            if planned_peak(made) == goal.peak_bytes:
                return replace(made, planned_peak_bytes=goal.peak_bytes)
        goal = goal.otherwise
    if isinstance(goal, Keep):
        return draft
    search = chooser.search(draft)
    point = search.point(goal)
    return replace(_made(draft, point.choice, search.notes), planned_peak_bytes=point.peak_bytes)


def _made(draft: Draft, choice: Choice, notes: tuple[str, ...]) -> Draft:
    chosen = Chosen(replace(choice, shadows=draft.shadows), draft.program.ops, notes)
    return replace(apply(draft, choice), notes=(*draft.notes, *notes), chosen=chosen)


def _can_be(choice: Choice, draft: Draft) -> bool:
    """Whether each op that is chosen may run again, after it ran first, on what it read then."""
    ops, device = draft.program.ops, draft.program.device_type
    written: dict[BufferId, list[int]] = {}
    for position, op in enumerate(ops):
        for b in op.mutates:
            written.setdefault(b, []).append(position)
    for each in choice.rebuilds:
        if not 0 <= each.op < each.before < len(ops) or not may_rebuild(ops[each.op], device):
            return False
        read = {r.buffer for r in rebuild_reads(ops[each.op], device)}
        if any(each.op <= position < each.before for b in read for position in written.get(b, ())):
            return False
    return True


def _translated(chosen: Chosen, ops: tuple[Op, ...]) -> Choice | None:
    """The same choice among the ops of a sibling."""
    at = aligned(chosen.ops, ops)
    if at is None or any(each.before not in at or each.op not in at for each in chosen.choice.rebuilds):
        return None
    return Choice(tuple(Rebuild(at[each.before], at[each.op]) for each in chosen.choice.rebuilds))


def cut_short(notes: Iterable[str]) -> bool:
    """Whether these notes say that the guard in seconds ended a search."""
    return any(note.startswith(_STRUCK.partition("{")[0]) for note in notes)


def planned_peak(draft: Draft) -> int:
    """The most bytes alive at one time, once dying operands are overwritten."""
    return max(planned_curve(draft), default=0)


class Chooser:
    """What a list of passes is bound to: the cost of an op, the guard, and the last search, so that the list may be run
    again for another goal without searching twice."""

    def __init__(self, seconds: Callable[[Op], float], limit_s: float, progress: Progress | None = None) -> None:
        self.seconds = seconds
        self._make = functools.partial(Search, seconds=seconds, limit_s=limit_s, progress=progress)
        self._last: Search | None = None

    def search(self, draft: Draft) -> Search:
        """The search for a draft: the last one if that was for the same."""
        if self._last is None or not _same(self._last.draft, draft):
            self._last = self._make(draft)
        return self._last


def _same(one: Draft, other: Draft) -> bool:
    """True if a choice for one draft is that for the other."""
    a, b = one.program, other.program
    same = (a.ops, a.buffers, one.kept, one.home) == (b.ops, b.buffers, other.kept, other.home)
    return same and a.device_type == b.device_type and (a.returned, a.grads) == (b.returned, b.grads)


@dataclass(frozen=True)
class _LowestFound:
    """The lowest peak, and with what the frontier above it is solved."""

    point: Point
    answer: RebuildAnswer | None
    solver: RebuildSolver


@dataclass(frozen=True)
class _LevelFound:
    """The cheapest way to stay below a peak, and with what the search for the next one begins."""

    point: Point | None
    answer: RebuildAnswer | None


class Search:
    """Finds choices for one draft: the same ones for the same draft and costs, unless the guard strikes. All of them
    together take no more than about `limit_s`."""

    def __init__(
        self, draft: Draft, seconds: Callable[[Op], float], limit_s: float, progress: Progress | None = None
    ) -> None:
        self.draft = draft
        self._say = progress or (lambda text: None)
        self._limit_s = self._left_s = limit_s
        self._rows = RebuildRows(candidates(draft, seconds))
        self._spent_s = again_s(draft.program.ops, draft.rebuilt, seconds)  # on what clusters make on their way
        self.step_s = sum(map(seconds, draft.program.ops)) - self._spent_s
        self.keep = Point(Choice(shadows=draft.shadows), planned_peak(draft), self._spent_s)
        self._struck = False  # the guard ended a search
        self._notes: dict[str, None] = {}
        self._lowest: dict[tuple[float | None, float], _LowestFound] = {}
        self._levels: dict[int, list[_LevelFound]] = {}  # by how many there are, from the lowest up

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the searches so far."""
        return tuple(self._notes)

    @property
    def cut_short(self) -> bool:
        """True if the guard in seconds ended a search: with more time something lower may be found."""
        return self._struck

    def point(self, goal: Goal) -> Point:
        """The choice for a goal."""
        match goal:
            case Keep():
                return self.keep
            case Lowest():
                return self.lowest()
            case Within(share, worth):
                return self.lowest(share, worth)
            case Below(room_bytes):
                return self._below(room_bytes)
            case Again() | Remembered():
                raise AssertionError("what was chosen before is not searched for")

    def _below(self, room_bytes: int) -> Point:
        if self.keep.peak_bytes <= room_bytes:
            return self.keep
        points = self.frontier(room_bytes=room_bytes)  # each is cheaper than all that are lower
        return next((p for p in points if p.peak_bytes <= room_bytes), points[-1])

    def lowest(self, share: float | None = None, worth: float = WORTH) -> Point:
        """The lowest peak worth its cost, for no more than a share of the step's time if one is given."""
        return self._find(share, worth).point

    def _find(self, share: float | None, worth: float = WORTH) -> _LowestFound:
        if (share, worth) not in self._lowest:
            self._lowest[share, worth] = self._find_lowest(share, worth)
        return self._lowest[share, worth]

    def _find_lowest(self, share: float | None, worth: float) -> _LowestFound:
        # What is decided alike for all copies of a block is found soon, and a start for the rest.
        first = RebuildSolver(self._rows, groups=1, worth=worth)
        if not self._rows.run:
            return _LowestFound(self.keep, None, first)
        self._say("looking for the lowest peak")
        most_ns = None if share is None else max(0, int((share * self.step_s - self._spent_s) * NS))
        alike = self._run(functools.partial(first.lowest_peak, most_ns), _ALIKE_VISITS)
        solver = RebuildSolver(self._rows, groups=_GROUPS, worth=worth)
        each = self._run(functools.partial(solver.lowest_peak, most_ns, start=alike.answer), _LOWEST_VISITS)
        if not each.proved and not each.struck:
            self._notes[_UNPROVED] = None
        answers = [found.answer for found in (alike, each) if found.answer is not None]
        if not answers:
            self._notes[_GREEDY] = None
            answers = cheapest_first(self._rows, most_ns)
        if share is None:  # what is decided for many copies at once need not be for each of them
            answers += [with_less(self._rows, answer, answer.peak_bytes) for answer in answers]
        points = [(self.keep, None), *((self._point(answer), answer) for answer in answers)]
        point, answer = min(points, key=lambda found: self._price(found[0], worth))
        gains = point.peak_bytes <= self.keep.peak_bytes * (1 - _LEAST_GAIN)
        return _LowestFound(point, answer, solver) if gains else _LowestFound(self.keep, None, solver)

    def frontier(self, levels: int = LEVELS, room_bytes: int | None = None) -> tuple[Point, ...]:
        """Peaks against time, from no rebuilding to the lowest peak: each point cheaper than all that are lower. The
        same program has the same frontier whatever is asked of it, so a larger budget never costs more time. With a
        room, points above it may be missing: they are not searched for."""
        points = [self.keep, self._find(None).point, *self._solved(levels, room_bytes)]
        best: list[Point] = []
        for point in sorted(points, key=lambda p: (p.added_s, p.peak_bytes)):
            if not best or point.peak_bytes < best[-1].peak_bytes:
                best.append(point)
        return tuple(best)

    def _solved(self, levels: int, room_bytes: int | None) -> Iterator[Point]:
        """The cheapest ways to stay below peaks that lie evenly between the ends, from the lowest up."""
        lowest = self._find(None)
        top, bottom = self.keep.peak_bytes, lowest.point.peak_bytes
        known = self._levels.setdefault(levels, [])
        for level in range(1, levels if lowest.point is not self.keep else 1):
            target = bottom + (top - bottom) * level // levels
            if len(known) < level:
                self._say(f"the cheapest way to {target / 2**20:.1f} MiB ({level} of {levels - 1})")
                known.append(self._level(target, known[-1].answer if known else lowest.answer, lowest.solver))
            if (point := known[level - 1].point) is not None:
                yield point
                if room_bytes is not None and point.peak_bytes > room_bytes:  # what follows is higher yet
                    return

    def _level(self, target: int, start: RebuildAnswer | None, solver: RebuildSolver) -> _LevelFound:
        """`start` is below a lower peak, so it leaves room."""
        if start is not None:
            start = with_less(self._rows, start, target, solver.classes)
        found = self._run(functools.partial(solver.lowest_cost, target, start=start), _LEVEL_VISITS)
        if not found.proved and not found.struck:
            self._notes[_UNPROVED_LEVEL] = None
        if found.answer is None:
            return _LevelFound(None, start)
        return _LevelFound(self._point(with_less(self._rows, found.answer, target)), found.answer)

    def _run(self, solve: Callable[[Effort], SolverOutcome], visits: int) -> SolverOutcome:
        """A search with its effort. Only the time that searches take counts against the guard."""
        began = time.monotonic()
        found = solve(Effort(visits, began + self._left_s))
        self._left_s -= time.monotonic() - began
        if found.struck:
            self._struck = True
            self._notes[_STRUCK.format(limit_s=self._limit_s)] = None
        return found

    def _price(self, point: Point, worth: float) -> tuple[float, int]:
        """What the solver minimises, with the peak that a choice really comes to."""
        return point.peak_bytes / self.keep.peak_bytes + worth * point.added_s / self.step_s, point.peak_bytes

    def _point(self, answer: RebuildAnswer) -> Point:
        """What the answer really comes to: the rows count an overwriting less here and there."""
        check_answer(self._rows.problem, answer)
        choice = replace(choice_of(self._rows.problem, answer), shadows=self.draft.shadows)
        return Point(choice, planned_peak(apply(self.draft, choice)), self._spent_s + answer.cost_ns / NS)
