"""Threads: each has buffers of its own, without a lock; any may trim, ask for stats, end a step that others joined."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import takeback as tb

THREADS = 8


@pytest.fixture(autouse=True)
def often_switched() -> Iterator[None]:
    """Threads take turns every few bytecodes, so that they meet everywhere."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None], count: int = THREADS) -> None:
    """Runs work(0) ... work(count - 1) in threads that start at one moment; raises what one of them raised."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), name=f"worker {i}") for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def churn(ws: tb.Workspace, i: int, rounds: int = 60) -> None:
    """Takes, writes, holds and drops; what is held must keep what was written."""
    draw = random.Random(i)
    held: list[tuple[torch.Tensor, int]] = []
    for r in range(rounds):
        with ws.step():
            for k in range(draw.randrange(6)):
                value = i * 1_000_000 + r * 100 + k
                name = f"name {k}" if draw.random() < 0.3 else None
                t = ws.take(draw.choice((10, 100, 128)), torch.int64, name=name).fill_(value)
                if draw.random() < 0.4:
                    held.append((t, value))
                del t
        assert all(bool((t == value).all()) for t, value in held)
        del held[: draw.randrange(len(held) + 1)]


@pytest.mark.parametrize("debug", [False, True])
def test_threads_never_write_each_others_scratch(debug: bool) -> None:
    ws = tb.Workspace(debug=debug)
    if not debug:
        together(lambda i: churn(ws, i))
    else:

        def strict(i: int) -> None:
            for r in range(30):
                with ws.step():
                    taken = [ws.take(100, torch.int64).fill_(i * 100 + r) for _ in range(3)]
                    assert all(bool((t == i * 100 + r).all()) for t in taken)
                    del taken

        together(strict)
    stats = ws.stats()
    assert stats.hits + stats.misses == stats.takes > 0


def test_others_may_trim_and_ask_for_stats_all_the_while() -> None:
    ws = tb.Workspace()
    over = threading.Event()

    def work(i: int) -> None:
        if i >= 2:
            try:
                churn(ws, i)
            finally:
                over.set()
        elif i == 0:
            while not over.is_set():
                assert ws.trim() >= 0
        else:
            while not over.is_set():
                stats = ws.stats()
                assert stats.in_use_bytes >= 0

    together(work)
    ws.trim()


def test_a_thread_reuses_its_own_bytes_and_no_others() -> None:
    ws = tb.Workspace()
    found: list[set[int]] = [set() for _ in range(4)]
    alive = threading.Barrier(4)

    def work(i: int) -> None:
        for _ in range(20):
            with ws.step():
                found[i].add(ws.take(100).data_ptr())
        alive.wait()  # a thread that is gone gives its memory back, and another may get it

    together(work, 4)
    assert [len(addresses) for addresses in found] == [1] * 4
    assert len(set.union(*found)) == 4
    assert ws.stats().takes == 80


def test_the_buffers_of_a_thread_that_is_gone_are_given_back() -> None:
    ws = tb.Workspace()
    kept: list[torch.Tensor] = []

    def work(i: int) -> None:
        with ws.step():
            ws.take(1000)
            kept.append(ws.take(1000).fill_(i))

    together(work, 3)
    stats = ws.stats()
    assert (stats.threads, stats.held_bytes, stats.takes, stats.generations) == (0, 0, 6, 3)
    assert sorted(float(t[0]) for t in kept) == [0.0, 1.0, 2.0]


def in_a_thread(work: Callable[[], None]) -> None:
    together(lambda _: work(), 1)


def test_a_thread_without_a_step_joins_the_one_that_is_open() -> None:
    ws = tb.Workspace(debug=True)
    taken: list[torch.Tensor] = []
    with ws.step():
        in_a_thread(lambda: taken.append(ws.take(10).fill_(3.0)))
        assert taken[0].tolist() == [3.0] * 10
    with pytest.raises(tb.WorkspaceError, match=r"in step 1 .* after that step is over"):
        taken[0].sum()
    with pytest.raises(tb.WorkspaceError, match="outside of a step"):
        in_a_thread(lambda: taken.append(ws.take(10)))


def test_a_joined_threads_buffers_are_retired_with_the_step_even_while_it_lives_on() -> None:
    ws = tb.Workspace(debug=True)
    taken, ended = threading.Event(), threading.Event()
    seen: list[float] = []

    def work() -> None:
        view = ws.take(4).fill_(1.0).numpy()
        taken.set()
        ended.wait()
        seen.extend(view.tolist())

    thread = threading.Thread(target=work)
    with ws.step():
        thread.start()
        taken.wait()
    ended.set()
    thread.join()
    assert len(seen) == 4
    assert all(x != x for x in seen)


def test_a_thread_without_a_step_does_not_choose_between_several() -> None:
    ws = tb.Workspace()
    opened, done = threading.Barrier(3), threading.Event()

    def holds() -> None:
        with ws.step():
            opened.wait()
            done.wait()

    threads = [threading.Thread(target=holds) for _ in range(2)]
    for thread in threads:
        thread.start()
    opened.wait()
    try:
        with pytest.raises(tb.WorkspaceError, match="has no step of its own, while 2 other threads have one"):
            ws.take(10)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_step_may_end_in_another_thread() -> None:
    ws = tb.Workspace()

    def chunks() -> Iterator[torch.Tensor]:
        with ws.step():
            yield ws.take(10)

    generator = chunks()
    next(generator)
    in_a_thread(generator.close)
    with pytest.raises(tb.WorkspaceError, match="outside of a step"):
        ws.take(10)
    with ws.step():
        ws.take(10)
    assert ws.stats().buffers == 1
