"""A report in; what its peak is made of out, named as a user would name it: parameters, optimizer state, gradients,
activations by module path, the loss, scratch. The parts add up to the peak.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from takeback.compiler.explain.ledger import ACTIVATION, BACKWARD, GRADIENT, LOSS, SCRATCH, UPDATE, Entry
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import at_peak, clean, short_line

MOST_PARTS = 12
"""So many are named; what is smaller goes together by its kind."""

RESIDENT = {
    "parameter": "parameters",
    "module buffer": "buffers of the model",
    "pending gradients": "gradients that wait",
    "closure tensor": "other tensors of yours",
    "constant": "constants",
}
KINDS = {
    GRADIENT: "gradients",
    ACTIVATION: "activations",
    LOSS: "the loss",
    BACKWARD: "backward",
    UPDATE: "update",
    SCRATCH: "scratch",
}
GAPS = "copies and gaps"


@dataclass(frozen=True)
class PeakPart:
    """Bytes of one kind that are alive at the peak. `name`: of which module or line they are; "" if of no one's."""

    kind: str
    name: str
    size_bytes: int
    count: int

    @property
    def label(self) -> str:
        return f"{self.kind}: {self.name}" if self.name else self.kind


def composition(report: Report) -> tuple[PeakPart, ...]:
    """The parts of the peak: what is resident first, then the values of the step, the largest first."""
    resident = [PeakPart(RESIDENT.get(role, role), "", size, 1) for role, size in report.resident.items() if size]
    owners = at_peak(report)
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in owners:
        kind = KINDS.get(entry.part, "other values")
        groups.setdefault((kind, "" if entry.part in (GRADIENT, UPDATE, SCRATCH) else _place(entry)), []).append(entry)
    values = [PeakPart(kind, name, sum(e.size_bytes for e in es), len(es)) for (kind, name), es in groups.items()]
    values.sort(key=lambda part: (-part.size_bytes, part.label))
    room = max(MOST_PARTS - len(resident), 4)
    parts = [*resident, *values[:room], *_together(values[room:])]
    gaps = report.peak_bytes - _sum(parts)
    return (*parts, PeakPart(GAPS, "", gaps, 1)) if gaps > 0 else _at_once(parts, -gaps)


def _at_once(parts: list[PeakPart], too_much: int) -> tuple[PeakPart, ...]:
    """The parts without scratch that is not alive at the same time: the ops of a cluster take theirs in turn."""
    taken = KINDS[SCRATCH]
    return tuple(
        replace(part, size_bytes=max(part.size_bytes - too_much, 0)) if part.kind == taken else part for part in parts
    )


def _together(small: list[PeakPart]) -> list[PeakPart]:
    by_kind: dict[str, list[PeakPart]] = {}
    for part in small:
        by_kind.setdefault(part.kind, []).append(part)
    return [
        parts[0] if len(parts) == 1 else PeakPart(kind, "elsewhere", _sum(parts), sum(p.count for p in parts))
        for kind, parts in by_kind.items()
    ]


def _sum(parts: list[PeakPart]) -> int:
    return sum(part.size_bytes for part in parts)


def _place(entry: Entry) -> str:
    """`layers.*.mlp.up_proj` for all copies of a layer alike; a line of the user's outside of submodules."""
    if entry.module:
        return entry.module if entry.module.isdecimal() else clean(re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.module))
    return short_line(entry.line)
