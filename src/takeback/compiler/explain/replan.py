"""Another program, or another setting, for a step that has a report: planned, and what it would come to as a tip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from takeback.compiler.capture.finish import Finished
from takeback.compiler.explain.advice import OF_PEAK, Tip
from takeback.compiler.explain.plans import above_resident
from takeback.compiler.explain.report import Report
from takeback.compiler.planning import Planned
from takeback.compiler.run.execution import Execution
from takeback.options import Options

LEAST_SHARE = 0.01  #: of the peak, or of what is copied: less is not worth a tip


@dataclass(frozen=True)
class Replan:
    """What the step is planned with."""

    lay_out: Callable[[Finished, Options], Planned]
    execution: Execution
    options: Options

    def peak(self, report: Report, planned: Planned) -> int:
        return report.resident_bytes + above_resident(planned.layout, self.execution)

    def planned(self, finished: Finished) -> Planned:
        """Another program under the same settings."""
        return self.lay_out(finished, replace(self.options))  # another object: it is not kept as the step's own plan

    def tip(self, report: Report, planned: Planned, do: str, why: str) -> Iterator[Tip]:
        """One tip if that lowers the peak by more than a little. Without a figure for the time: what is predicted of
        other ops than those that the step runs was measured to be off by a fifth of the step."""
        saves = report.peak_bytes - self.peak(report, planned)
        if saves > LEAST_SHARE * report.peak_bytes:
            yield Tip(do, saves, OF_PEAK, None, why)
