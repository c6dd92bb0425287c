"""The plans of one compiled step, found by key and by whether they apply; the least recently used is dropped first.

Finds out, too, when recording would never end: a value that the step reads into Python, or a shape that depends on the
data, is a new one each time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, overload

import torch

from takeback.compiler.capture.aside import Aside
from takeback.compiler.capture.assumptions import Varying
from takeback.compiler.capture.excerpt import Excerpt
from takeback.compiler.capture.finish import Finished
from takeback.compiler.capture.kin import Kin
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.unplannable import varying
from takeback.compiler.capture.update import Updates, lacks_state
from takeback.compiler.capture.watch import Watch
from takeback.compiler.layout import transient_bytes
from takeback.compiler.ownership.eager_peak import eager_peak
from takeback.compiler.planning import Planned
from takeback.compiler.program import Number, Op, Program
from takeback.compiler.run.earnings import plans_that_fit
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.proof import Skipped
from takeback.compiler.run.spent import Spent
from takeback.compiler.run.together import Together, together
from takeback.engine import storage_key
from takeback.errors import CaptureError

_IN_USE = 4  #: a plan is in use that has been used among the last so many calls for each plan
_MOST_MISSES = 8
_MOST_SHAPES = 3  #: the same of shapes that depend on the data, which rarely come back
#: Of plans for what the user has replaced since, which may come back: so many, and of the newest plan's bytes so much.
_MOST_OUTDATED = 8
_OUTDATED_SHARE = 0.05


@dataclass
class Family:
    """What siblings have in common: plans of one step for batches of different shapes."""

    replays: int = 0  #: of all of them
    codes: dict[str, CodeType] = field(default_factory=dict)  #: compiled, by source
    pattern: Plan | None = None  #: whose choices the others have: of the largest batch for which some were searched
    proved: bool = False  #: one of them was compared with eager


@dataclass(frozen=True)
class Foreseen:
    """Of a plan for a batch that was not run in eager, which has no room for it: the excerpt that was, and its
    program."""

    excerpt: Excerpt
    program: Program
    room_bytes: int | None  #: what was left when eager ran out of memory


@dataclass
class Plan:
    """One recorded and planned step, and what must be the same for it to be used."""

    key: Hashable
    outline: Hashable  #: the key less shapes
    batch_elements: int
    recorded: Program  #: before the update was written into it
    watch: Watch
    finished: Finished
    executor: Executor
    aux_form: Any  #: aux with an `AuxSlot` for every tensor
    has_aux: bool
    names: tuple[str, ...]  #: of the parameters
    planned: Planned
    kin: Kin | None = None  #: for the recording of a sibling
    family: Family = field(default_factory=Family)
    is_sibling: bool = False  #: its choices are those of another plan
    aside: Aside = field(default_factory=Aside)
    notes: tuple[str, ...] = ()  #: of the recording
    proved: bool = False  #: compared with its reference
    skipped: Skipped | None = None  #: why it was not, where that was due
    rehearsals: int = 0
    awaits_kernels: bool = False  #: its clusters run with eager's kernels until it has been used more often
    kernels_seen: int = 0  #: the change of the step's kernels up to which its layout knows what they ask for
    replays: int = 0
    used_at: int = 0  #: the call in which it was
    right_at: int = 0  #: the replay that was last compared with eager
    numbers: tuple[Number, ...] = ()  #: that the step reads anew
    unsampled: str | None = None  #: why its replays are not compared with eager's forward from time to time
    made_for: str = ""  #: the batch it was recorded with, in words
    spent: Spent = field(default_factory=Spent)  #: on making it
    for_change: bool = False  #: it was made because something that is given or read was another thing
    foreseen: Foreseen | None = None  #: how it was made, if the whole batch was not recorded
    for_objects: bool = False  #: its key holds objects of the batch that are compared by identity

    @property
    def is_proved(self) -> bool:
        """Of siblings one is enough: the same kernels in the same order, each in bytes that were checked."""
        return self.proved or (self.is_sibling and self.family.proved)

    @property
    def original(self) -> Program:
        """As it was recorded, before the passes."""
        return self.finished.program

    @functools.cached_property
    def sharing(self) -> tuple[Together, ...]:
        """Its results that share memory in eager."""
        return together(self.original)

    @property
    def step_s(self) -> float:
        """Predicted, without rebuilding."""
        return self.planned.step_s

    @property
    def added_s(self) -> float:
        """What rebuilding is predicted to add."""
        return self.planned.added_s

    @property
    def update(self) -> Updates | None:
        return self.finished.update

    @functools.cached_property
    def eager_bytes(self) -> int:
        """What the eager step takes above what is resident: so much does comparing with it."""
        return eager_peak(self.original).transient_bytes

    @functools.cached_property
    def written_storages(self) -> frozenset[int]:
        """Those of tensors that were there before the step, and that it writes."""
        program = self.original
        written = {b for op in program.ops for b in op.mutates}
        found = [t for b, t in program.externals.items() if b in written and t.layout is torch.strided]
        return frozenset(storage_key(t.untyped_storage()) for t in found)

    def change(self, leaves: Sequence[torch.Tensor]) -> str | None:
        """None while the plan may be used; else what is different, in words."""
        if self.update is not None and not self.update.still_applies():
            return "the optimizer's groups, flags or state are others"
        if self.executor.written_leaves and len({t.untyped_storage().data_ptr() for t in leaves}) < len(leaves):
            return "the step writes a batch tensor, and others share its memory this time"
        return self.watch.change(leaves)

    def has_state_now(self, optimizers: Optimizers) -> bool:
        """Whether the update could be in the plan, and is not because there was no state when it was made."""
        parameters = [self.watch.parameters[i] for i in self.original.grads]
        return self.finished.awaits_state and not lacks_state(optimizers.only, parameters)


class PlanCache(Sequence[Plan]):
    """At most `most` plans, or as many as memory allows, most recently used first."""

    def __init__(self, most: int | None) -> None:
        self.last: Plan | None = None  #: the one used last, also after it was dropped
        self.made = 0
        self.dropped = 0  #: for want of room
        self._given = most
        self._calls = 0
        self._plans: tuple[Plan, ...] = ()  # replaced as a whole: Ctrl-C may come at any time
        self._misses = 0  #: recordings in a row because no plan had the values that the step read into Python

    @overload
    def __getitem__(self, index: int) -> Plan: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...

    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        return self._plans[index]

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def most(self) -> int:
        """How many there may be."""
        if self._given is not None:
            return self._given
        return plans_that_fit(max((len(plan.original.ops) for plan in self._plans), default=1))

    def of_outline(self, outline: Hashable) -> tuple[Plan, ...]:
        """The plans for batches that differ from one another in their shapes alone."""
        return tuple(plan for plan in self._plans if plan.outline == outline)

    def has_room(self) -> bool:
        """Whether a plan can be added without dropping one that is in use: one that has come up among the last few
        calls for each plan there is."""
        if len(self._plans) < self.most:
            return True
        return self._calls - self._plans[-1].used_at > _IN_USE * len(self._plans)

    def under(self, key: Hashable) -> tuple[Plan, ...]:
        """The plans for batches of this key. Whether one applies is asked when its turn comes: a trial of the one
        before it may have changed that."""
        return tuple(plan for plan in self._plans if plan.key == key)

    def but_for_values(self, key: Hashable, leaves: Sequence[torch.Tensor]) -> tuple[Plan | None, Varying]:
        """A plan that could be used but for numbers that the user has changed, or values of the batch, and where they
        are: the one with the fewest."""
        found = [
            (plan, replace(varying, of=plan.original))
            for plan in self.under(key)
            if (varying := plan.watch.varying(leaves))
        ]
        return min(found, key=lambda each: len(each[1].given) + len(each[1].numbers), default=(None, Varying()))

    def kin(self, outline: Hashable, leaves: Sequence[torch.Tensor]) -> tuple[Plan, ...]:
        """Of those for other shapes one of each family, the one used last, if nothing else has changed since it was
        made."""
        found: dict[int, Plan] = {}
        for plan in self.of_outline(outline):
            if id(plan.family) not in found and plan.kin is not None and plan.change(leaves) is None:
                found[id(plan.family)] = plan
        return tuple(found.values())

    def add_(self, plan: Plan, lasting: Iterable[torch.Tensor] = ()) -> None:
        """`lasting`: tensors that others hold, whether there is a plan for them or not."""
        self.made += 1
        plan.used_at = self._calls = self._calls + 1
        self._plans = (plan, *self._plans)
        self.last = plan
        for cold in (*self._plans[self.most :], *self._outdated({id(t) for t in lasting})):
            self.dropped += 1
            self.drop_(cold)

    def _outdated(self, lasting: Collection[int]) -> list[Plan]:
        """Plans that keep alive what only they may hold: tensors that are no longer where the step read them, or
        objects of earlier batches. A few are kept, in case these come back."""
        newest, found = self._plans[0], []
        room = _OUTDATED_SHARE * transient_bytes(newest.executor.layout)
        held_bytes = times = 0
        for plan in self._plans[1 : self.most]:
            displaced_bytes = plan.watch.displaced_bytes(lasting)
            if not displaced_bytes and not (plan.for_objects and plan.key != newest.key):
                continue
            held_bytes, times = held_bytes + displaced_bytes, times + 1
            if held_bytes > room or times > _MOST_OUTDATED:
                found.append(plan)
        return found

    def used_(self, plan: Plan) -> None:
        """A replay of this plan has been made."""
        if self._plans[0] is not plan:
            self._plans = (plan, *(p for p in self._plans if p is not plan))
        self.last = plan
        plan.used_at = self._calls = self._calls + 1
        self._misses = 0

    def passed_(self) -> None:
        """A step ran plainly."""
        self._calls += 1

    def drop_(self, plan: Plan) -> None:
        plan.executor.uncapture_()
        self._plans = tuple(p for p in self._plans if p is not plan)
        if plan.family.pattern is plan:  # another one has the same choices
            plan.family.pattern = next((p for p in self._plans if p.family is plan.family and p.kin is not None), None)

    def missed_(self, op: Op, key: Hashable) -> None:
        """No plan had the value that `op` read into Python, or its shape. Raises where that keeps happening: each step
        is right, but none is ever compiled."""
        self._misses += 1
        if op.has_data_in_shape and self._misses >= min(self.most, _MOST_SHAPES):
            for plan in self.under(key):  # who runs such steps plainly is not to try them each time
                self.drop_(plan)
            raise varying(op, self._misses)
        if self._misses >= min(self.most, _MOST_MISSES):
            where = op.site.describe() if op.site else "an unknown line"
            raise CaptureError(
                f"the step reads a tensor into Python at {where}, and the value was a new one {self._misses} "
                f"times in a row. takeback holds such a value with a guard and records anew when it changes, which "
                f"never ends here. If it is only looked at, return the tensor as aux and call .item() outside of the "
                f"step; else keep it in a tensor (torch.where instead of if), or pass it as an argument."
            )
