"""Makes a layout fit into the memory that is there, or says what is short by how much and which `memory=` would fit.

In: a finished program and the layout that `memory=` asked for. Out: that layout; where it does not fit and `memory` is
"auto", the cheapest one that does; else `NoRoomError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from takeback.compiler.capture.finish import Finished
from takeback.compiler.layout import transient_bytes
from takeback.compiler.ownership.resident import grad_bytes, resident_bytes
from takeback.compiler.ownership.writes import undo_bytes
from takeback.compiler.planning import Planned
from takeback.compiler.run.plan_maker import PlanMaker
from takeback.compiler.run.room import Room, room_on
from takeback.errors import MemoryTargetError, NoRoomError

_SHARE = 0.96  #: of what is left, for a plan: allocators round, and torch takes some for itself
_SHARE_FAST = 0.8  #: each generated kernel is compared with eager's, where it is used first
LOWER = 0.75  #: of what a plan was to take that was refused memory, for the next
_LOWERED = "memory='auto' would take"  #: begins the note of a plan that is lower than was asked for
_TRIED = 1.1  #: times what is left: so far, a plan is tried, where to be refused memory is all that can happen


def lowered(notes: Iterable[str]) -> bool:
    """Whether these notes, of a report, say that a lower plan than that of "auto" was taken to fit."""
    return any(note.startswith(_LOWERED) for note in notes)


def needed_bytes(maker: PlanMaker, planned: Planned) -> int:
    """What a layout takes above what is alive between steps anyway."""
    program = planned.layout.program
    kept = grad_bytes(program) if maker.options.keep_grads else 0
    return transient_bytes(planned.layout, kept) + undo_bytes(program)


def room_for(maker: PlanMaker) -> Room | None:
    """What is left for a plan: the arena of those before is used again."""
    room = room_on(maker.device)
    return replace(room, size_bytes=room.size_bytes + maker.arena.size_bytes) if room is not None else None


def short_of(
    maker: PlanMaker, finished: Finished, planned: Planned, why: str, *, later_bytes: int = 0, begun: bool = False
) -> NoRoomError:
    """The error for a step with this layout. Plans it once more, to say what would fit. `begun`: its update was."""
    needed, room = needed_bytes(maker, planned) + later_bytes, room_for(maker)
    text = f"there is not enough memory for this step ({why}): it needs {_mib(needed)} above what is alive anyway"
    if room is not None:
        text += f", and {_mib(room.size_bytes)} are left by {room.limit}"
        text += f": {_mib(needed - room.size_bytes)} short" if needed > room.size_bytes else ""
    state = (
        "It ran out of memory in the update, so that some parameters may have been updated, and some not."
        if begun
        else "Nothing has been changed: model, optimizer and random state are as before the step."
    )
    return NoRoomError(
        f"{text}. {_advice(maker, finished, needed, later_bytes, room)} {state}",
        needed_bytes=needed,
        room_bytes=room.size_bytes if room is not None else None,
    )


def _advice(maker: PlanMaker, finished: Finished, needed: int, later_bytes: int, room: Room | None) -> str:
    if maker.options.memory != "min":
        try:
            lowest = maker.lay_out(finished, replace(maker.options, memory="min"))
        except MemoryError:  # of the search itself
            return "Free what else is in memory, or take a smaller batch."
        least = needed_bytes(maker, lowest) + later_bytes
        if least < needed and (room is None or least <= room.size_bytes):
            return f"memory='min' needs {_mib(least)}."
        needed = min(needed, least)
    return f"No memory= goes below {_mib(needed)}: take a smaller batch, or free what else is in memory."


@dataclass
class Fitting:
    """`later_bytes`: what the step takes for good besides: the state of its optimizers."""

    maker: PlanMaker
    why: str
    later_bytes: int = 0
    most_bytes: int | None = None  #: a plan that took more than this has been refused memory
    room: Room | None = None
    notes: list[str] = field(default_factory=list)

    def fitted(self, finished: Finished, planned: Planned) -> Planned:
        """The layout, or another one that fits."""
        maker = self.maker
        room = self.room = room_for(maker)
        if room is None:
            return planned
        most = int(room.size_bytes * (_SHARE_FAST if maker.fast else _SHARE)) - self.later_bytes
        most = most if self.most_bytes is None else min(most, self.most_bytes)
        needed = needed_bytes(maker, planned)
        if needed <= most:
            return planned
        if maker.options.memory == "auto" and most > 0:
            target = resident_bytes(finished.program) + most
            try:
                tight = maker.lay_out(finished, replace(maker.options, memory=f"{target}B"))
            except MemoryTargetError:
                tight = maker.lay_out(finished, replace(maker.options, memory="min"))
                self._check(finished, tight, room)
            tried = "" if self.most_bytes is None else ", which was not enough"
            self.notes.append(
                f"{_LOWERED} {_mib(needed)} here, and {_mib(room.size_bytes)} are left by {room.limit}"
                f"{tried}: the plan takes {_mib(needed_bytes(maker, tight))}"
            )
            return tight
        self._check(finished, planned, room)
        return planned  # it may be just enough; where it is not, the replay is refused memory, and taken back

    def _check(self, finished: Finished, planned: Planned, room: Room) -> None:
        """Raises where there is no point in trying."""
        if needed_bytes(self.maker, planned) + self.later_bytes > room.size_bytes * (1.0 if room.kills else _TRIED):
            raise short_of(self.maker, finished, planned, self.why, later_bytes=self.later_bytes)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
