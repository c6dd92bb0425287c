"""Keeps account of what could not be planned: which batches were refused and why, when a recording is tried again, and
how many steps ran plainly instead.

A refused recording costs a step's time or two, so it is not made again at once: after a refusal the same key runs
plainly for 16 steps, after the next one for 32, and so on. Where one key after the other is refused, that goes for all
keys that have no plan.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from takeback.compiler.capture.site import level_of_user
from takeback.errors import CaptureError

_FIRST_WAIT = 16
_KEYS_IN_A_ROW = 4
_MOST_KEYS = 1024
_MOST_WARNINGS = 4


@dataclass(frozen=True)
class StepCounts:
    """How many steps were made: `planned` ones, recorded or replayed, and `plain` ones in eager, for these reasons."""

    planned: int
    plain: int
    reasons: Mapping[str, int]

    def describe(self) -> str:
        """For the report; nothing where every step was planned."""
        if not self.plain:
            return ""
        why = "; ".join(f"{count} because {reason}" for reason, count in self.reasons.items())
        return f"{self.plain} of {self.planned + self.plain} steps ran plainly in eager: {why}"


@dataclass
class _Wait:
    """For how many steps no recording is tried."""

    left: int
    span: int
    reason: str


@dataclass
class Unplanned:
    """What was refused so far."""

    _waits: dict[Hashable, _Wait] = field(default_factory=dict)
    _everywhere: _Wait | None = None
    _in_a_row: int = 0  #: refusals since the last plan
    _planned: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> StepCounts:
        return StepCounts(self._planned, self._reasons.total(), dict(self._reasons))

    def planned_(self, *, new: bool) -> None:
        """A step was recorded (`new`) or replayed."""
        self._planned += 1
        if new:
            self._in_a_row, self._everywhere = 0, None

    def waits_(self, key: Hashable) -> str | None:
        """Why a batch of this key, for which there is no plan, runs plainly without a new attempt; None if it is time
        for one."""
        wait = self._waits.get(key, self._everywhere)
        if wait is None or wait.left == 0:
            return None
        wait.left -= 1
        return wait.reason

    def refused_(self, key: Hashable, error: CaptureError) -> str:
        """A recording was refused; the reason."""
        reason = str(error)
        self._in_a_row += 1
        before = self._waits.pop(key, None)
        self._waits[key] = _next(before, reason)
        while len(self._waits) > _MOST_KEYS:
            del self._waits[next(iter(self._waits))]
        if self._in_a_row >= _KEYS_IN_A_ROW:
            self._everywhere = _next(self._everywhere, reason)
        if reason not in self._reasons and len(self._reasons) < _MOST_WARNINGS:
            warnings.warn(
                f"this step is not planned and runs plainly in eager (unplanned='eager'): {reason}",
                RuntimeWarning,
                stacklevel=level_of_user(),
            )
        return reason

    def ran_plainly_(self, reason: str) -> None:
        self._reasons[reason] += 1


def _next(before: _Wait | None, reason: str) -> _Wait:
    span = _FIRST_WAIT if before is None else 2 * before.span
    return _Wait(span, span, reason)
