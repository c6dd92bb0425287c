"""Whether a backward may overwrite what its forward saved: only where nobody else can read those bytes any more.

A Function saves an alias of its own (`keep`), never the tensor its caller sees. So whoever else can reach the bytes
(the caller's variable, a view, another node that saved it) is another tensor over the same storage, and counted. The
counts of a lone owner are measured once, with a real backward, not assumed. The incoming gradient is never written: one
dying buffer is enough for one result, and gradients are what autograd shares (`x + y`, `sum().backward()`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from takeback import engine
from takeback.nn import streams

KEPT = "the graph is kept for another backward (retain_graph or create_graph)"
HELD = "somebody else still holds the saved tensor's bytes: a variable, a view, or a node that has not run"
FOREIGN = "torch does not own the saved tensor's bytes: numpy, DLPack or shared memory does"
STREAMS = "streams besides the default are in use, and a kernel on one may still be reading"
HOOKED = "saved through hooks (checkpointing or offloading), which may keep what they return"
RECORDED = "an operator recorder is running, and decides about overwriting itself"


class Copies(Counter[str]):
    """How often a layer made a new buffer where it could have overwritten one, by reason."""

    def note(self, why: str | None, what: str = "") -> None:
        """Count one, unless `why` is None. A step that is being recorded must not change Python state."""
        if why is not None and not torch.compiler.is_compiling() and not engine.being_recorded():
            self[f"{what}: {why}" if what else why] += 1

    def __str__(self) -> str:
        return "; ".join(f"{count} × {reason}" for reason, count in self.items()) or "none"


ELSEWHERE = Copies()  #: of the functional forms, which have no module to remember them


def keep(ctx: Any, *saved: Tensor | None, alone: int = 1) -> None:
    """Save for backward; the first `alone` tensors as aliases that `take` may hand out for overwriting."""
    ctx.hooked = engine.saved_through_hooks()
    ctx.save_for_backward(*(tensor.detach() for tensor in saved[:alone] if tensor is not None), *saved[alone:])


def take(ctx: Any, alone: int = 1) -> tuple[tuple[Tensor, ...], str | None]:
    """What `keep` saved, and why its first `alone` tensors must not be overwritten; None where they may be."""
    saved = ctx.saved_tensors
    if engine.being_recorded():
        return saved, RECORDED
    if ctx.hooked:
        return saved, HOOKED
    if engine.graph_is_kept():
        return saved, KEPT
    if saved[0].is_cuda and streams.others_may_read(saved[0].device.index):
        return saved, STREAMS
    if not all(tensor.untyped_storage().resizable() for tensor in saved[:alone]):
        return saved, FOREIGN
    return saved, None if _counts(saved, alone) == _lone_owner() * alone else HELD


def overwritten(tensor: Tensor) -> Tensor:
    """The tensor to hand on after a kernel wrote onto `tensor`, which autograd is told: a later reader raises."""
    torch.autograd.graph.increment_version(tensor)
    return tensor.detach()


def _counts(saved: tuple[Tensor, ...], alone: int) -> tuple[int, ...]:
    counts: tuple[int, ...] = ()
    for i in range(alone):
        storage = saved[i].untyped_storage()  # the same object as anybody's who holds it
        counts += engine.holders(storage), sys.getrefcount(saved[i]), sys.getrefcount(storage)
    return counts


@functools.lru_cache(maxsize=1)
def _lone_owner() -> tuple[int, ...]:
    """The counts in a backward whose saved tensor nobody else holds."""
    seen: list[tuple[int, ...]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x + 1
            keep(ctx, y)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            saved = ctx.saved_tensors
            seen.append(_counts(saved, 1))
            return dy

    # Of what Probe returned, only the sum's node lives on, and that saves nothing.
    _in_thread_without_modes(lambda: (Probe.apply(torch.zeros((), requires_grad=True)) + 0).backward())
    return seen[0]


def _in_thread_without_modes(run: Callable[[], object]) -> None:
    """Dispatch modes, saved-tensor hooks and grad mode belong to a thread: a new one has none of the caller's."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
