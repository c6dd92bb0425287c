"""A report and what its plan was made of come in; `Advice` goes out. Nothing of the user's is run: what another setting
would come to is planned, not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from takeback.compiler.explain.advice import OF_COPIES, OF_PEAK, Advice, Tip
from takeback.compiler.explain.frontier import Frontier, find_frontier
from takeback.compiler.explain.ledger import Entry, Fate
from takeback.compiler.explain.replan import LEAST_SHARE
from takeback.compiler.explain.report import Report
from takeback.compiler.explain.text import short_line
from takeback.compiler.passes.draft import Home
from takeback.compiler.program import BufferId, Op, Program
from takeback.options import Options

MOST_COPIES = 3

WhatIf = Callable[[Report], Iterable[Tip]]
"""Another setting, planned: the tips that come of it for a report."""


@dataclass(frozen=True)
class AdvisedStep:
    """What advice is found from. `others`: what else can be tried, besides `memory=`."""

    program: Program  #: finished, before the passes
    kept: frozenset[BufferId]
    options: Options
    seconds: Callable[[Op], float]
    home: Home = Home.ARENA
    others: tuple[WhatIf, ...] = ()
    on_paper: Callable[[Report], Report] = lambda report: report
    """The report with what its own plan comes to before it has run: in mode fast, what generated kernels take for
    themselves is known of that plan only, and to compare it with others would flatter them."""

    def advised(self, report: Report, progress: Callable[[str], None] | None = None) -> Report:
        """The report, with advice where it is asked for."""
        return replace(report, advisor=lambda: self._advice(report, progress))

    def _advice(self, report: Report, progress: Callable[[str], None] | None) -> Advice:
        report = self.on_paper(report)
        frontier = find_frontier(self.program, self.kept, self.options, self.seconds, home=self.home, progress=progress)
        tips = [*_less_memory(report, frontier, self.options), *(t for other in self.others for t in other(report))]
        return Advice((*sorted(tips, key=by_saving), *_copies(report)), frontier)


def by_saving(tip: Tip) -> tuple[bool, int, str]:
    """The order of tips: what lowers the peak before what is copied, the largest saving first."""
    return tip.of != OF_PEAK, -(tip.saves_bytes or 0), tip.do


def peak_tip(report: Report, do: str, peak_bytes: int, added_s: float | None, why: str) -> Iterator[Tip]:
    """One tip, if a setting lowers the peak by more than a little. `added_s`: that it takes besides the step without
    rebuilding; None if it is not known."""
    saves = report.peak_bytes - peak_bytes
    if saves > LEAST_SHARE * report.peak_bytes:
        added = None if added_s is None or not report.step_s else (added_s - report.added_s) / report.step_s
        yield Tip(do, saves, OF_PEAK, added, why)


def _less_memory(report: Report, frontier: Frontier, options: Options) -> Iterator[Tip]:
    """The lowest peak, and the cheapest one that saves at least half as much."""
    lower = [t for t in frontier.points if t.peak_bytes < report.peak_bytes and t.memory != options.memory]
    if not lower:
        return
    lowest = lower[-1]
    half = report.peak_bytes - (report.peak_bytes - lowest.peak_bytes) // 2
    middle = next(t for t in lower if t.peak_bytes <= half)
    for chosen in dict.fromkeys((middle.memory, lowest.memory)):
        tradeoff = next(t for t in lower if t.memory == chosen)
        why = f"runs {tradeoff.rebuilt_ops:,} ops again in the backward instead of keeping what they gave"
        yield from peak_tip(report, f'memory="{chosen}"', tradeoff.peak_bytes, tradeoff.added_s, why)


def _copies(report: Report) -> Iterator[Tip]:
    """The lines of the user's that copy most."""
    lines: dict[str, list[Entry]] = {}
    for entry in report.ledger:
        if entry.fate is Fate.COPIED and entry.line:
            lines.setdefault(entry.line, []).append(entry)
    sizes = {line: sum(e.size_bytes for e in entries) for line, entries in lines.items()}
    least = LEAST_SHARE * (report.peak_bytes - report.resident_bytes)
    for line in sorted(lines, key=lambda line: (-sizes[line], line))[:MOST_COPIES]:
        if sizes[line] > least:
            first = lines[line][0]
            yield Tip(short_line(line), sizes[line], OF_COPIES, None, f"{first.op}: {first.reason}")
