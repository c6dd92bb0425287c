"""`Report`: what a plan needs, what eager needs, where every value lives, what was copied and why.

Built from a layout and the recorded program, measured or predicted alike. All byte counts are of tensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from takeback.compiler.explain.ledger import Entry, Fate, ledger
from takeback.compiler.layout import Layout, asks_for_results, transient_bytes
from takeback.compiler.ownership.curve import alive_bytes
from takeback.compiler.ownership.eager_peak import eager_peak
from takeback.compiler.ownership.resident import resident_by_role
from takeback.compiler.passes.draft import Refusal
from takeback.compiler.program import Op, Phase, Program, Region


@dataclass(frozen=True)
class Measured:
    """What the last replay showed. None fields of a report mean that nothing has been replayed yet."""

    served: int
    misses: int
    missed_bytes: int
    passed: int
    landed: int
    landed_bytes: int
    worker_new: int


@dataclass(frozen=True)
class Report:
    """The account of one plan. Bytes alive at the peak include parameters, optimizer state and the batch."""

    peak_bytes: int
    eager_peak_bytes: int
    resident_bytes: int
    lower_bound_bytes: int
    arena_bytes: int
    allocations_per_step: int
    copied_bytes: int
    ledger: tuple[Entry, ...]
    refusals: tuple[Refusal, ...]
    resident: Mapping[str, int]  #: resident bytes by role
    ops: int
    eager_peak_at: str
    peak_curve: tuple[int, ...]  #: bytes of the arena alive during each op
    eager_curve: tuple[int, ...]  #: bytes eager holds above resident during each recorded op
    measured: Measured | None
    placed: bool  #: False where there is no native allocator
    notes: tuple[str, ...]
    step_s: float = 0.0  #: predicted for this machine, without rebuilding
    added_s: float = 0.0  #: predicted: what rebuilding adds
    rebuilt_ops: int = 0  #: how many ops are run again
    torch_version: str = torch.__version__

    def __str__(self) -> str:
        from takeback.compiler.explain.text import as_text

        return as_text(self)

    def to_json(self) -> str:
        """Everything as JSON text."""
        data = dataclasses.asdict(self)
        for refusal in data["refusals"]:
            site = refusal.pop("site")
            refusal["line"] = f"{site['file']}:{site['line']}" if site else ""
        return json.dumps(data, indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page and returns its path."""
        from takeback.compiler.explain.html import as_html

        target = Path(path)
        target.write_text(as_html(self), encoding="utf-8")
        return target


def build_report(
    layout: Layout,
    original: Program,
    *,
    refusals: tuple[Refusal, ...] = (),
    undo_bytes: int = 0,
    kept_grad_bytes: int = 0,
    measured: Measured | None = None,
    placed: bool = True,
    streamed: bool = False,
    group: str = "",
    step_s: float = 0.0,
    added_s: float = 0.0,
) -> Report:
    """`original` is the recorded program before the passes; it says what eager would hold. `streamed`: the device's own
    allocator places, so there is no arena and nothing is lost between tensors."""
    program = layout.draft.program
    resident = resident_by_role(program)
    total = sum(resident.values())
    eager = eager_peak(original)
    entries = ledger(layout)
    if streamed:
        kept_grad_bytes = 0  # handed to the caller as they are
    copied = sum(e.size_bytes for e in entries if e.fate is Fate.COPIED) + kept_grad_bytes
    passes = sum(e.fate is Fate.PASSED for e in entries)
    fresh = 0 if streamed else len(program.returned)
    outside = measured.misses + measured.passed + measured.worker_new if measured else passes
    if measured:
        copied += measured.landed_bytes
    missed = measured.missed_bytes if measured else 0
    if streamed and not measured:
        outside = len(set(layout.slots.values()))
    if not placed and not streamed:
        outside += sum(
            len(op.outputs) for op, kind in zip(program.ops, layout.kinds, strict=True) if asks_for_results(kind)
        )
    notes = [group] if group else []
    if streamed:
        notes.append(_STREAMED)
    elif not placed:
        notes.append("no native allocator: ops without an out= kernel allocate as in eager, and are copied into place")
    top = original.ops[eager.position] if original.ops else None
    return Report(
        peak_bytes=total + undo_bytes + transient_bytes(layout, kept_grad_bytes, missed=missed),
        eager_peak_bytes=total + eager.transient_bytes,
        resident_bytes=total,
        lower_bound_bytes=layout.alive_bytes if layout.arena is None else layout.arena.lower_bound_bytes,
        arena_bytes=layout.alive_bytes if layout.arena is None else layout.arena.size_bytes,
        allocations_per_step=fresh + outside,
        copied_bytes=copied,
        ledger=entries,
        refusals=layout.draft.refusals + refusals,
        resident={k: v for k, v in resident.items() if v},
        ops=len(program.ops),
        eager_peak_at=_where(top) if top else "",
        peak_curve=tuple(alive_bytes(program, layout.slots, layout.draft.kept)),
        eager_curve=eager.curve,
        measured=measured,
        placed=placed or streamed,
        notes=tuple(notes),
        step_s=step_s,
        added_s=added_s,
        rebuilt_ops=_rebuilt_ops(layout),
    )


_STREAMED = (
    "the device's caching allocator places the values, so there is no arena: its line says what the plan has alive at "
    "the peak. What the allocator has reserved from the device is another matter (torch.cuda.memory_reserved)."
)


def _rebuilt_ops(layout: Layout) -> int:
    """How many ops of the step are run again. A batch norm counts once: a few small ops prepare its second run."""
    rebuilt = layout.draft.rebuilt
    again = [op for op in layout.draft.program.ops if any(r.buffer in rebuilt for r in op.outputs)]
    prepared = {
        r.buffer
        for op in again
        if op.name.startswith("native_batch_norm")
        for r in (op.args[1], op.args[4])
        if isinstance(r, Region)
    }
    return sum(not any(r.buffer in prepared for r in op.outputs) for op in again)


def _where(op: Op) -> str:
    place = "in the optimizer's update" if op.phase is Phase.UPDATE else str(op.site or "")
    return f"{op.name} {place}".strip()
