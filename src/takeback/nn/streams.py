"""Whether a kernel on another CUDA stream may still be reading what nobody on the host holds any more.

Autograd orders a node behind those that hand it gradients, not behind others that read the same tensor on a stream of
their own. Such a reader lets go of the tensor when it is launched, not when it is done, and torch does not say who uses
which stream. But it deals streams out of pools in turn: if the next one is not the next in turn, somebody took one.
"""

from __future__ import annotations

import itertools
import threading

import torch

from takeback import engine

_POOL = 32  #: streams in a pool (2.11 to 2.13); were it another number, somebody would be taken to have taken one
_PRIORITIES = (0, -1)
_lock = threading.Lock()
_next: dict[tuple[int, int], int] = {}
_answers: dict[int, tuple[int, bool]] = {}  #: of a device: the backward that asked, and what it was told


def others_may_read(device: int) -> bool:
    """In a backward: whether it runs on a side stream, or somebody ever took one from torch. Asked once a backward."""
    if engine.cuda_stream(device):
        return True
    task = engine.backward_id()
    asked, taken = _answers.get(device, (-1, False))
    if not taken and asked != task:
        with _lock:
            taken = any(_was_taken(device, priority) for priority in _PRIORITIES)
            _answers[device] = task, taken
    return taken


def forget() -> None:
    """Believe that nobody has taken a stream so far. For tests, which know it."""
    with _lock:
        _answers.clear()
        for key in itertools.product(range(torch.cuda.device_count()), _PRIORITIES):
            _next[key] = (_in_turn(*key) + 1) % _POOL


def _was_taken(device: int, priority: int) -> bool:
    expected = _next.get((device, priority), 0)
    found = _in_turn(device, priority)
    _next[device, priority] = (found + 1) % _POOL
    return found != expected


def _in_turn(device: int, priority: int) -> int:
    """The place in its pool of the stream whose turn it is; taking it makes it the next one's."""
    return int(torch.cuda.Stream(device, priority=priority).stream_id >> 5) % _POOL
