"""Decides whether a batch of new shapes gets a plan of its own, or runs plainly in eager this time.

A plan takes the time of a few steps, and where each batch has another length most shapes come but a few times. So from
the third on plans are earned. At the beginning all of them together may take as long as 40 steps; from then on all but
the first take no more than a twentieth of the time that steps have taken. A batch that is larger than all that are
planned decides how much memory the training takes: for those it is a quarter. Generated kernels for further shapes take
no more than a tenth.

A plan is made at once, too, where something that the step is given or reads has changed, unless the last few that were
made for that have not been used: then the next one is earned as well.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from takeback.compiler.capture.site import level_of_user

_FREE = 2  #: plans of one step for different shapes that need not be earned: the batch, and the last one of an epoch
_EARLY_STEPS = 40
_SHARE = 0.05  #: of the time of steps, for further plans
_SHARE_FOR_LARGEST = 0.25
_SHARE_FOR_SEARCHES = 0.1  #: that are made anew, where choices for smaller batches are not as good for a larger one
_SHARE_FOR_KERNELS = 0.1
_BYTES_PER_OP = 4096  #: what a plan takes in Python objects and tensors over the arena, as measured
_SHARE_OF_MEMORY = 0.02
_FEWEST = 8

_UNUSED = 3  #: plans that were made because something had changed, and that have not been used since
_CHANGES = 16  #: that are planned at once, even if each plan is used
USES = 8  #: of a plan, until it has been worth its time

NOT_EARNED = "their shapes are new, and steps have not taken long enough yet to earn one more plan"
KEEPS_CHANGING = (
    "what they are given or read besides tensors keeps changing, and steps have not taken long enough yet to earn one "
    "more plan"
)
NO_ROOM = "their shapes are new, and all plans that there is room for (max_plans) are in use"


@dataclass
class Earnings:
    """Of one compiled step. `explicit`: the user has said how many plans he wants, or how much memory, and gets them at
    once."""

    explicit: bool
    steps: int = 0
    steps_s: float = 0.0
    plans_s: float = 0.0  #: but for the first
    first_s: float | None = None
    kernels_s: float = 0.0  #: those of further shapes
    changes: int = 0  #: plans that were made because something had changed
    unused: int = 0  #: of those
    _warned: bool = False

    def spent_(self, seconds: float, *, on_plan: bool) -> None:
        """A call is over."""
        if not on_plan:
            self.steps += 1
            self.steps_s += seconds
        elif self.first_s is None:
            self.first_s = seconds
        else:
            self.plans_s += seconds

    def waits(self, siblings: int, *, has_room: bool, largest: bool) -> str | None:
        """Why a batch of new shapes, of which there are so many other plans, is not planned; None if it is. `largest`:
        it is larger than those of all of them."""
        if not siblings:
            return None
        if not has_room:
            return NO_ROOM
        if self.explicit or siblings < _FREE or (self.first_s or 0.0) + self.plans_s <= self._early_s():
            return None
        if self.plans_s <= self.steps_s * (_SHARE_FOR_LARGEST if largest else _SHARE):
            return None
        return NOT_EARNED

    def waits_for_change(self) -> str | None:
        """Why a step is not planned of which something has changed that no plan is for; None if it is."""
        if (self.unused < _UNUSED and self.changes < _CHANGES) or self.plans_s <= self.steps_s * _SHARE:
            return None
        return KEEPS_CHANGING

    def changed_(self) -> None:
        """A plan was made because something had changed."""
        self.changes += 1
        self.unused += 1

    def used_(self, uses: int) -> None:
        """Such a plan was used, for so many times now."""
        if uses == USES:
            self.unused = max(0, self.unused - 1)

    def affords(self, seconds: float) -> bool:
        """Whether a search that takes so long, for a better plan of a larger batch, is worth its time."""
        return self.explicit or self.plans_s + seconds <= self.steps_s * _SHARE_FOR_SEARCHES

    def compiled_(self, seconds: float) -> None:
        """Kernels for further shapes took so long."""
        self.kernels_s += seconds

    def affords_kernels(self, seconds: float) -> bool:
        """Whether kernels for further shapes, which take so long, are worth their time."""
        return self.explicit or self.kernels_s + seconds <= self.steps_s * _SHARE_FOR_KERNELS

    def _early_s(self) -> float:
        """What plans may take at the beginning; how long a step takes is known once there was one without a plan."""
        return _EARLY_STEPS * self.steps_s / self.steps if self.steps else 0.0

    def warn_(self, varies: str, plans: int) -> None:
        """Once: there are more shapes than plans."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"there are {plans} plans and no room for more (max_plans), and batches of new shapes keep coming: "
                f"{varies}. Steps without a plan run plainly in eager, with eager's memory; step.counts says how many. "
                f"Pad to few lengths (takeback.bucket), or raise max_plans.",
                RuntimeWarning,
                stacklevel=level_of_user(),
            )


def plans_that_fit(ops: int) -> int:
    """How many plans of so many ops this machine's memory allows."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no such machine
        return 64
    return max(_FEWEST, int(memory_bytes * _SHARE_OF_MEMORY) // (_BYTES_PER_OP * max(1, ops)))
