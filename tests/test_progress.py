"""Long calls say what they do, short ones nothing: on a terminal a line that is gone afterwards, elsewhere the log."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import takeback as tb
from takeback import progress
from takeback.progress import Doing, LogLine, TerminalLine, Ticker, Work, threads_at_work


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.002)


def wait_until_shown(text: str, file: io.StringIO) -> None:
    deadline = time.monotonic() + 20
    while text not in file.getvalue():
        assert time.monotonic() < deadline, "nothing was shown"
        time.sleep(0.001)


def work_and_ticker(clock: FakeClock, line: progress.Line) -> tuple[Work, Ticker]:
    work = Work("new plan for 16x59", clock=clock)
    return work, Ticker(work, line)


def test_seconds_are_those_of_each_stage() -> None:
    clock = FakeClock()
    work = Work("x", clock=clock)
    for doing, seconds in ((Doing.RECORDING, 1.0), (None, 8.0), (Doing.PROVING, 2.0), (Doing.RECORDING, 0.5)):
        work.begin(doing)
        clock.now += seconds
    work.begin(None)
    assert work.seconds == {Doing.RECORDING: 1.5, Doing.PROVING: 2.0}
    assert work.account() == "x took 11.5 s: recording the step 1.5 s, comparing with eager 2.0 s"


def test_nothing_is_shown_before_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "takeback")
    clock = FakeClock()
    work, ticker = work_and_ticker(clock, LogLine(logging.getLogger("takeback")))
    work.begin(Doing.RECORDING)
    clock.now += 1.99
    ticker.look()
    assert not ticker.shown
    assert caplog.messages == []
    clock.now += 0.01
    ticker.look()
    assert caplog.messages == ["new plan for 16x59: recording the step (2 s)"]


def test_the_log_gets_a_line_for_each_stage_and_not_for_each_look(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "takeback")
    clock = FakeClock()
    work, ticker = work_and_ticker(clock, LogLine(logging.getLogger("takeback")))
    work.begin(Doing.CHOOSING)
    clock.now += 3
    for _ in range(3):
        ticker.look()
    work.tell("looking for the lowest peak")
    clock.now += 4
    ticker.look()
    ticker.look()
    assert caplog.messages == [
        "new plan for 16x59: choosing what to rebuild (3 s)",
        "new plan for 16x59: choosing what to rebuild, looking for the lowest peak (7 s)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_line_on_a_terminal_is_one_line_and_is_gone_afterwards(terminal: Terminal) -> None:
    clock = FakeClock()
    line = TerminalLine.on(terminal)
    assert line is not None
    work, ticker = work_and_ticker(clock, line)
    ticker.look()
    assert terminal.getvalue() == ""
    work.begin(Doing.PLACING, "x" * 200)
    clock.now += 5
    ticker.look()
    shown = terminal.getvalue()
    assert "takeback, 5 s: new plan for 16x59: placing values" in shown
    assert "\n" not in shown, "the text was wrapped"
    line.close()
    assert terminal.getvalue()[len(shown) :].endswith("\x1b[2K"), "the line was not erased"
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1, "a hidden cursor"


def test_no_terminal_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TerminalLine.on(None) is None
    assert TerminalLine.on(io.StringIO()) is None
    monkeypatch.setenv("TERM", "dumb")
    assert TerminalLine.on(Terminal()) is None


@pytest.mark.usefixtures("impatient")
def test_the_ticker_shows_and_ends_with_the_work(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal):
        work = Work("x")
        with work.inside, work:
            work.begin(Doing.RECORDING)
            wait_until_shown("recording", terminal)
        assert sys.stderr is terminal
    assert "s: x: recording the step" in terminal.getvalue()
    assert not any(isinstance(t, Ticker) for t in threading.enumerate())


@pytest.mark.usefixtures("impatient")
def test_an_account_of_what_was_shown_is_logged_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "takeback")
    work = Work("x")
    with work.inside, work:
        work.begin(Doing.RECORDING)
        wait_until_shown("recording", caplog.handler.stream)
    assert "x: recording the step (0 s)" in caplog.messages
    assert caplog.messages[-1].startswith("x took ")


@pytest.mark.usefixtures("impatient")
def test_a_ticker_whose_work_was_left_without_a_word_ends_too(terminal: Terminal) -> None:
    work = Work("x")
    with contextlib.redirect_stderr(terminal):
        with work.inside:
            work.__enter__()  # and Ctrl-C before __exit__
            wait_until_shown("s: x", terminal)
            ticker = work._ticker
            assert ticker.is_alive()
        ticker.join(20)
    assert not ticker.is_alive()
    assert terminal.getvalue().endswith("\x1b[2K")


@pytest.mark.usefixtures("impatient")
def test_work_inside_of_work_is_not_shown_twice(terminal: Terminal) -> None:
    outer, inner = Work("outer"), Work("inner")
    with contextlib.redirect_stderr(terminal), outer.inside, outer:
        outer.begin(Doing.RECORDING)
        with inner.inside, inner:
            inner.begin(Doing.COMPILING)
            wait_until_shown("outer: recording", terminal)
    assert "inner" not in terminal.getvalue()


def test_a_ticker_is_no_thread_at_work(terminal: Terminal) -> None:
    before = threads_at_work()
    work = Work("x")
    with contextlib.redirect_stderr(terminal), work.inside, work:
        assert threading.active_count() == before + 1
        assert threads_at_work() == before


def test_a_thread_is_only_there_where_something_could_be_shown() -> None:
    logging.getLogger("takeback").setLevel(logging.NOTSET)
    work = Work("x")
    with work.inside, work:
        assert not any(isinstance(t, Ticker) for t in threading.enumerate())


# -- a compiled step -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_step_says_what_its_first_calls_do_and_has_eagers_bits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    original = Work.begin

    def begin(self: Work, doing: Doing | None, detail: str = "") -> None:
        original(self, doing, detail)
        if doing is not None:
            shown.append(f"{self.what}: {doing}")

    monkeypatch.setattr(Work, "begin", begin)
    caplog.set_level(logging.INFO, "takeback")
    losses = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(16, 4), torch.randint(2, (16,))
        step = tb.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)
        for _ in range(4):
            if compiled:
                losses.append(step(x, y))
                continue
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert torch.equal(torch.stack(losses[:4]), torch.stack(losses[4:]))
    stages = list(dict.fromkeys(shown))
    assert stages[:6] == [
        "new plan for 16x4, 16: recording the step",
        "new plan for 16x4, 16: comparing with eager",
        "new plan for 16x4, 16: measuring this machine",
        "new plan for 16x4, 16: choosing what to rebuild",
        "new plan for 16x4, 16: placing values",
        "new plan for 16x4, 16: writing the plan's code",
    ]
    assert stages[6:] == ["first replays of the plan for 16x4, 16: comparing with eager"]
    assert any(m.startswith("new plan for 16x4, 16 took") for m in caplog.messages)


def test_batches_in_words() -> None:
    from takeback.compiler.capture.batch import batch_in_words

    x = torch.ones(16, 59)
    assert batch_in_words(((x, torch.ones(())), {})) == "16x59, scalar"
    assert batch_in_words((({"input_ids": x, "labels": x[:, 0]},), {"scale": 0.5})) == (
        "input_ids 16x59, labels 16, scale 0.5"
    )
    assert batch_in_words(((x,) * 8, {})) == ", ".join(["16x59"] * 6) + " and 2 more"
    assert batch_in_words(((), {})) == "no tensors"
