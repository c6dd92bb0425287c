"""How a layout is run, as far as an account of it must know: an executor describes itself so, and a prediction says
what the executor would."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Placing(enum.Enum):
    """Who gives values their bytes."""

    ARENA = "one arena, from which ops are served too"
    ARENA_BESIDE_OPS = "one arena; what ops ask for inside is not served from it"
    DEVICE = "the device's own allocator"


@dataclass
class Counters:
    """What the last replay cost beyond its kernels."""

    served: int = 0  #: requests answered from the arena
    passed: int = 0  #: requests that were known to go to the ordinary allocator
    misses: int = 0  #: requests nobody expected: served by the ordinary allocator
    missed_bytes: int = 0
    landed: int = 0  #: results copied into their place because their op put them elsewhere
    landed_bytes: int = 0
    worker_new: int = 0  #: blocks the worker threads' free lists had to take anew


@dataclass(frozen=True)
class Execution:
    """What a report needs besides the layout."""

    placing: Placing
    undo_bytes: int  #: copies of what the step writes before its update, so that it can be taken back
    kept_grad_bytes: int = 0  #: gradients that the caller keeps
    group: str = ""  #: who averages the gradients, in words
    counters: Counters | None = None  #: of the last replay, if there was one

    @property
    def copied_grad_bytes(self) -> int:
        """Of the kept gradients, what is copied for the caller: the device's own bytes are handed on as they are."""
        return 0 if self.placing is Placing.DEVICE else self.kept_grad_bytes
