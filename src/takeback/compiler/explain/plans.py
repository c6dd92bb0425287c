"""The plans of a step come in; what each is for, what it needs and what making it took go out, for the report."""

from __future__ import annotations

from dataclasses import dataclass

from takeback.compiler.layout import Layout, transient_bytes
from takeback.compiler.ownership.resident import resident_bytes
from takeback.compiler.run.execution import Execution
from takeback.compiler.run.plans import Plan
from takeback.compiler.run.spent import Spent


@dataclass(frozen=True)
class PlanAccount:
    """One plan of a step."""

    made_for: str  #: the batch, in words
    peak_bytes: int  #: of a step with this plan, what is resident included
    spent: Spent  #: seconds, by stage
    replays: int
    proved: bool  #: compared with eager, as it is now


def account_of(plan: Plan, execution: Execution) -> PlanAccount:
    layout = plan.executor.layout
    return PlanAccount(plan.made_for, peak_bytes(layout, execution), plan.spent, plan.replays, plan.proved)


def peak_bytes(layout: Layout, execution: Execution) -> int:
    """The most bytes of tensors alive in a step."""
    missed = execution.counters.missed_bytes if execution.counters is not None else 0
    transient = transient_bytes(layout, copied_grad_bytes(layout, execution), missed=missed)
    return resident_bytes(layout.draft.program) + execution.undo_bytes + transient


def copied_grad_bytes(layout: Layout, execution: Execution) -> int:
    """Of gradients that the caller keeps; without an arena they are handed on as they are."""
    return 0 if layout.arena is None else execution.kept_grad_bytes
