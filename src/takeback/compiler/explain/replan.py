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

LEAST_SHARE = 0.01  #: of the peak, of the time, or of what is copied: less is not worth a tip


@dataclass(frozen=True)
class Replan:
    """What the step is planned with."""

    lay_out: Callable[[Finished, Options], Planned]
    execution: Execution
    options: Options

    def peak(self, report: Report, planned: Planned) -> int:
        return report.resident_bytes + above_resident(planned.layout, self.execution)

    def tip(self, report: Report, finished: Finished, do: str, why: str) -> Iterator[Tip]:
        """One tip if another program, under the same settings, needs less memory or time by more than a little, and no
        more of either."""
        planned = self.lay_out(finished, replace(self.options))  # another object: it is not kept as the step's own plan
        saves = report.peak_bytes - self.peak(report, planned)
        now_s = report.step_s + report.added_s
        added_s = planned.step_s + planned.added_s - now_s
        less = saves > LEAST_SHARE * report.peak_bytes
        faster = added_s < -LEAST_SHARE * now_s
        if (less or faster) and saves > -LEAST_SHARE * report.peak_bytes:
            yield Tip(do, saves if less else 0, OF_PEAK, added_s / now_s if now_s else None, why)
