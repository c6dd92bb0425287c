"""Keeps Python's garbage collector out of the way while a plan is made: planning makes many objects and no cycles that
matter, and each of its rounds looks at all objects of the program, for longer than a plan takes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Where somebody has switched it off, it stays off. What was made meanwhile counts as old at once: it is there to
    stay, and no reason for the next round to look at everything."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            if not gc.get_freeze_count():  # else they would be thawed that somebody has frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
