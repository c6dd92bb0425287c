"""Keeps what was decided for a step between processes: a program and its settings in, an `Earlier` out, or nothing.

The key is everything that the decisions depend on: the program with its sizes and scratch, the options, what each op
costs here, the versions and the very source of what decides. What is kept is plain JSON: what is rebuilt, the scratch
that a replay showed, and the offsets. Whatever is not as it must be counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from takeback.cache import Cache
from takeback.compiler.capture.finish import Finished
from takeback.compiler.layout import Layout
from takeback.compiler.passes.draft import Choice, Home, Rebuild
from takeback.compiler.plan import ItemId, PlacingOrder, Solution
from takeback.compiler.planning import Earlier
from takeback.compiler.program import BufferId, Cluster, Op, Program, Scratch
from takeback.compiler.run.program_key import key_of_program
from takeback.options import Options

FEWEST_OPS = 100
"""Less is planned anew before a file is written."""
_KIND = "plan"


def key_of(finished: Finished, options: Options, seconds: Callable[[Op], float], home: Home) -> str | None:
    """Of everything that is decided by; None where nothing is to be kept."""
    program = finished.program
    if len(program.ops) < FEWEST_OPS:
        return None
    settings = (
        options.mode,
        options.memory,
        options.update,
        repr(options.keep_grads),
        repr(options.solve_s),
        home.name,
    )
    costs = np.array([seconds(op) for op in program.ops]).tobytes()
    return key_of_program(program, kept=finished.kept, more=(*settings, costs))


def keep_(cache: Cache, key: str, unrehearsed: Program, layout: Layout) -> None:
    """What a layout came to. `unrehearsed`: its program before replays showed what ops really ask for."""
    draft = layout.draft
    chosen = draft.chosen
    scratch = {
        position: [[s.size_bytes, s.start, s.end, s.result] for s in now.scratch]
        for position, (then, now) in enumerate(zip(unrehearsed.ops, draft.program.ops, strict=True))
        if then.scratch != now.scratch and not isinstance(now.target, Cluster)  # another process has other kernels
    }
    data = {
        "rebuilds": [[each.before, each.op] for each in chosen.choice.rebuilds] if chosen is not None else [],
        "shadows": list(draft.shadows),
        "peak_bytes": draft.planned_peak_bytes,
        "notes": list(chosen.notes) if chosen is not None else [],
        "scratch": scratch,
        "solution": _solution_as_data(layout),
    }
    cache.write(_KIND, key, json.dumps(data).encode())


def _solution_as_data(layout: Layout) -> dict[str, Any] | None:
    solution = layout.arena.solution if layout.arena is not None else None
    if solution is None:
        return None
    placing = layout.placed.placing
    how = None
    if placing is not None:
        how = [
            placing.name,
            placing.items,
            placing.best_fit,
            sorted(placing.hangs),
            placing.packed,
            placing.arena_bytes,
        ]
    return {
        "offsets": list(solution.offsets.items()),
        "arena_bytes": solution.arena_bytes,
        "order": solution.order,
        "placing": how,
    }


def read(cache: Cache, key: str) -> Earlier | None:
    """What was kept under this key, if it is whole and of the right form."""
    text = cache.read(_KIND, key)
    if text is None:
        return None
    try:
        data = json.loads(text)
        rebuilds = tuple(Rebuild(*_whole(pair, 2)) for pair in data["rebuilds"])
        scratch = {int(at): tuple(map(_scratch, taken)) for at, taken in data["scratch"].items()}
        shadows = tuple(_whole(data["shadows"], len(data["shadows"])))
        peak = data["peak_bytes"]
        notes = tuple(data["notes"])
        assert peak is None or type(peak) is int
        assert all(isinstance(note, str) for note in notes)
        return Earlier(Choice(rebuilds, shadows), peak, notes, scratch, _solution(data["solution"]))
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError):
        return None


def _whole(values: Any, count: int) -> list[int]:
    assert len(values) == count
    assert all(type(value) is int for value in values)
    return list(values)


def _scratch(taken: Any) -> Scratch:
    size, start, end, result = taken
    _whole([size, start, *(v for v in (end, result) if v is not None)], 2 + (end is not None) + (result is not None))
    assert size >= 0 <= start
    assert end is None or end > start
    return Scratch(size, start, end, None if result is None else BufferId(result))


def _solution(data: Mapping[str, Any] | None) -> Solution | None:
    if data is None:
        return None
    pairs = [_whole(pair, 2) for pair in data["offsets"]]
    placing = None
    if data["placing"] is not None:
        name, items, best_fit, hangs, packed, arena_bytes = data["placing"]
        placing = PlacingOrder(
            name=str(name),
            items=tuple(map(ItemId, _whole(items, len(items)))),
            best_fit=bool(best_fit),
            hangs=frozenset(map(ItemId, _whole(hangs, len(hangs)))),
            packed=bool(packed),
            arena_bytes=int(arena_bytes),
        )
    [arena_bytes] = _whole([data["arena_bytes"]], 1)
    return Solution({ItemId(item): offset for item, offset in pairs}, arena_bytes, str(data["order"]), placing)
