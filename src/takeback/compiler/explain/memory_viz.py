"""A report in; a file out that PyTorch's memory visualiser (https://pytorch.org/memory_viz) opens: what the step holds,
op by op, beside what is resident.

The file is a pickle of plain dicts, lists, numbers and texts, as `torch.cuda.memory._dump_snapshot` writes one. Times
are numbers of ops. Addresses are those of the arena; without one, every value has an address of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from takeback.compiler.explain.ledger import Entry, Fate
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import clean

_BASE = 1 << 32
_ALIGNED = 512


def write_snapshot(report: Report, path: str | Path) -> Path:
    """Writes the file, and returns its path."""
    target = Path(path)
    target.write_bytes(pickle.dumps(as_snapshot(report)))
    return target


def as_snapshot(report: Report) -> dict[str, Any]:
    """The same as data. (Format checked with torch.cuda._memory_viz of 2.13.)"""
    resident_at = _BASE
    blocks: list[dict[str, Any]] = []
    for role, size in report.resident.items():
        blocks.append(_block(resident_at, size, [_frame(role, 0, role)], "active_allocated"))
        resident_at += blocks[-1]["size"]
    arena_at = 2 * resident_at
    events, top = _events(report, arena_at)
    segments = [_segment(blocks), _segment([_block(arena_at, top - arena_at, [], "inactive")])]
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}, "external_annotations": []}


def _events(report: Report, base: int) -> tuple[list[dict[str, Any]], int]:
    """Allocations and frees in the order of the ops, and the end of the highest address."""
    owners: dict[str, list[Entry]] = {}
    for entry in report.ledger:
        if entry.start is not None and entry.end is not None and entry.size_bytes:
            owners.setdefault(entry.owner or entry.value, []).append(entry)
    found: list[tuple[int, int, int, dict[str, Any]]] = []
    top = base
    born: dict[int, list[Entry]] = {}
    for entries in owners.values():
        first = min(entries, key=lambda e: e.start or 0)
        if first.fate is not Fate.SCRATCH:
            born.setdefault(first.start or 0, []).append(first)
    for number, entries in enumerate(owners.values()):
        first = min(entries, key=lambda e: e.start or 0)
        beside = born.setdefault(first.start or 0, [])
        if first.fate is Fate.SCRATCH:
            if any(_meet(first, other) for other in beside):
                continue  # one was gone when the other came: within one op there is no time to show that
            beside.append(first)
        size = max(e.size_bytes for e in entries)
        address = top if first.offset_bytes is None else base + first.offset_bytes
        top = max(top, address + _aligned(size))
        frames = [_frame(*_split(first.line), f"{first.module}: {first.op}" if first.module else first.op)]
        start, end = min(e.start or 0 for e in entries), max(e.end or 0 for e in entries)
        found.append((start, 1, number, _event("alloc", address, size, start, frames)))
        # Frees come before the allocations of the op that follows: its values may take the same bytes.
        found.append((end, -1, number, _event("free_requested", address, size, end, frames)))
        found.append((end, 0, number, _event("free_completed", address, size, end, frames)))
    return [event for _, _, _, event in sorted(found, key=lambda each: each[:3])], top


def _meet(one: Entry, other: Entry) -> bool:
    """Whether two values of one op lie on the same bytes."""
    if one.offset_bytes is None or other.offset_bytes is None:
        return False
    one_end, other_end = one.offset_bytes + one.size_bytes, other.offset_bytes + other.size_bytes
    return other.offset_bytes < one_end and one.offset_bytes < other_end


def _split(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return (file, int(number)) if number.isdigit() else (line, 0)


def _frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": clean(file), "line": line, "name": clean(name)}


def _event(action: str, address: int, size: int, time: int, frames: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, "frames": list(frames)}


def _block(address: int, size: int, frames: Sequence[Mapping[str, Any]], state: str) -> dict[str, Any]:
    taken = _aligned(size)
    return {"address": address, "size": taken, "requested_size": size, "state": state, "frames": list(frames)}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _segment(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    used = sum(b["size"] for b in blocks if b["state"] == "active_allocated")
    return {
        "device": 0,
        "address": blocks[0]["address"] if blocks else _BASE,
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
