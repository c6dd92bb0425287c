"""A draft in, a checked `Layout` out: what was decided about every value's bytes and, in an arena, where they lie.

The decisions (lifetimes, kinds, owners) hold wherever a step runs. Offsets exist only where an arena of ours does; they
have passed the validator and the borrow check, or an error is raised and nothing is run. Where the device's own
allocator places there is nothing to solve: what is proved there is the code that takes and drops (run/audit.py).

Time is counted in ticks finer than ops, because an op's scratch comes and goes inside it:

    op i:   | start | event 0 | event 1 | ... | end |        an event is one request to the allocator or one release
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from takeback import native
from takeback.compiler.effects import effects
from takeback.compiler.ownership import borrow
from takeback.compiler.ownership.kinds import Kind, kind_of
from takeback.compiler.ownership.lifetimes import Lifetime, lifetimes
from takeback.compiler.passes.draft import Draft, Fresh, Home, Overwrites, Packed, Refusal, owner_of
from takeback.compiler.plan import (
    Item,
    ItemId,
    Pack,
    PlacingOrder,
    Problem,
    Solution,
    enough_bytes,
    lower_bound_bytes,
    placing,
    solve,
    solve_around,
    validate,
)
from takeback.compiler.program import BufferId, Op, Phase, Program, Region
from takeback.errors import PlanError
from takeback.options import compiler, open_cache

PASS = -1  #: the offset of a request that goes to the ordinary allocator


@dataclass(frozen=True, slots=True)
class Request:
    """What an op asks of the allocator, and the offset that answers it (PASS: none). `result`: the value it is for."""

    size_bytes: int
    offset_bytes: int
    result: BufferId | None


@dataclass(frozen=True)
class ArenaPlan:
    """Where everything lies in an arena."""

    offsets: Mapping[BufferId, int]
    requests: tuple[tuple[Request, ...], ...]  #: per op
    size_bytes: int
    lower_bound_bytes: int
    order: str
    placing: PlacingOrder | None = None  #: for a layout of a sibling
    solution: Solution | None = None  #: for a layout of the same program in another process


@dataclass(frozen=True)
class Layout:
    """What was decided about every value's bytes, and the arena they lie in if there is one."""

    draft: Draft
    kinds: tuple[Kind, ...]
    alive: Mapping[BufferId, Lifetime]
    owners: Mapping[BufferId, BufferId]  #: the buffer whose bytes these are in the end
    alive_bytes: int  #: the most bytes of values and scratch at one time, without padding
    arena: ArenaPlan | None  #: None where the device's own allocator places

    @property
    def program(self) -> Program:
        return self.draft.program

    @property
    def placed(self) -> ArenaPlan:
        """The arena, for who runs or draws one."""
        assert self.arena is not None, "the device's own allocator places these values"
        return self.arena


def asks_for_results(kind: Kind) -> bool:
    return kind is Kind.ALLOCATE


def lay_out(
    draft: Draft, near: Layout | None = None, like: PlacingOrder | None = None, known: Solution | None = None
) -> Layout:
    """Decides who has which bytes when; in an arena, places them and proves it. `near` is the layout of the same
    program with a little other scratch: its offsets are kept where that makes the arena no larger. `like` is how a
    sibling of the program was placed. `known` are offsets that were found for this very program: used if they fit."""
    layout = propose(draft, near, like, known)
    check_layout(layout)
    return layout


def check_layout(layout: Layout) -> None:
    """Raises `PlanError` or `BorrowError` unless a layout, as it is to be run, gives every value bytes of its own as
    long as it is read. Where there is no arena, the code is what is proved (run/audit.py)."""
    arena = layout.arena
    if arena is None:
        return
    windows, scratch = _items(layout.program, layout.kinds, layout.alive, layout.owners)
    apart = [b for b, owner in layout.owners.items() if arena.offsets[b] != arena.offsets[owner]]
    if apart:
        raise PlanError(f"%{apart[0]} is to have the bytes of %{layout.owners[apart[0]]}, and lies elsewhere.")
    answers = _inner(layout)
    offsets = {ItemId(b): arena.offsets[b] for b in windows}
    offsets |= {item.id: answers[key][1] for key, item in scratch.items() if key in answers}
    problem = Problem((*windows.values(), *scratch.values()), packs=_packs(layout.draft, windows))
    validate(problem, Solution(offsets, arena.size_bytes, arena.order))
    borrow.check(effects(layout))


def propose(
    draft: Draft, near: Layout | None = None, like: PlacingOrder | None = None, known: Solution | None = None
) -> Layout:
    """A layout that has not been checked."""
    program = draft.program
    alive = lifetimes(program, draft.kept)
    kinds = tuple(_kinds(draft))
    owners = {b: owner_of(draft, b) for b in alive}
    windows, scratch = _items(program, kinds, alive, owners)
    items = (*windows.values(), *scratch.values())
    alive_bytes = lower_bound_bytes(Problem(items, alignment_bytes=1))
    layout = Layout(draft, kinds, alive, owners, alive_bytes, None)
    if draft.home is not Home.ARENA:
        return layout
    draft, problem, solution = (
        _known(draft, items, windows, known)
        or _kept(draft, items, windows, scratch, near)
        or _solve(draft, items, windows, like, near)
    )
    offsets = {b: solution.offsets[ItemId(owners[b])] for b in alive}
    inner = {key: solution.offsets[item.id] for key, item in scratch.items()}
    requests = tuple(_requests(program, kinds, offsets, inner))
    bound = lower_bound_bytes(problem)
    placing = solution.placing or like
    arena = ArenaPlan(offsets, requests, solution.arena_bytes, bound, solution.order, placing, solution)
    return replace(layout, draft=draft, arena=arena)


def transient_bytes(layout: Layout, kept_grad_bytes: int = 0, *, missed: int = 0) -> int:
    """The most bytes that a step takes above what is resident and what it saves to be taken back. `kept_grad_bytes`:
    of gradients that are copied out; `missed`: of requests that nobody expected."""
    if layout.arena is None:
        return layout.alive_bytes + missed  # what is returned or kept is handed on, not copied
    program = layout.program
    # Tensor bytes: what fragmentation costs counts, the padding between tensors does not.
    alive = layout.alive_bytes + layout.arena.size_bytes - layout.arena.lower_bound_bytes
    # What is returned is copied out when the step is over: by then only these values are alive.
    last = {
        layout.owners[r.buffer]
        for r in (*program.returned, *program.grads.values())
        if r.buffer in layout.owners and layout.alive[r.buffer].end == len(program.ops)
    }
    returned = sum(int(r.numel * r.dtype.itemsize) for r in program.returned)
    at_end = returned + kept_grad_bytes + sum(program.buffers[b].size_bytes for b in last)
    return max(alive + missed, at_end)


def _items(
    program: Program, kinds: tuple[Kind, ...], alive: Mapping[BufferId, Lifetime], owners: Mapping[BufferId, BufferId]
) -> tuple[dict[BufferId, Item], dict[tuple[int, int], Item]]:
    """What takes bytes and when: every owner with all that takes its bytes after it, and every op's scratch, by (op,
    number of the request)."""
    ticks = _ticks(program.ops)
    asked = {
        s.result: ticks[position] + 1 + s.start
        for position, (op, kind) in enumerate(zip(program.ops, kinds, strict=True))
        if asks_for_results(kind)
        for s in op.scratch
        if s.result is not None
    }
    spans: dict[BufferId, list[int]] = {}
    for b, life in alive.items():
        start, end = asked.get(b, ticks[life.start]), ticks[life.end]
        window = spans.setdefault(owners[b], [start, end])
        window[0], window[1] = min(window[0], start), max(window[1], end)
    windows = {b: Item(ItemId(b), program.buffers[b].size_bytes, s, e) for b, (s, e) in spans.items()}
    scratch: dict[tuple[int, int], Item] = {}
    following = max((int(b) for b in program.buffers), default=0) + 1
    for position, op in enumerate(program.ops):
        base = ticks[position] + 1
        for k, taken in enumerate(op.scratch):
            if taken.result is None and taken.end is not None and taken.size_bytes:
                ident = ItemId(following + len(scratch))
                scratch[position, k] = Item(ident, taken.size_bytes, base + taken.start, base + taken.end)
    return windows, scratch


def _requests(
    program: Program,
    kinds: tuple[Kind, ...],
    offsets: Mapping[BufferId, int],
    inner: Mapping[tuple[int, int], int],
) -> Iterator[tuple[Request, ...]]:
    for position, (op, kind) in enumerate(zip(program.ops, kinds, strict=True)):
        mine: list[Request] = []
        for k, taken in enumerate(op.scratch):
            if taken.result is None:
                mine.append(Request(taken.size_bytes, inner.get((position, k), PASS), None))
            elif asks_for_results(kind):
                mine.append(Request(taken.size_bytes, offsets.get(taken.result, PASS), taken.result))
        yield tuple(mine)


def _known(
    draft: Draft, items: tuple[Item, ...], owners: Collection[BufferId], known: Solution | None
) -> tuple[Draft, Problem, Solution] | None:
    """Offsets from elsewhere, with what they are offsets of: the packed slices in one piece, or else each by itself.
    None where they are no solution."""
    if known is None:
        return None
    for loose in (False, True):
        problem = Problem(items, packs=() if loose else _packs(draft, owners))
        with contextlib.suppress(PlanError):
            validate(problem, known)
            return _unpacked(draft, owners, _LOOSE) if loose else draft, problem, known
        if draft.program.flags is not None:
            return None  # a group reduces them in one piece
    return None


_LOOSE = "packed, the arena would be larger"


def _solve(
    draft: Draft,
    items: tuple[Item, ...],
    owners: Collection[BufferId],
    like: PlacingOrder | None,
    near: Layout | None,
) -> tuple[Draft, Problem, Solution]:
    """Offsets that are searched for, or those of a near layout for all but scratch, if that makes the arena smaller."""
    draft, problem, solution = _searched(draft, items, owners, like)
    if near is not None and near.arena is not None:
        solution = min(solution, *_around(problem, owners, {}, near), key=lambda s: s.arena_bytes)
    return draft, problem, solution


def _searched(
    draft: Draft, items: tuple[Item, ...], owners: Collection[BufferId], like: PlacingOrder | None
) -> tuple[Draft, Problem, Solution]:
    """Offsets, with the packed slices where they belong. Slices that nobody needs in one piece are placed one by one
    if that makes the arena smaller; then the draft says so."""
    problem = Problem(items, packs=_packs(draft, owners))
    needed = draft.program.flags is not None  # a group reduces them in one piece
    loose = Problem(items)
    if like is not None and problem.packs and not needed and not like.packed:
        why = "packed, the arena of a plan for other shapes would be larger"
        return _unpacked(draft, owners, why), loose, solve(loose, _placing, like)
    solution = solve(problem, _placing, like)
    bound = lower_bound_bytes(problem)
    if not problem.packs or needed or solution.arena_bytes <= (bound if like is None else enough_bytes(like, bound)):
        return draft, problem, solution
    other = solve(loose, _placing)
    more = solution.arena_bytes - other.arena_bytes
    if more <= 0:
        return draft, problem, solution
    return _unpacked(draft, owners, f"packed, the arena would be {more:,} bytes larger"), loose, other


def _unpacked(draft: Draft, owners: Collection[BufferId], why: str) -> Draft:
    """The draft with the packed slices placed one by one."""
    placements = dict(draft.placements)
    refusals: list[Refusal] = []
    for b in owners:
        if isinstance(placements.get(b), Packed):
            placements[b] = Fresh()
            size = draft.program.buffers[b].size_bytes
            refusals.append(Refusal("pack", "gradient", b, size, why))
    return replace(draft, placements=placements, refusals=draft.refusals + tuple(refusals))


@functools.cache
def _placing() -> placing.PlaceFunction | None:
    """The solver's inner loop in C++; None where it cannot be built, and whoever needs a compiler for more than speed
    has warned (run/allocator.py)."""
    try:
        return native.load(placing.SOURCE, placing.FLAGS, placing.opened, cache=open_cache(), compiler=compiler())
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def _kept(
    draft: Draft,
    items: tuple[Item, ...],
    owners: Collection[BufferId],
    scratch: Mapping[tuple[int, int], Item],
    near: Layout | None,
) -> tuple[Draft, Problem, Solution] | None:
    """All offsets of a near layout, if what is new fits between them."""
    if near is None or near.arena is None:
        return None
    problem = Problem(items, packs=_packs(draft, owners))
    for solution in _around(problem, owners, scratch, near):
        if solution.arena_bytes <= near.arena.size_bytes:
            return draft, problem, solution
    return None


def compute_alike(one: Layout, other: Layout) -> bool:
    """Whether two layouts of one step do the same in the same places up to the update, and differ at most in what ops
    of that take for themselves."""
    if one.arena is None or other.arena is None:
        return False
    if one.arena.offsets != other.arena.offsets or one.kinds != other.kinds:
        return False
    requests = zip(one.program.ops, one.arena.requests, other.arena.requests, strict=True)
    return all(a == b for op, a, b in requests if op.phase is not Phase.UPDATE)


def _around(
    problem: Problem, buffers: Collection[BufferId], scratch: Mapping[tuple[int, int], Item], near: Layout
) -> Iterator[Solution]:
    """The offsets of another layout with what is new between them, if they still fit: lifetimes may have moved."""
    known = near.placed.offsets
    kept = {ItemId(b): known[b] for b in buffers if b in known}
    there = _inner(near)
    kept |= {item.id: there[key][1] for key, item in scratch.items() if there.get(key, (-1, 0))[0] == item.size_bytes}
    solution = solve_around(problem, kept, _placing)
    with contextlib.suppress(PlanError):
        validate(problem, solution)
        yield solution


def _inner(layout: Layout) -> dict[tuple[int, int], tuple[int, int]]:
    """Size and offset of each op's scratch, by (op, number of the request)."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for position, (op, kind, asked) in enumerate(
        zip(layout.program.ops, layout.kinds, layout.placed.requests, strict=True)
    ):
        answers = iter(asked)
        for k, taken in enumerate(op.scratch):
            if taken.result is None or asks_for_results(kind):
                request = next(answers)
                if taken.result is None and request.offset_bytes != PASS:
                    found[position, k] = (request.size_bytes, request.offset_bytes)
    return found


def _packs(draft: Draft, owners: Collection[BufferId]) -> tuple[Pack, ...]:
    """The flat buffers of which some slices are alive at some time."""
    packs: dict[str, list[tuple[ItemId, int]]] = {}
    for b in owners:
        placement = draft.placements.get(b)
        if isinstance(placement, Packed):
            packs.setdefault(placement.buffer, []).append((ItemId(b), placement.offset_bytes))
    return tuple(Pack(tuple(members)) for _, members in sorted(packs.items()))


def _kinds(draft: Draft) -> Iterator[Kind]:
    for op in draft.program.ops:
        first = op.results[0] if op.results else None
        placement = draft.placements.get(first.buffer) if isinstance(first, Region) else None
        yield kind_of(op, overwrites=isinstance(placement, Overwrites))


def _ticks(ops: tuple[Op, ...]) -> list[int]:
    ticks = [0]
    for op in ops:
        events = max((max(s.start, s.end or 0) + 1 for s in op.scratch), default=0)
        ticks.append(ticks[-1] + 2 + events)
    return ticks
