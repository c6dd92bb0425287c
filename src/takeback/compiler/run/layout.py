"""A draft in, a checked `Layout` out: every internal buffer and every op's scratch at an offset in one arena.

Time is counted in ticks finer than ops, because an op's scratch comes and goes inside it:

    op i:   | start | event 0 | event 1 | ... | end |        an event is one request to the allocator or one release

The layout has passed the validator and the borrow check, or an error is raised and nothing is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from takeback.compiler.ownership import borrow
from takeback.compiler.ownership.facts import EMPTY
from takeback.compiler.ownership.lifetimes import Lifetime, lifetimes
from takeback.compiler.passes.draft import Draft, Fresh, Overwrites, Packed, Refusal, slot_of
from takeback.compiler.plan import Item, ItemId, Pack, Problem, Solution, lower_bound_bytes, solve, validate
from takeback.compiler.program import BufferId, Op, Phase, Program, Region, Special, show_op
from takeback.compiler.run.calls import Kind, kind_of
from takeback.errors import BorrowError

PASS = -1  #: an entry that goes to the ordinary allocator


@dataclass(frozen=True, slots=True)
class Entry:
    """One request an op makes of the allocator, and the offset it is given (PASS: none)."""

    size_bytes: int
    offset_bytes: int
    result: BufferId | None


@dataclass(frozen=True)
class Layout:
    """Where everything lives."""

    draft: Draft
    kinds: tuple[Kind, ...]
    alive: Mapping[BufferId, Lifetime]
    slots: Mapping[BufferId, BufferId]  #: the buffer whose bytes these are in the end
    offsets: Mapping[BufferId, int]
    entries: tuple[tuple[Entry, ...], ...]  #: per op
    arena_bytes: int
    lower_bound_bytes: int
    alive_bytes: int  #: the lower bound without the padding that alignment adds
    order: str


def asks_for_results(kind: Kind) -> bool:
    return kind is Kind.ALLOCATE


def lay_out(draft: Draft) -> Layout:
    """Places everything and proves it."""
    program = draft.program
    _check_form(program)
    alive = lifetimes(program, draft.kept)
    kinds = tuple(_kinds(draft))
    ticks = _ticks(program.ops)
    slots = {b: slot_of(draft, b) for b in alive}
    span: dict[BufferId, list[int]] = {}
    asked = {
        s.result: ticks[position] + 1 + s.start
        for position, (op, kind) in enumerate(zip(program.ops, kinds, strict=True))
        if asks_for_results(kind)
        for s in op.scratch
        if s.result is not None
    }
    for b, life in alive.items():
        start, end = asked.get(b, ticks[life.start]), ticks[life.end]
        window = span.setdefault(slots[b], [start, end])
        window[0], window[1] = min(window[0], start), max(window[1], end)
    items = [Item(ItemId(b), program.buffers[b].size_bytes, s, e) for b, (s, e) in span.items()]
    inner: dict[tuple[int, int], ItemId] = {}
    following = max((int(b) for b in program.buffers), default=0) + 1
    for position, op in enumerate(program.ops):
        for k, scratch in enumerate(op.scratch):
            if scratch.result is None and scratch.end is not None and scratch.size_bytes:
                inner[position, k] = ItemId(following)
                base = ticks[position] + 1
                items.append(Item(ItemId(following), scratch.size_bytes, base + scratch.start, base + scratch.end))
                following += 1
    draft, problem, solution = _solve(draft, tuple(items), span)
    validate(problem, solution)
    offsets = {b: solution.offsets[ItemId(slots[b])] for b in alive}
    entries: list[tuple[Entry, ...]] = []
    for position, (op, kind) in enumerate(zip(program.ops, kinds, strict=True)):
        mine: list[Entry] = []
        for k, scratch in enumerate(op.scratch):
            if scratch.result is not None:
                if asks_for_results(kind):
                    mine.append(Entry(scratch.size_bytes, offsets.get(scratch.result, PASS), scratch.result))
            else:
                ident = inner.get((position, k))
                mine.append(Entry(scratch.size_bytes, PASS if ident is None else solution.offsets[ident], None))
        entries.append(tuple(mine))
    layout = Layout(
        draft,
        kinds,
        alive,
        slots,
        offsets,
        tuple(entries),
        solution.arena_bytes,
        lower_bound_bytes(problem),
        lower_bound_bytes(Problem(problem.items, alignment_bytes=1)),
        solution.order,
    )
    borrow.check(effects(layout))
    return layout


def _solve(draft: Draft, items: tuple[Item, ...], slots: Collection[BufferId]) -> tuple[Draft, Problem, Solution]:
    """Offsets, with the packed slices where they belong. Slices that nobody needs in one piece are placed one by one
    if that makes the arena smaller; then the draft says so."""
    problem = Problem(items, packs=_packs(draft, slots))
    solution = solve(problem)
    needed = draft.program.flags is not None  # a group reduces them in one piece
    if not problem.packs or needed or solution.arena_bytes <= lower_bound_bytes(problem):
        return draft, problem, solution
    loose = Problem(items)
    other = solve(loose)
    more = solution.arena_bytes - other.arena_bytes
    if more <= 0:
        return draft, problem, solution
    placements = dict(draft.placements)
    refusals: list[Refusal] = []
    for b in slots:
        if isinstance(placements.get(b), Packed):
            placements[b] = Fresh()
            size = draft.program.buffers[b].size_bytes
            refusals.append(Refusal("pack", "gradient", b, size, f"packed, the arena would be {more:,} bytes larger"))
    return replace(draft, placements=placements, refusals=draft.refusals + tuple(refusals)), loose, other


def _packs(draft: Draft, slots: Collection[BufferId]) -> tuple[Pack, ...]:
    """The flat buffers of which some slices are alive at some time."""
    packs: dict[str, list[tuple[ItemId, int]]] = {}
    for b in slots:
        placement = draft.placements.get(b)
        if isinstance(placement, Packed):
            packs.setdefault(placement.buffer, []).append((ItemId(b), placement.offset_bytes))
    return tuple(Pack(tuple(members)) for _, members in sorted(packs.items()))


def _check_form(program: Program) -> None:
    """What every pass must leave as it was: once the update has begun nothing can send the step back (a value read into
    Python), and nobody looks beyond a buffer."""
    updating = False
    for op in program.ops:
        updating = updating or op.phase is Phase.UPDATE
        final = op.expected is None and not isinstance(op.target, Special)
        assert final or not updating, f"{op.name} comes after the update has begun"
        for region in (*op.inputs, *op.outputs):
            buffer = program.buffers[region.buffer]
            inside = buffer.role.borrowed or region.span_bytes[1] <= buffer.size_bytes
            assert inside, f"{op.name} looks beyond the {buffer.size_bytes} bytes of %{buffer.id}"


def _kinds(draft: Draft) -> Iterator[Kind]:
    for op in draft.program.ops:
        first = op.results[0] if op.results else None
        yield kind_of(op, draft.placements.get(first.buffer) if isinstance(first, Region) else None)


def _ticks(ops: tuple[Op, ...]) -> list[int]:
    ticks = [0]
    for op in ops:
        events = max((max(s.start, s.end or 0) + 1 for s in op.scratch), default=0)
        ticks.append(ticks[-1] + 2 + events)
    return ticks


def effects(layout: Layout) -> Iterator[borrow.Effect]:
    """What every op does to the arena's bytes: a new value for every write, its reads by the value they mean."""
    program = layout.draft.program
    version: dict[BufferId, int] = {}
    empty = {r.buffer for op in program.ops if op.target in EMPTY for r in op.outputs}
    count = 0

    def access(buffer: BufferId) -> borrow.Access:
        start = layout.offsets[buffer]
        size = program.buffers[buffer].size_bytes
        return borrow.Access(
            version[buffer], borrow.Span(start, start + size), program.buffers[buffer].name or f"%{buffer}"
        )

    for position, (op, kind) in enumerate(zip(program.ops, layout.kinds, strict=True)):
        if kind is Kind.NOTHING:
            continue
        mutated = set(op.mutates)
        placed = [r.buffer for r in op.inputs if r.buffer in layout.offsets]
        # A buffer's first write may be an op that fills it in place, and what torch.empty gave holds anything.
        early = [b for b in placed if b not in version and b not in mutated and b not in empty]
        if early:
            raise BorrowError(f"{show_op(op, program.buffers)[:200]} reads %{early[0]} before anything has written it")
        read = dict.fromkeys(b for b in placed if b in version)
        reads = {b: access(b) for b in read}
        written = dict.fromkeys(r.buffer for r in op.outputs if r.buffer in layout.offsets)
        written.update(dict.fromkeys(b for b in mutated if b in layout.offsets))
        allowed: set[tuple[int, int]] = set()
        writes: list[borrow.Access] = []
        for b in written:
            before = version.get(b)
            count += 1
            version[b] = count
            writes.append(access(b))
            if b in mutated and before is not None:
                allowed.add((count, before))
            placement = layout.draft.placements.get(b)
            if isinstance(placement, Overwrites) and placement.op == position:
                allowed.add((count, reads[placement.buffer].value))
        scratch = tuple(
            borrow.Span(e.offset_bytes, e.offset_bytes + e.size_bytes)
            for e in layout.entries[position]
            if e.result is None and e.offset_bytes != PASS
        )
        label = show_op(op, program.buffers)[:200]
        operands = tuple(reads.values())
        if scratch:
            # Scratch that is released before a result is asked for may lie where the result will: the operands must
            # survive it, the results come after it. What overlaps in time as well is the validator's to find.
            yield borrow.Effect(position, f"scratch of {label}", operands, (), scratch=scratch)
        yield borrow.Effect(position, label, operands, tuple(writes), frozenset(allowed))
