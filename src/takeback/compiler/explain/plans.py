"""The plans of a step come in; what each is for, what it needs and what making it took go out, for the report."""

from __future__ import annotations

from dataclasses import dataclass

from takeback.compiler.layout import Layout, transient_bytes
from takeback.compiler.ownership.resident import resident_by_role
from takeback.compiler.program import Role
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
    proved: str  #: "yes": compared with eager, as it is now; "family": a sibling of it was, which is enough; "no"


def account_of(plan: Plan, execution: Execution, state_bytes: int = 0) -> PlanAccount:
    """`state_bytes`: as in `build_report`."""
    layout = plan.executor.layout
    resident = sum(resident_of(layout, state_bytes).values())
    peak = resident + above_resident(layout, execution)
    proved = "yes" if plan.proved else "family" if plan.is_proved else "no"
    return PlanAccount(plan.made_for, peak, plan.spent, plan.replays, proved)


def resident_of(layout: Layout, state_bytes: int) -> dict[str, int]:
    """What is alive between steps, by role."""
    resident = resident_by_role(layout.draft.program)
    resident[Role.STATE.value] = max(resident[Role.STATE.value], state_bytes)
    return resident


def above_resident(layout: Layout, execution: Execution) -> int:
    """The most bytes of tensors that a step takes besides that."""
    missed = execution.counters.missed_bytes if execution.counters is not None else 0
    return execution.undo_bytes + transient_bytes(layout, copied_grad_bytes(layout, execution), missed=missed)


def copied_grad_bytes(layout: Layout, execution: Execution) -> int:
    """Of gradients that the caller keeps; without an arena they are handed on as they are."""
    return 0 if layout.arena is None else execution.kept_grad_bytes
