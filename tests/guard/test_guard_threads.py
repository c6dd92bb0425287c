"""What another thread writes is not blamed on the node that runs here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import overwriters as sab
import torch
from overwriters import Anything, Double, leaf

import takeback as tb


class Elsewhere:
    """A thread that does what it is told, while the one that tells it waits."""

    def __init__(self) -> None:
        self._todo: Callable[[], object] | None = None
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            if self._todo is None:
                return
            self._todo()
            self._todo = None
            self._done.release()

    def do(self, what: Callable[[], object]) -> None:
        self._todo = what
        self._asked.release()
        self._done.acquire()

    def __enter__(self) -> Elsewhere:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._asked.release()
        self._thread.join()


def test_a_grad_that_another_thread_clips_meanwhile() -> None:
    w = leaf()
    w.grad = torch.ones(3, 4)
    with tb.guard() as g, Elsewhere() as other:
        Anything.apply(leaf(), lambda dy: other.do(lambda: w.grad.mul_(0.5))).square().mean().backward()
    assert float(w.grad.mean()) == 0.5
    assert sum(n for reason, n in g.skipped.items() if "another thread" in reason) == 1


def test_a_parameter_that_another_thread_updates_meanwhile() -> None:
    w = leaf()
    with tb.guard() as g, Elsewhere() as other:
        y = Double.apply(w, sab.nothing, lambda t: other.do(lambda: w.data.mul_(0.5)))
        (y * w).mean().backward()
    assert g.errors == []
    assert sum(n for reason, n in g.skipped.items() if "another thread" in reason) == 1


def test_an_own_tensor_that_nobody_else_can_write_is_blamed_all_the_same() -> None:
    def write(tensor: torch.Tensor) -> None:
        sab.by_pointer(tensor)
        other.do(lambda: torch.ones(3).sum())

    with tb.guard(on_error="collect") as g, Elsewhere() as other:
        Double.apply(leaf().tanh(), sab.nothing, write).square().mean().backward()
    [error] = g.errors
    assert error.readers[0].startswith("TanhBackward0, which saved it as result")


def test_a_thread_that_waits_changes_nothing() -> None:
    w = leaf()
    for _ in range(5):  # on a busy machine it may take the other thread a while until it really waits
        with tb.guard(on_error="collect") as g, Elsewhere() as other:
            other.do(lambda: w.square().mean().backward())
            time.sleep(0.05)
            y = Double.apply(leaf() * 3, sab.nothing, sab.by_pointer)
            held = y.grad_fn.saved_tensors[0]
            y.square().mean().backward()
        if g.errors:
            break
    [error] = g.errors
    assert "the variable held" in error.readers[0]
    assert float(held[0, 0].detach()) != 0


def test_the_grads_of_another_thread_that_trains_are_not_read() -> None:
    """The engine sets them without the GIL."""
    w = leaf()
    with tb.guard() as g, Elsewhere() as other:
        other.do(lambda: Double.apply(w).square().mean().backward())
        assert not any("while another thread trains" in reason for reason in g.skipped)
        Double.apply(leaf()).square().mean().backward()
    assert any("while another thread trains" in reason for reason in g.skipped)
