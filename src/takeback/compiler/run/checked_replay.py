"""A replay that is compared with eager: with a whole step where a plan is new, and from time to time with a forward.

A forward without gradients fits into the plan's own memory and finds what has changed out of takeback's sight; a plan
that is stale by it, and by a whole step too, is refused, with what is different in the step now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.layout import compute_alike
from takeback.compiler.ownership.eager_peak import forward_peak_bytes
from takeback.compiler.program import Op, Phase, Program, Region
from takeback.compiler.run.plans import Plan
from takeback.compiler.run.proof import Bits, Skipped
from takeback.compiler.run.verify import BesideEager, ForwardDiffers, ForwardFails, Run
from takeback.errors import CaptureError, StalePlanError, VerifyError


@dataclass(frozen=True)
class CheckedReplay:
    """One replay of `plan`, by `run`, with eager `beside` it."""

    plan: Plan
    beside: BesideEager
    run: Run
    updates_early: bool
    in_group: bool
    give_back_: Callable[[], None]  #: lets eager have the memory that the plan does not need between steps
    record: Callable[[], Program]  #: the step as it is now, taken back

    def beside_a_step(self, *, revocable: bool = False) -> Any:
        """The result, after a whole step of eager's gave the same. `revocable`: where it can be, the step is taken back
        if they differ."""
        plan, beside = self.plan, self.beside
        plan.skipped = beside.proof.skipped(plan.eager_bytes)
        if plan.foreseen is not None:
            plan.skipped = Skipped(plan.eager_bytes, plan.foreseen.room_bytes or plan.executor.layout.alive_bytes)
        if plan.skipped is not None:
            return self.run(None)
        # An optimizer's own step may keep state in Python, so it is not run twice: gradients are what is compared.
        # Where the update begins before they are all there, the parameters after it are. With a group, the update has
        # gradients of other ranks in it: what is compared is this rank's, before they are averaged.
        # Where bits may differ it is gradients, too: an optimizer makes much of what rounding leaves of a small one.
        outside = bool(plan.finished.own_steps) or self.in_group
        outside |= not isinstance(beside.proof.measure, Bits) and not self.updates_early
        gradients = outside or (not self.updates_early and (revocable or not plan.proved))
        out = beside.of_gradients(self.run) if gradients else beside.of_whole_steps(self.run)
        # A rehearsal may have put another in its place.
        then, now = beside.executor, plan.executor
        plan.proved = now is then or compute_alike(now.layout, then.layout)
        plan.right_at = plan.replays
        return out

    def beside_a_forward(self) -> Any:
        """The result, after eager's forward gave the same loss. Where it did not, a whole step has the last word."""
        plan = self.plan
        self._fits(forward_peak_bytes(plan.original))
        if plan.unsampled is None and not plan.executor.knows_loss_before_update:
            plan.unsampled = "its update begins before its loss is known"
        if plan.unsampled is not None:
            return self.run(None)
        self.give_back_()
        failed: str | None = None
        out: Any = None
        try:
            out = self.beside.of_forward(self.run, self._fits)
        except ForwardFails as error:
            failed = str(error)
        except ForwardDiffers:
            if plan.foreseen is not None:  # eager has no room for a whole step, but for one on the excerpt
                cause = first_difference(plan.foreseen.program, self.record())
                if cause is not None:
                    raise StalePlanError(self._stale(cause)) from None
            try:
                out = self.beside_a_step(revocable=True)
            except VerifyError as error:
                raise StalePlanError(self._stale(self._cause(), str(error))) from error
            plan.unsampled = "its forward gives other bits where no gradients are wanted"
        if failed is not None:  # out of that block: the error's traceback holds what the forward had in memory
            plan.unsampled = failed
            return self.run(None)
        plan.right_at = plan.replays
        return out

    def _fits(self, needed_bytes: int) -> None:
        """No forward is compared any more that needs more than the plan: what is foreseen of it does not know what the
        user's own variables hold."""
        allowed = self.plan.executor.layout.alive_bytes
        if needed_bytes > allowed:
            needed, there = f"{needed_bytes / 2**20:,.1f} MiB", f"{allowed / 2**20:,.1f} MiB"
            self.plan.unsampled = f"eager's forward needs {needed}, more than the plan's {there}"

    def _cause(self) -> str | None:
        try:
            return first_difference(self.plan.original, self.record())
        except CaptureError as refusal:
            return str(refusal)

    def _stale(self, cause: str | None, error: str = "") -> str:
        since = self.plan.replays - self.plan.right_at
        return (
            f"the plan is stale: {cause or 'its ops are those of eager, and their results are not'}. It was last found "
            f"right {since} steps ago, so some of the steps since then may be wrong. Something that the step reads has "
            f"changed out of takeback's sight (a clock, a file, state in C++): pass it to the step as an argument. The "
            f"plan was dropped, and the next call records anew. {error}"
        )


def first_difference(plan: Program, now: Program) -> str | None:
    """The first op of the step as it is now that the plan does not have so, in words; None if there is none."""
    before = [op for op in plan.ops if op.phase is not Phase.UPDATE]
    after = [op for op in now.ops if op.phase is not Phase.UPDATE]
    for old, new in zip(before, after, strict=False):
        where = f" at {new.site.describe()}" if new.site else ""
        if old.target is not new.target:
            return f"{new.name}{where} runs where {old.name} did"
        for was, is_now in zip(_given(old), _given(new), strict=False):
            if not _same(was, is_now):
                return f"{new.name}{where} is given {_show(is_now)} where it was {_show(was)}"
    if len(before) != len(after):
        return f"the step is made of {len(after):,} ops, and was of {len(before):,}"
    return _constants(plan, now)


def _given(op: Op) -> list[Any]:
    """What an op is called with, taken out of its lists; of a tensor only what it looks like."""
    found: list[Any] = []
    pending: list[Any] = [*op.args, *op.kwargs.values()]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Region):
            found.append((value.dtype, value.shape))
        elif isinstance(value, tuple | list):
            pending = [*value, *pending]
        else:
            found.append(value)
    return found


def _constants(plan: Program, now: Program) -> str | None:
    """Tensors made of Python's numbers inside the step."""
    old = [t for b, t in plan.externals.items() if b not in now.externals or now.externals[b] is not t]
    new = [t for b, t in now.externals.items() if b not in plan.externals or plan.externals[b] is not t]
    for was, is_now in zip(old, new, strict=False):
        if (
            was.shape == is_now.shape
            and was.dtype == is_now.dtype
            and was.numel() <= 64
            and not torch.equal(was, is_now)
        ):
            return f"a tensor made in the step holds {is_now.tolist()} where it was {was.tolist()}"
    return None


def _same(was: object, now: object) -> bool:
    if type(was) is not type(now):
        return False
    if isinstance(was, float) and isinstance(now, float):
        return was.hex() == now.hex()
    if isinstance(was, torch.Generator):
        return True
    return bool(was == now)


def _show(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], torch.dtype):
        return f"a tensor of shape {value[1]} and dtype {value[0]}"
    return repr(value)
