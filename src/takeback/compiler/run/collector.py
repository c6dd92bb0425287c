"""Keeps Python's garbage collector out of the way while a plan is made: planning makes many objects and no cycles that
matter, and each of its rounds looks at all objects of the program, for longer than a plan takes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Where somebody has switched it off, it stays off."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
