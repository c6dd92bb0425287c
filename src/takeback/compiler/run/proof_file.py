"""Remembers between processes that a recording was compared with the same step without the recorder, and was equal.

In: a recorded program. Out: whether an earlier process has shown of this very program that its ops give the same bits
each time, and that recording them changes nothing. What is kept is one word, under a key of everything it depends on.
"""

from __future__ import annotations

from takeback.cache import Cache
from takeback.compiler.program import Program
from takeback.compiler.run.program_key import key_of_program

_KIND, _EQUAL = "recording", b"equal"
FEWEST_OPS = 100
LEAST_BYTES = 32 << 10
"""Less, or ops that make less each, run a second time before a key is made and a file is read."""


class ProvedRecordings:
    """Those in a cache; none where there is no cache."""

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache

    def key_of(self, program: Program, *more: str) -> str | None:
        """None where nothing is remembered: on a GPU kernels may use atomics today that they did not use then."""
        if self._cache is None or program.device_type != "cpu" or len(program.ops) < FEWEST_OPS:
            return None
        made = sum(b.size_bytes for b in program.buffers.values() if not b.role.borrowed)
        if made < LEAST_BYTES * len(program.ops):
            return None
        return key_of_program(program, more=more)

    def __contains__(self, key: str | None) -> bool:
        return self._cache is not None and key is not None and self._cache.read(_KIND, key) == _EQUAL

    def add_(self, key: str | None) -> None:
        if self._cache is not None and key is not None:
            self._cache.write(_KIND, key, _EQUAL)
