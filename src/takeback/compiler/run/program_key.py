"""A program as a key that another process gives it, too: whatever is decided by it, or was found of it, holds for any
program with the same key.

In: a program and further texts. Out: a digest; None where an argument of an op has no text of its own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from takeback.compiler.program import Argument, BufferId, HyperScalar, Number, Program, Region

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NoKey(Exception):
    """An argument of an op has no text of its own that another process would give it, too."""


def key_of_program(
    program: Program, *, kept: Collection[BufferId] = (), more: Iterable[str | bytes] = ()
) -> str | None:
    """Of the program with all its sizes and scratch, of this machine and its versions, and of `more`."""
    digest = hashlib.sha256()
    try:
        for part in (*_machine(), *_text(program, kept), *more):
            digest.update((part if isinstance(part, bytes) else part.encode()) + b"\0")
    except _NoKey:
        return None
    return digest.hexdigest()


def _machine() -> Iterator[str]:
    # Which scratch a kernel takes depends on these.
    yield from (torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()))
    if torch.cuda.is_initialized():
        yield torch.cuda.get_device_name()
    yield from (str(torch.__version__), np.__version__, importlib.metadata.version("highspy"), _source())


@functools.cache
def _source() -> str:
    """Of all that records and decides: a change of takeback's own code is another version, released or not."""
    here = Path(__file__).parent.parent
    parts = ("*", "p*/*", "ownership/*", "capture/*", "run/*_file", "run/program_key", "run/verify")
    digest = hashlib.sha256()
    for file in sorted(file for part in parts for file in here.glob(f"{part}.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _text(program: Program, kept: Collection[BufferId]) -> Iterator[str]:
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
