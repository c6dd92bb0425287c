"""What a long call is doing just now: stages come in; after two seconds a line of progress goes out, and in the end the
seconds that each stage took.

On a terminal the line stands on stderr and vanishes with the call; elsewhere it is logged, by `logging.getLogger
("takeback")` at level INFO. A call that is over sooner says nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import IO, Any

PATIENCE_S = 2.0
_REFRESH_S = 0.2
_logger = logging.getLogger("takeback")
_logger.addHandler(logging.NullHandler())

Clock = Callable[[], float]


class Doing(StrEnum):
    """The stages of making a plan, in their order, as a user reads them."""

    COMPILING = "compiling native code"
    RECORDING = "recording the step"
    PROVING = "comparing with eager"
    MEASURING = "measuring this machine"
    CHOOSING = "choosing what to rebuild"
    PLACING = "placing values"
    WRITING = "writing the plan's code"
    KERNELS = "compiling kernels"


class Work:
    """One call that may be long. `begin` says what comes next; `seconds` is what each stage took so far.

    work = Work("new plan for 16x59")
    with work.inside, work:
        work.begin(Doing.RECORDING)

    `inside` is a lock of C's, which is released whatever happens: Ctrl-C may strike before a line of `__exit__` is run.
    """

    def __init__(self, what: str, *, on_terminal: bool = True, clock: Clock = time.perf_counter) -> None:
        self.what = what
        self.inside = threading.Lock()
        self.seconds: dict[Doing, float] = {}
        self.detail = ""
        self.doing: Doing | None = None
        self.began = self._since = clock()
        self._clock = clock
        self._on_terminal = on_terminal
        self._line: Line | None = None

    def begin(self, doing: Doing | None, detail: str = "") -> None:
        """What was done so far is over. None: nothing that is counted."""
        now = self._clock()
        if self.doing is not None:
            self.seconds[self.doing] = self.seconds.get(self.doing, 0.0) + now - self._since
        self._since, self.doing, self.detail = now, doing, detail

    def tell(self, detail: str) -> None:
        """More about what is being done."""
        self.detail = detail

    def describe(self) -> str:
        """`new plan for 16x59: choosing what to rebuild, looking for the lowest peak`."""
        doing = ", ".join(filter(None, (self.doing, self.detail)))
        return f"{self.what}{': ' if doing else ''}{doing}"

    def account(self) -> str:
        """`new plan for 16x59 took 14.2 s: recording the step 1.1 s, ...`."""
        parts = ", ".join(f"{doing} {s:.1f} s" for doing, s in self.seconds.items() if s >= 0.05)
        return f"{self.what} took {self.elapsed_s():.1f} s{': ' if parts else ''}{parts}"

    def elapsed_s(self) -> float:
        return self._clock() - self.began

    def __enter__(self) -> Work:
        if threads_at_work() == threading.active_count():  # else this is part of some work that is being shown
            shown = TerminalLine.on(sys.stderr) if self._on_terminal else None
            self._line = shown or (LogLine(_logger) if _logger.isEnabledFor(logging.INFO) else None)
        if self._line is not None:
            assert self.inside.locked(), "with work.inside, work: ..."
            self._ticker = Ticker(self, self._line)
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._ticker.stop_()
        self.begin(None)
        if self._line is not None and self._ticker.shown and error is None:
            self._line.account(self)


class Line:
    """Where progress is shown: `show` at every look, `close` once, and what it took at the end."""

    def show(self, work: Work) -> None: ...

    def close(self) -> None: ...

    def account(self, work: Work) -> None: ...


class TerminalLine(Line):
    """One line on a terminal, which is gone afterwards."""

    def __init__(self, live: Any) -> None:
        self._live = live

    @classmethod
    def on(cls, file: IO[str] | None) -> TerminalLine | None:
        """None where the file is no terminal. rich is loaded here, not while a step is being recorded."""
        if file is None or not file.isatty():
            return None
        from rich.console import Console
        from rich.live import Live

        console = Console(file=file)
        if not console.is_terminal or console.is_dumb_terminal:
            return None
        # Refreshed by the ticker alone, and the user's own prints go where they always go.
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        return cls(live)

    def show(self, work: Work) -> None:
        from rich.text import Text

        if not self._live.is_started:
            self._live.start()
        text = f"takeback, {work.elapsed_s():.0f} s: {work.describe()}"  # the end may be cut
        self._live.update(Text(text, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self) -> None:
        self._live.stop()


class LogLine(Line):
    """A line in the log for each stage that is met after the patience is over, and what it all took at the end."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: tuple[object, str] | None = None

    def show(self, work: Work) -> None:
        now = (work.doing, work.detail)
        if now != self._last:
            self._last = now
            self._logger.info("%s (%.0f s)", work.describe(), work.elapsed_s())

    def account(self, work: Work) -> None:
        self._logger.info("%s", work.account())


class Ticker(threading.Thread):
    """Looks at some work from time to time, and shows it once it has taken too long. Ends with the work; or, where
    Ctrl-C struck before the work could say that it is over, when nobody is inside of it any more."""

    def __init__(self, work: Work, line: Line) -> None:
        super().__init__(name="takeback-progress", daemon=True)
        self.shown = False
        self._work, self._line = work, line
        self._over = threading.Event()

    def run(self) -> None:
        wait_s = PATIENCE_S
        while not self._over.wait(wait_s) and self._work.inside.locked():
            self.look()
            wait_s = _REFRESH_S
        if self.shown:
            self._line.close()

    def look(self) -> None:
        if self._work.elapsed_s() >= PATIENCE_S:
            self.shown = True
            self._line.show(self._work)

    def stop_(self) -> None:
        self._over.set()
        self.join(1.0)  # a terminal that has been stopped must not hold up the step


def threads_at_work() -> int:
    """How many threads of Python's there are, but for one that only shows progress."""
    return sum(not isinstance(thread, Ticker) for thread in threading.enumerate())
