"""What passes hand to one another: the program so far, the placement of every buffer, and what was refused."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from takeback.compiler.ownership.replaced import Replaced
from takeback.compiler.program import BufferId, Op, Program, Site


class Home(enum.Enum):
    """Who gives a plan's values their bytes, and so what a plan may ask for."""

    ARENA = "one arena of ours: every result has an offset, also inside kernels that allocate their results"
    ALLOCATOR = "the device's own allocator: a result lies where its kernel took bytes for it"


@dataclass(frozen=True, slots=True)
class Fresh:
    """The buffer gets bytes of its own in the arena."""


@dataclass(frozen=True, slots=True)
class Overwrites:
    """The buffer takes the bytes of `buffer`, which dies at the op at position `op`."""

    buffer: BufferId
    op: int


@dataclass(frozen=True, slots=True)
class Packed:
    """The buffer is a slice of a larger one, named `buffer`, `offset_bytes` above its start. Its bytes are its own from
    first write to last use; the larger buffer as a whole exists only while all of its slices do."""

    buffer: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The bytes are the caller's."""


Placement = Fresh | Overwrites | Packed | Borrowed


@dataclass(frozen=True, slots=True)
class Refusal:
    """A decision that was not taken, and why."""

    decision: str
    op: str
    buffer: BufferId
    size_bytes: int
    reason: str
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """A copy that eager makes and the plan does not: `copy` is the same bytes as `source`."""

    op: str
    copy: BufferId
    source: BufferId
    size_bytes: int
    site: Site | None = None


@dataclass(frozen=True, slots=True, order=True)
class Rebuild:
    """The op at position `op` runs again just before the one at `before`; positions are those of the given program."""

    before: int
    op: int


@dataclass(frozen=True)
class Choice:
    """What to rebuild. What is not rebuilt is kept."""

    rebuilds: tuple[Rebuild, ...] = ()
    #: What clusters of the backward make on their way (shadow.py), of what they could: the numbers of these offers.
    shadows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """A choice that was made, of these ops."""

    choice: Choice
    ops: tuple[Op, ...]
    notes: tuple[str, ...] = ()  #: of the search for it


@dataclass(frozen=True)
class Draft:
    """A program on its way to a plan. `kept` are buffers that must last to the end of the step."""

    program: Program
    kept: frozenset[BufferId] = frozenset()
    home: Home = Home.ARENA
    placements: Mapping[BufferId, Placement] = field(default_factory=dict)
    moves: tuple[Moved, ...] = ()
    replaced: tuple[Replaced, ...] = ()  #: ops in whose place others came that give the same but for rounding
    rebuilt: frozenset[BufferId] = frozenset()  #: values that are made a second time
    shadows: tuple[int, ...] = ()  #: as in a `Choice`
    chosen: Chosen | None = None  #: what is made a second time, if that was asked
    planned_peak_bytes: int | None = None  #: what the choice of what to rebuild comes to, if one was made
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()  #: what the user should know of how this plan was found
    passes: tuple[str, ...] = ()  #: the names of those that have run, in order


def owner_of(draft: Draft, buffer: BufferId) -> BufferId:
    """Follows overwritings back to the buffer that brought the bytes."""
    placement = draft.placements.get(buffer)
    while isinstance(placement, Overwrites):
        buffer = placement.buffer
        placement = draft.placements.get(buffer)
    return buffer
