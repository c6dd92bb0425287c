"""What each pass did, as text: the program after it, or only the lines that changed.

In: the stages that a plan went through, each with the draft before it and the draft after it, or why it had nothing to
do. Out: lines for a terminal. A line that begins with "-" is gone, one with "+" is new.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from takeback.compiler.explain.text import OUT_OF_CLUSTERS, grouped_refusals, show_bytes
from takeback.compiler.passes.draft import Draft, Overwrites, Packed
from takeback.compiler.program import show_op


@dataclass(frozen=True)
class PassRecord:
    """One stage of the pipeline as it ran: `after` is the draft it made, or the reason why it had nothing to do."""

    name: str
    before: Draft
    after: Draft | str


def passes_text(records: Sequence[PassRecord], *, whole: bool = False) -> Iterator[str]:
    """The recorded program, then a heading for each pass with what it changed, or with everything if `whole`."""
    if not records:
        return
    first = records[0].before
    yield f"the recorded step: {_counts(first)}"
    yield from str(first.program).splitlines()
    for number, record in enumerate(records, start=1):
        yield ""
        if isinstance(record.after, str):
            yield f"{number}. {record.name}: nothing to do ({record.after})"
            continue
        before, after = _lines(record.before), _lines(record.after)
        changed = [] if before == after else list(_changes(before, after))
        yield f"{number}. {record.name}: {_counts(record.after)}" + ("" if changed else "; nothing changed")
        yield from (f"   {line}" for line in (after if whole else changed))
        refused = record.after.refusals[len(record.before.refusals) :]
        for refusal in refused:
            if refusal.decision != OUT_OF_CLUSTERS:
                yield f"   refused: {refusal.decision} %{refusal.buffer} at {refusal.op}: {refusal.reason}"
        for group in grouped_refusals([r for r in refused if r.decision == OUT_OF_CLUSTERS]):
            left = f"{group.count:,} ops, {show_bytes(group.size_bytes)}"
            yield f"   left out: {left}: {group.reason} (largest: {group.example})"
        for note in record.after.notes[len(record.before.notes) :]:
            yield f"   note: {note}"


def _counts(draft: Draft) -> str:
    taken = sum(isinstance(p, Overwrites) for p in draft.placements.values())
    packed = sum(isinstance(p, Packed) for p in draft.placements.values())
    parts = [f"{len(draft.program.ops)} ops", f"{len(draft.program.buffers)} buffers"]
    parts += [f"{len(draft.rebuilt)} values rebuilt"] * bool(draft.rebuilt)
    parts += [f"{taken} written onto a dying operand"] * bool(taken)
    parts += [f"{packed} packed"] * bool(packed)
    return ", ".join(parts)


def _lines(draft: Draft) -> list[str]:
    """The program, then where its values go as far as that is decided."""
    buffers = draft.program.buffers
    lines = [show_op(op, buffers) for op in draft.program.ops]
    for b, placement in sorted(draft.placements.items()):
        if isinstance(placement, Overwrites):
            lines.append(f"%{b} takes the bytes of %{placement.buffer}")
        elif isinstance(placement, Packed):
            lines.append(f"%{b} lies {placement.offset_bytes:,} bytes into the flat {placement.buffer} gradients")
    return lines


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    diff = difflib.unified_diff(before, after, n=0, lineterm="")
    yield from (f"{line[0]} {line[1:]}" for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---"))
