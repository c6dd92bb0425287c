"""What another setting, or another line in the user's code, would come to for a step that has a plan: its recorded
program, changed, finished and planned again.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from takeback.compiler.capture.finish import Finished, finish_program, why_own_steps
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.explain.advice import OF_PEAK, Tip
from takeback.compiler.explain.advisor import AdvisedStep, peak_tip
from takeback.compiler.explain.chunked_loss import in_chunks, operands_of
from takeback.compiler.explain.half import HalfUnknown
from takeback.compiler.explain.replan import LEAST_SHARE, Replan
from takeback.compiler.explain.report import Report
from takeback.compiler.run.allocator import Native
from takeback.compiler.run.calibrate import rates_with
from takeback.compiler.run.execution import Execution
from takeback.compiler.run.plan_maker import PlanMaker
from takeback.compiler.run.plans import Plan
from takeback.errors import CaptureError, OptionError, PlanError

_CHUNKED = (
    "the loss in chunks of rows (takeback.nn.functional.linear_cross_entropy): logits and their gradient never exist "
    "as a whole. Sums are in another order, so results differ in the last bits"
)
_FUSED = (
    "one kernel that reads and writes each parameter once, where now every operation of the update does. Results "
    "differ in the last bits"
)
_FUSED_TIME = "The peak stays as it is: the plan has put what the update makes where bytes were free"
_LESS_TIME = 0.03  #: of the step, predicted: half of it was measured, and what is smaller is no reason to change code
_TRIED_ON = "cpu"  #: where these tips were taken and measured
_REFUSED = (OptionError, CaptureError, PlanError)


def advised(report: Report, plan: Plan, maker: PlanMaker, execution: Execution) -> Report:
    """The report of a plan, with advice. A microbatch's, or one of a group, is left as it is: what is planned there is
    not the recorded program."""
    if plan.finished.adds is not None or maker.group is not None:
        return report
    replan = Replan(maker.lay_out, execution, maker.options)
    program = plan.finished.program
    others = (
        EarlyTip(plan, maker, replan),
        FusedTip(plan, maker, replan),
        ChunkedLossTip(plan.finished, maker.recipe.model, replan, maker.native),
        HalfUnknown(program, lambda: rates_with(program, torch.bfloat16)),
    )

    def on_paper(report: Report) -> Report:
        planned = replan.planned(plan.finished)
        return replace(report, peak_bytes=replan.peak(report, planned), step_s=planned.step_s, added_s=planned.added_s)

    step = AdvisedStep(program, plan.finished.kept, maker.options, plan.planned.seconds, maker.home, others)
    return (replace(step, on_paper=on_paper) if report.mode == "fast" else step).advised(report)


@dataclass(frozen=True)
class EarlyTip:
    """`update="early"`, where that is possible and not what is done."""

    plan: Plan
    maker: PlanMaker
    replan: Replan

    def __call__(self, report: Report) -> Iterator[Tip]:
        if self.maker.options.update == "early" or self.plan.finished.own_steps:
            return
        with contextlib.suppress(*_REFUSED):
            options = replace(self.maker.options, update="early")
            planned = self.maker.lay_out(_finished(self.plan, self.maker, early=True), options)
            why = "updates each parameter as soon as its gradient is there, so that few gradients are alive at a time"
            peak = self.replan.peak(report, planned)
            yield from peak_tip(report, 'update="early"', peak, planned.added_s, why)


@dataclass(frozen=True)
class FusedTip:
    """`fused=True` for the optimizers that can have it."""

    plan: Plan
    maker: PlanMaker
    replan: Replan

    def __call__(self, report: Report) -> Iterator[Tip]:
        given = self.maker.optimizers
        if self.plan.finished.own_steps or self.maker.scaling is not None or all(map(_is_fused, given.members)):
            return
        if self.plan.finished.program.device_type != _TRIED_ON:
            return
        members = tuple(member if _is_fused(member) else _fused(member) for member in given.members)
        names = dict.fromkeys(type(member).__name__ for member in given.members if not _is_fused(member))
        do = f"torch.optim.{'/'.join(names)}(..., fused=True)"
        with contextlib.suppress(*_REFUSED):
            planned = self.replan.planned(
                _finished(
                    self.plan,
                    self.maker,
                    early=self.maker.options.update == "early",
                    optimizers=replace(given, members=members),
                )
            )
            lower = list(self.replan.tip(report, planned, do, _FUSED))
            stays = self.replan.peak(report, planned) <= (1 + LEAST_SHARE) * report.peak_bytes
            if not lower and stays and planned.step_s < (1 - _LESS_TIME) * report.step_s:
                lower = [Tip(do, 0, OF_PEAK, None, f"{_FUSED}. {_FUSED_TIME}")]
            yield from lower


@dataclass(frozen=True)
class ChunkedLossTip:
    """A cross-entropy whose logits never exist as a whole."""

    finished: Finished
    model: torch.nn.Module
    replan: Replan
    native: Native | None

    def __call__(self, report: Report) -> Iterator[Tip]:
        if self.replan.options.has_target or self.finished.program.device_type != _TRIED_ON:
            return  # of a target: a share of what eager would hold then, which is not known
        if report.mode == "fast":
            return  # there chunk_head does as much, in any model
        with contextlib.suppress(*_REFUSED):
            program = in_chunks(self.finished.program, self.native)
            if program is None:
                return
            planned = self.replan.planned(replace(self.finished, program=program))
            yield from self.replan.tip(report, planned, self._do(), _CHUNKED)

    def _do(self) -> str:
        if hasattr(type(self.model), "get_output_embeddings"):  # it computes its loss itself
            return "takeback.nn.convert(model, body=False)"
        return f"linear_cross_entropy(hidden, {operands_of(self.finished.program)})"


def _finished(plan: Plan, maker: PlanMaker, *, early: bool, optimizers: Optimizers | None = None) -> Finished:
    """The recorded program with another update."""
    return finish_program(
        plan.recorded,
        optimizers or maker.optimizers,
        plan.watch.parameters,
        {id(p): name for p, name in zip(plan.watch.parameters, plan.names, strict=True)},
        own_steps=why_own_steps(maker.optimizers, maker.scaling),
        one_by_one=early,
        one_kernel=maker.one_kernel,
        keep_grads=maker.options.keep_grads,
        scaling=maker.scaling,
    )


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Looks as it would if it were fused; it is never stepped. The state is the same."""
    twin = copy.copy(optimizer)
    twin.param_groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    return twin
