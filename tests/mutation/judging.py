"""Judges mutants: do the checks that a plan passes before it runs reject it, and is it harmful in truth?

The truth is the oracle's (byte_tags.py), or a real run in poison mode beside eager. What is accepted is always run; so
are faults of overwriting, since the oracle knows nothing of how a kernel goes through its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import byte_tags
from break_clusters import draw_in_cluster, hand_over, overwrite_in_cluster
from break_code import (
    CodeMutant,
    call_otherwise,
    drop_early,
    drop_in_flight,
    drop_late,
    harm_of_code,
    rejection_of_code,
)
from break_files import FileMutant, change_byte, harm_of_file, made_of_file, rejection_of_file
from break_flights import in_flight, reuse_in_flight
from break_lifetimes import shorten, swap
from break_offsets import alias, shift
from break_overwrites import overwrite_wrong
from break_packs import reuse_slice
from break_programs import redirect, reorder
from break_rebuilds import rebuild_wrong
from break_shapes import stale
from break_sizes import shrink
from mutant import Mutant
from plans_to_break import Subject

from takeback.compiler.form import FormError, check_form
from takeback.compiler.layout import Layout, check_layout
from takeback.compiler.ownership.meaning import MeaningError, check_meaning
from takeback.errors import BorrowError, PlanError

AnyMutant = Mutant | CodeMutant | FileMutant
Mutator = Callable[[Subject, Random], AnyMutant | None]

KINDS: Mapping[str, Mutator] = {
    "shortened lifetime": shorten,
    "swapped lifetimes": swap,
    "shifted offset": shift,
    "aliased values": alias,
    "dropped reader": redirect,
    "reordered writes": reorder,
    "wrong size": shrink,
    "stale plan for another shape": stale,
    "early reuse of a packed slice": reuse_slice,
    "rebuilt random op": rebuild_wrong,
    "overwritten while it is read": overwrite_wrong,
    "reused while in flight": reuse_in_flight,
    "bucket sent, awaited or used at another time": in_flight,
    "cluster reads what it overwrites": overwrite_in_cluster,
    "random op again in a cluster": draw_in_cluster,
    "operands or kernel of another cluster": hand_over,
    "changed byte in a plan file": change_byte,
    "code: dropped too early": drop_early,
    "code: dropped too late": drop_late,
    "code: dropped while in flight": drop_in_flight,
    "code: another operand, result or kernel": call_otherwise,
}
RUN_ALWAYS = frozenset(("overwritten while it is read",))


@dataclass(frozen=True)
class Verdict:
    """`rejected`: by which check, and what it said. `harm`: what is wrong in truth. `was_run`: for real."""

    rejected: str | None
    harm: str | None
    was_run: bool

    @property
    def missed(self) -> bool:
        return self.rejected is None and self.harm is not None


def drawn(kind: str, subject: Subject, draw: Random) -> AnyMutant | None:
    """A mutant, or None where there is nothing to break, or what was broken cannot even be placed."""
    try:
        return KINDS[kind](subject, draw)
    except (PlanError, ValueError, KeyError, AssertionError):
        return None


def judged(kind: str, subject: Subject, mutant: AnyMutant) -> Verdict:
    if isinstance(mutant, CodeMutant):
        return Verdict(rejection_of_code(subject, mutant), harm_of_code(subject, mutant), was_run=True)
    if isinstance(mutant, FileMutant):
        harm = harm_of_file(subject, mutant, lambda layout: _harm(subject, layout))
        rejected = rejection_of_file(subject, mutant)
        if rejected is None and harm is None:
            harm = subject.run(made_of_file(subject, mutant))
        return Verdict(rejected, harm, was_run=rejected is None)
    rejected = rejection(subject, mutant.layout)
    harm = _harm(subject, mutant.layout)
    was_run = rejected is None or (kind in RUN_ALWAYS and harm is None)
    if was_run and harm is None:
        harm = subject.run(mutant.layout)
    if harm is None and mutant.asks is not None:
        harm = mutant.asks()
    return Verdict(rejected, harm, was_run)


def rejection(subject: Subject, layout: Layout) -> str | None:
    """What a layout is rejected for on its way to the executor; None if it is accepted."""
    try:
        check_form(layout.program, layout.draft.kept)
        check_meaning(subject.recorded, layout.program, subject.kept, layout.draft.kept, layout.draft.replaced)
        check_layout(layout)
    except (FormError, MeaningError, PlanError, BorrowError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _harm(subject: Subject, layout: Layout) -> str | None:
    try:
        found = byte_tags.left_behind(layout)
    except byte_tags.Broken as broken:
        return str(broken)
    meant = _meant(subject.layout)
    wrong = [name for name, tag in meant.items() if found.get(name) != tag]
    return f"{wrong[0]} is another" if wrong else None


_known: dict[int, tuple[Layout, dict[str, int]]] = {}


def _meant(layout: Layout) -> dict[str, int]:
    """What the valid plan leaves behind."""
    if id(layout) not in _known:
        _known[id(layout)] = (layout, byte_tags.left_behind(layout))
    return _known[id(layout)][1]
