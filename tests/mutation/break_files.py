"""Faults in a plan that is kept between processes: a byte of its file is another one. The digest must tell; and where
somebody has made the digest anew, what the file says must be checked like any plan."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

from plans_to_break import Subject

from takeback import cache as cache_module
from takeback.cache import Cache
from takeback.compiler import layout as layout_module
from takeback.compiler.layout import Layout, check_layout, propose
from takeback.compiler.planning import Earlier
from takeback.compiler.run import plan_file
from takeback.errors import BorrowError, PlanError

_KEY = "a plan to break"


@dataclass(frozen=True)
class FileMutant:
    """`content` is what is in the file, `signed`: with a digest that fits it."""

    content: bytes
    signed: bool
    what: str


def change_byte(subject: Subject, draw: Random) -> FileMutant | None:
    if subject.is_streamed or subject.layout.placed.solution is None:
        return None
    content = _content(subject)
    offsets = content.index(b'"offsets"'), content.index(b'"order"')
    digits = [m.start() for m in re.finditer(rb"\d", content) if offsets[0] < m.start() < offsets[1]]
    at = draw.choice(digits) if draw.random() < 0.85 else draw.randrange(len(content))
    byte = draw.choice(b"0123456789") if content[at] in b"0123456789" else draw.randrange(256)
    if byte == content[at]:
        return None
    changed = content[:at] + bytes([byte]) + content[at + 1 :]
    return FileMutant(
        changed, draw.random() < 0.5, f"byte {at} is {bytes([byte])!r} instead of {content[at : at + 1]!r}"
    )


def _content(subject: Subject) -> bytes:
    written: list[bytes] = []

    class Sink:
        def write(self, kind: str, key: str, data: bytes) -> None:
            written.append(data)

    plan_file.keep_(Sink(), _KEY, subject.layout.program, subject.layout)
    return written[0]


# -- judging -------------------------------------------------------------------------------------------------------


def rejection_of_file(subject: Subject, mutant: FileMutant) -> str | None:
    """What becomes of the file on its way to a plan: through the cache, as a process finds it there."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder) / "cache", 1 << 24, 16)
        cache.write("plan", _KEY, mutant.content if mutant.signed else _content(subject))
        name = cache_module._name("plan", _KEY)
        if not mutant.signed:
            whole = (cache.folder / name).read_bytes()
            (cache.folder / name).write_bytes(mutant.content + whole[len(mutant.content) :])
        earlier = plan_file.read(cache, _KEY)
    if earlier is None:
        return "Cache: the file is not what was written, or no plan"
    if earlier.solution is None:
        return None
    try:
        layout = propose(subject.layout.draft, known=earlier.solution)
        check_layout(layout)
    except (PlanError, BorrowError) as error:
        return f"{type(error).__name__}: {error}"
    return "PlanError: offsets that do not fit are not used" if layout.placed.solution is not earlier.solution else None


def harm_of_file(subject: Subject, mutant: FileMutant, harm_of: Callable[[Layout], str | None]) -> str | None:
    """What would be wrong if nobody looked at digests or offsets."""

    earlier = _believed(mutant)
    if earlier is None or earlier.solution is None:
        return None  # nobody can make a plan of it
    with mock.patch.object(layout_module, "validate"):
        try:
            return harm_of(propose(subject.layout.draft, known=earlier.solution))
        except (KeyError, ValueError) as error:
            return f"no plan: {type(error).__name__}: {error}"


def made_of_file(subject: Subject, mutant: FileMutant) -> Layout:
    """What is run where the file was accepted: by its offsets, or by others, where it has none that are used."""
    earlier = _believed(mutant)
    return propose(subject.layout.draft, known=None if earlier is None else earlier.solution)


def _believed(mutant: FileMutant) -> Earlier | None:
    """What the file says, without its digest."""

    class Trusting:
        def read(self, kind: str, key: str) -> bytes:
            return mutant.content

    return plan_file.read(Trusting(), _KEY)
