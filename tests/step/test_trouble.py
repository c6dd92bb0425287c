"""What may go wrong around a step: no room for the arena, loaders that fail, are forked or spawned, numbers that are no
numbers, a step that is dropped while it runs. Each leaves the state of a complete step, and the next one is right.

Exceptions and Ctrl-C inside of a step are in test_interrupts.py, groups in tests/parallel, caches in tests/run.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import Setup, assert_same, eager_step, sgd, snapshot
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import takeback as tb
from harness import same
from takeback.compiler.run import allocator

pytestmark = pytest.mark.usefixtures("one_thread", "short_search", "eagers_kernels", "whole_head")

MODES = ("exact", "fast")


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def rows(i: int, count: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(count, 6, generator=g), torch.randint(4, (count,), generator=g)


class Twins:
    """A compiled step and its eager twin; `take` makes the same step of both and compares everything."""

    def __init__(self, mode: str = "exact", **settings: Any) -> None:
        self.model, other = normed(), normed()
        self.optimizer = sgd(self.model)
        self.twin = Setup(other, cross_entropy, sgd(other), rows)
        self.step = tb.compile_step(self.model, cross_entropy, self.optimizer, mode=mode, poison=True, **settings)
        self.taken = 0

    def take(self, batch: tuple[Tensor, ...]) -> Tensor:
        torch.manual_seed(self.taken)
        expected = eager_step(self.twin, batch)
        torch.manual_seed(self.taken)
        loss = self.step(*batch)
        assert same(loss, expected.detach())
        assert_same(self.state(), snapshot(self.twin.model, self.twin.optimizer), f"after step {self.taken}")
        self.taken += 1
        return loss

    def state(self) -> Any:
        return snapshot(self.model, self.optimizer)


# -- no room -------------------------------------------------------------------------------------------------------


class Short:
    """The system, out of memory: the next so many arenas are not mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        native = allocator.load()
        if native is None:
            pytest.skip("no native allocator")
        plain = type(native).arena

        def arena(mine: Any, size_bytes: int) -> Any:
            if self.left:
                self.left -= 1
                raise MemoryError(f"cannot map an arena of {size_bytes} bytes; use a smaller batch")
            return plain(mine, size_bytes)

        monkeypatch.setattr(type(native), "arena", arena)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", ["first plan", "larger plan", "smaller plan after that"])
def test_no_room_for_the_arena_takes_the_step_back_and_the_next_one_is_right(
    mode: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, twins = Short(monkeypatch), Twins(mode)
    sizes = {"first plan": 8, "larger plan": 24, "smaller plan after that": 4}
    before = {"first plan": (), "larger plan": (8, 8, 8), "smaller plan after that": (8, 8, 24, 24)}[stage]
    for i, count in enumerate(before):
        twins.take(rows(i, count))
    short.left, failed = 1, 0
    for i in range(4):
        state = twins.state()
        torch.manual_seed(twins.taken)
        try:
            twins.step(*rows(i, sizes[stage]))
        except MemoryError as error:
            said = str(error)
        else:  # nothing was mapped in this one: the twin follows
            torch.manual_seed(twins.taken)
            eager_step(twins.twin, rows(i, sizes[stage]))
            assert_same(twins.state(), snapshot(twins.twin.model, twins.twin.optimizer), f"after step {twins.taken}")
            twins.taken += 1
            continue
        assert "use a smaller batch" in said
        assert_same(twins.state(), state, "after the failure")
        failed += 1
        twins.take(rows(i, sizes[stage]))
    # A first plan may be made anew, in less memory, where it can be: then nothing fails.
    assert failed in {"first plan": (0, 1), "larger plan": (1,), "smaller plan after that": (0,)}[stage]
    for i in range(3):
        twins.take(rows(i, sizes[stage]))
        twins.take(rows(i, 8))


# -- loaders -------------------------------------------------------------------------------------------------------


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Thirty items, of which one may not be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == self.bad:
            raise OSError("this item cannot be read")
        x, y = rows(i, 1)
        return x[0], y[0]


@pytest.mark.parametrize(
    ("start", "bad"),
    [
        ("fork", 20),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fork", None), ("spawn", None), ("spawn", 20))),
    ],
)
def test_batches_of_workers_are_trained_as_in_eager_and_what_they_raise_goes_through(
    start: str, bad: int | None
) -> None:
    """The workers start when the allocator is in use and plans are there; their second round is forked from that."""
    twins = Twins()
    for epoch in range(2):
        loader = DataLoader(Items(bad if epoch else None), 5, num_workers=2, multiprocessing_context=start)
        fails = contextlib.nullcontext() if bad is None or not epoch else pytest.raises(OSError, match="cannot be read")
        with fails:
            for batch in loader:
                twins.take(tuple(batch))
    assert twins.taken == 12 - (0 if bad is None else 2)
    twins.take(rows(0, 5))


# -- numbers that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_nan_and_inf_in_a_replays_batch_give_eagers_bits(mode: str, number: float, clip_norm: float | None) -> None:
    twins = Twins(mode)
    if clip_norm is not None:
        twins.step = tb.compile_step(twins.model, cross_entropy, twins.optimizer, mode=mode, clip_norm=clip_norm)
        twins.twin.clip_norm = clip_norm  # type: ignore[attr-defined]
    for i in range(3):
        _take(twins, rows(i), clip_norm)
    x, y = rows(3)
    x[2, 1] = number
    _take(twins, (x, y), clip_norm)  # from here on every parameter is NaN
    _take(twins, rows(4), clip_norm)


def _take(twins: Twins, batch: tuple[Tensor, Tensor], clip_norm: float | None) -> None:
    if clip_norm is None:
        twins.take(batch)
        return
    torch.manual_seed(twins.taken)
    model, optimizer = twins.twin.model, twins.twin.optimizer
    optimizer.zero_grad()
    cross_entropy(model, *batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    torch.manual_seed(twins.taken)
    twins.step(*batch)
    assert_same(twins.state(), snapshot(model, optimizer), f"after step {twins.taken}")
    twins.taken += 1


# -- a step that is dropped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_step_that_nobody_holds_any_more_ends_what_it_does(mode: str) -> None:
    """Its last name goes while it records, replays and compares; it goes itself when it is done."""
    for steps_before in range(3):
        held: dict[str, Any] = {"twins": Twins(mode, verify_every=1)}
        for i in range(steps_before):
            held["twins"].take(rows(i))
        twin = held["twins"].twin
        dropped = threading.Event()

        def drop(*_: Any, held: dict[str, Any] = held, dropped: threading.Event = dropped) -> None:
            if "step" in held:
                del held["step"]
                gc.collect()
                dropped.set()

        twins = held.pop("twins")
        step, model, optimizer = twins.step, twins.model, twins.optimizer
        gone = weakref.ref(step)
        optimizer.register_step_pre_hook(drop)
        held["step"] = step
        del twins, step
        _in_a_thread(lambda held=held: _call_named(held, rows(9)))
        assert dropped.is_set()
        torch.manual_seed(0)
        eager_step(twin, rows(9))
        assert_same(snapshot(model, optimizer), snapshot(twin.model, twin.optimizer), f"after {steps_before} steps")
        gc.collect()
        assert gone() is None


def _call_named(held: dict[str, Any], batch: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    held["step"](*batch)


def _in_a_thread(work: Callable[[], object]) -> None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]
