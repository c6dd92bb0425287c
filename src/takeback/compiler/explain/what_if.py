"""What another setting would come to for a step that has a plan: its recorded program, finished and planned again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from takeback.compiler.capture.finish import finish_program, why_own_steps
from takeback.compiler.explain.advice import Tip
from takeback.compiler.explain.advisor import AdvisedStep, peak_tip
from takeback.compiler.explain.plans import above_resident
from takeback.compiler.explain.report import Report
from takeback.compiler.run.execution import Execution
from takeback.compiler.run.plan_maker import PlanMaker
from takeback.compiler.run.plans import Plan
from takeback.errors import CaptureError, OptionError, PlanError


def advised(report: Report, plan: Plan, maker: PlanMaker, execution: Execution) -> Report:
    """The report of a plan, with advice. A microbatch's, or one of a group, is left as it is: what is planned there is
    not the recorded program."""
    if plan.finished.adds is not None or maker.group is not None:
        return report
    early = _Early(plan, maker, execution)
    step = AdvisedStep(
        plan.finished.program, plan.finished.kept, maker.options, plan.planned.seconds, maker.home, (early,)
    )
    return step.advised(report)


class _Early:
    """`update="early"`, where that is possible and not what is done."""

    def __init__(self, plan: Plan, maker: PlanMaker, execution: Execution) -> None:
        self._plan, self._maker, self._execution = plan, maker, execution

    def __call__(self, report: Report) -> Iterator[Tip]:
        plan, maker = self._plan, self._maker
        if maker.options.update == "early" or plan.finished.own_steps:
            return
        with contextlib.suppress(OptionError, CaptureError, PlanError):
            options = replace(maker.options, update="early")
            finished = finish_program(
                plan.recorded,
                maker.optimizers,
                plan.watch.parameters,
                {id(p): name for p, name in zip(plan.watch.parameters, plan.names, strict=True)},
                own_steps=why_own_steps(maker.optimizers, maker.scaling),
                one_by_one=True,
                keep_grads=options.keep_grads,
                scaling=maker.scaling,
            )
            planned = maker.lay_out(finished, options)
            peak = report.resident_bytes + above_resident(planned.layout, self._execution)
            why = "updates each parameter as soon as its gradient is there, so that few gradients are alive at a time"
            yield from peak_tip(report, 'update="early"', peak, planned.added_s, why)
