"""A thread that draws random numbers while a step is recorded is not the step; what the step draws is found all the
same."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import takeback as tb
from takeback.compiler.capture import own_thread
from takeback.compiler.capture.own_thread import OwnThread, watching


@contextlib.contextmanager
def thread_that(draws: Callable[[], object]) -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            draws()
            stop.wait(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def rest(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    threading.Event().wait(0.02)  # so that the other thread has its turn
    return model(x).square().mean()


def step_of(loss_fn: Callable[..., torch.Tensor]) -> tb.CompiledStep:
    model = torch.nn.Linear(4, 4)
    return tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))


DRAWS: dict[str, Callable[[], object]] = {
    "python": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(3),
    "numpy seed": lambda: np.random.seed(1),
    "torch": lambda: torch.rand(3),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_what_another_thread_draws_is_not_the_step_s(kind: str) -> None:
    step = step_of(rest)
    with thread_that(DRAWS[kind]):
        for _ in range(3):
            step(torch.ones(2, 4))
    assert step.counts.planned == 3


@pytest.mark.parametrize(("kind", "name"), [("python", "Python's random module"), ("numpy", "numpy.random")])
@pytest.mark.parametrize("others", ["python", "numpy"])
def test_what_the_step_draws_is_found_beside_another_thread(kind: str, name: str, others: str) -> None:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        DRAWS[kind]()
        return model(x).square().mean()

    with thread_that(DRAWS[others]), pytest.raises(tb.CaptureError, match=f"the step draws from {name}"):
        step_of(loss_fn)(torch.ones(2, 4))


def test_a_function_imported_before_is_found_too() -> None:
    from random import random as draw

    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() * draw()

    with thread_that(DRAWS["python"]), pytest.raises(tb.CaptureError, match="Python's random module"):
        step_of(loss_fn)(torch.ones(2, 4))


def test_where_both_draw_from_torch_s_generator_the_thread_is_named() -> None:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(rest(model, x), 0.5) + F.dropout(rest(model, x), 0.5)

    with thread_that(DRAWS["torch"]), pytest.raises(tb.CaptureError, match="another thread drew from torch's default"):
        step_of(loss_fn)(torch.ones(2, 4))


def test_a_seed_inside_the_step_is_still_found() -> None:
    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(3)
        return F.dropout(model(x), 0.5).sum()

    with thread_that(DRAWS["python"]), pytest.raises(tb.CaptureError, match="the random state was set"):
        step_of(loss_fn)(torch.ones(2, 4))


def test_checkpointing_beside_a_thread_is_planned() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))

    def loss_fn(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return out.sum()

    step = tb.compile_step(layer, loss_fn, torch.optim.SGD(layer.parameters(), lr=0.1))
    with thread_that(DRAWS["numpy"]):
        for _ in range(3):
            step(torch.ones(2, 4))


def test_numpy_s_stream_is_not_changed_by_watching() -> None:
    np.random.seed(5)
    expected = [np.random.randn(), np.random.randn(), np.random.rand()]  # randn draws pairs and keeps the second
    np.random.seed(5)
    found = [np.random.randn()]
    with thread_that(lambda: None), watching(torch.device("cpu")) as own:
        assert own.exact_numpy
        found.append(np.random.randn())
    found.append(np.random.rand())
    assert found == expected
    assert type(np.random.get_bit_generator()) is np.random.MT19937


def test_a_watch_that_an_interrupt_has_left_behind_is_taken_away_by_the_next() -> None:
    """Ctrl-C may strike once it is there, and before it is known how to take it away."""
    take_away = own_thread._watch_numpy_(OwnThread())
    assert type(np.random.get_bit_generator()) is not np.random.MT19937
    try:
        np.random.seed(5)
        expected = [np.random.randn() for _ in range(3)]
        np.random.seed(5)
        found = [np.random.randn()]
        with thread_that(lambda: None), watching(torch.device("cpu")) as own:
            assert own.exact_numpy
            found.append(np.random.randn())
            assert own.drew_numpy
        assert type(np.random.get_bit_generator()) is np.random.MT19937
        assert [*found, np.random.randn()] == expected
    finally:
        take_away()
