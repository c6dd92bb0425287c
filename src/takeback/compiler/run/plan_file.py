"""Keeps what was decided for a step between processes: a program and its settings in, an `Earlier` out, or nothing.

The key is everything that the decisions depend on: the program with its sizes and scratch, the options, what each op
costs here, the versions and the very source of what decides. What is kept is plain JSON: what is rebuilt, the scratch
that a replay showed, and the offsets. Whatever is not as it must be counts as absent.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from takeback.cache import Cache
from takeback.compiler.capture.finish import Finished
from takeback.compiler.layout import Layout
from takeback.compiler.passes.draft import Choice, Home, Rebuild
from takeback.compiler.plan import ItemId, PlacingOrder, Solution
from takeback.compiler.planning import Earlier
from takeback.compiler.program import Argument, BufferId, HyperScalar, Number, Op, Program, Region, Scratch
from takeback.options import Options

FEWEST_OPS = 100
"""Less is planned anew before a file is written."""
_KIND = "plan"
_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NoKey(Exception):
    """An argument of an op has no text of its own that another process would give it, too."""


def key_of(finished: Finished, options: Options, seconds: Callable[[Op], float], home: Home) -> str | None:
    """Of everything that is decided by; None where nothing is to be kept."""
    program = finished.program
    if len(program.ops) < FEWEST_OPS:
        return None
    digest = hashlib.sha256()
    try:
        for part in (*_settings(options, home), *_text(program, finished.kept)):
            digest.update(part.encode() + b"\0")
    except _NoKey:
        return None
    digest.update(np.array([seconds(op) for op in program.ops]).tobytes())
    return digest.hexdigest()


def _settings(options: Options, home: Home) -> Iterator[str]:
    yield from (options.memory, options.update, repr(options.keep_grads), repr(options.solve_s), home.name)
    # Which scratch a kernel takes depends on these.
    yield from (torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()))
    if torch.cuda.is_initialized():
        yield torch.cuda.get_device_name()
    yield from (str(torch.__version__), np.__version__, importlib.metadata.version("highspy"), _source())


@functools.cache
def _source() -> str:
    """Of all that decides: a change of takeback's own code is another version, released or not."""
    here = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted([*here.glob("*.py"), *here.glob("p*/*.py"), *here.glob("ownership/*.py"), Path(__file__)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _text(program: Program, kept: frozenset[BufferId]) -> Iterator[str]:
    regions: dict[int, tuple[Region, str]] = {}  # by id, with what has it

    def show(arg: Argument) -> str:
        if isinstance(arg, Region):
            if id(arg) not in regions:
                regions[id(arg)] = (arg, f"%{arg.buffer}:{arg.dtype}{arg.shape}{arg.stride}{arg.offset}")
            return regions[id(arg)][1]
        if isinstance(arg, tuple | list):
            return f"({','.join(map(show, arg))})"
        if isinstance(arg, HyperScalar):
            return f"S{arg.index}"
        if isinstance(arg, Number):
            return "number"
        if isinstance(arg, float):
            return arg.hex()
        if isinstance(arg, torch.Generator):
            return "generator"
        if isinstance(arg, _PLAIN):
            return repr(arg)
        raise _NoKey

    yield program.device_type
    for op in program.ops:
        scratch = [(s.size_bytes, s.start, s.end, s.result) for s in op.scratch]
        named = ",".join(f"{name}={show(value)}" for name, value in op.kwargs.items())
        facts = (op.mutates, op.phase.name, op.grad_mode, op.expected is None, scratch)
        yield f"{op.target}{show(op.args)}{named}{show(op.results)}{facts}"
    for b in program.buffers.values():
        yield f"{b.id} {b.size_bytes} {b.role.name} {b.device}"
    yield from (f"{name} {show(region)}" for name, region in program.named_regions())
    yield repr((sorted(program.leaves.items()), sorted(program.eager_death.items()), sorted(kept)))


def keep_(cache: Cache, key: str, unrehearsed: Program, layout: Layout) -> None:
    """What a layout came to. `unrehearsed`: its program before replays showed what ops really ask for."""
    draft = layout.draft
    chosen = draft.chosen
    scratch = {
        position: [[s.size_bytes, s.start, s.end, s.result] for s in now.scratch]
        for position, (then, now) in enumerate(zip(unrehearsed.ops, draft.program.ops, strict=True))
        if then.scratch != now.scratch
    }
    data = {
        "rebuilds": [[each.before, each.op] for each in chosen.choice.rebuilds] if chosen is not None else [],
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
        peak = data["peak_bytes"]
        notes = tuple(data["notes"])
        assert peak is None or type(peak) is int
        assert all(isinstance(note, str) for note in notes)
        return Earlier(Choice(rebuilds), peak, notes, scratch, _solution(data["solution"]))
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
