"""How a layout is run, as far as an account of it must know: an executor describes itself so, and a prediction says
what the executor would."""

from __future__ import annotations

from dataclasses import dataclass


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

    serves_ops: bool  #: False: an arena without the native allocator, so what ops ask for inside does not come from it
    undo_bytes: int  #: copies of what the step writes before its update, so that it can be taken back
    kept_grad_bytes: int = 0  #: gradients that the caller keeps
    group: str = ""  #: who averages the gradients, in words
    counters: Counters | None = None  #: of the last replay, if there was one
    graph: str = ""  #: whether it is a CUDA graph, or why not
