"""Makes plans: a step of the user's is recorded, finished, planned and given to an executor.

In: the user's objects and options. Out: a `Plan` for one key. Which plan is used when is for step.py to say.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import CodeType

import torch

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.accumulation import finish_microbatch
from takeback.compiler.capture.assumptions import Varying
from takeback.compiler.capture.drawers import Drawers
from takeback.compiler.capture.finish import Finished, check_early, finish_program, in_one_kernel, why_own_steps
from takeback.compiler.capture.given import parameters_of
from takeback.compiler.capture.numbers import bound, numbers_of
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.record_step import Capture, capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.subject import Subject
from takeback.compiler.capture.watch import Watch
from takeback.compiler.cluster import of_any_kernel
from takeback.compiler.layout import Layout, lay_out, transient_bytes
from takeback.compiler.ownership.eager_peak import eager_peak
from takeback.compiler.passes import Home
from takeback.compiler.passes.recompute import cut_short
from takeback.compiler.passes.reduce import Sharing
from takeback.compiler.passes.siblings import knowing
from takeback.compiler.planning import Planned, plan_within, settings_for, sums_up
from takeback.compiler.program import Program
from takeback.compiler.run import allocator, plan_file
from takeback.compiler.run.allocator_executor import AllocatorExecutor
from takeback.compiler.run.arena import SharedArena
from takeback.compiler.run.arena_executor import ArenaExecutor
from takeback.compiler.run.calibrate import cost_of
from takeback.compiler.run.collector import collector_paused
from takeback.compiler.run.cuda_graph import GraphSettings
from takeback.compiler.run.eager import Batch, Recipe
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.group import Group
from takeback.compiler.run.kernel_families import KEPT_S
from takeback.compiler.run.kernel_workers import warm_up_
from takeback.compiler.run.kernels import Kernels
from takeback.compiler.run.pending import Microbatch
from takeback.compiler.run.plans import Family, Plan
from takeback.compiler.run.proof import NEAR, Bits, Measure
from takeback.compiler.run.proof_file import ProvedRecordings
from takeback.compiler.run.recorded_step import RecordedStep
from takeback.compiler.run.recording import recorder
from takeback.compiler.run.segments import let_segments_grow_
from takeback.compiler.run.spent import Spent, watcher_for
from takeback.compiler.run.transaction import Transaction
from takeback.options import Options, cache_dir, compiler, keeps_plans, open_cache
from takeback.progress import Doing, Work

_NOTHING = Varying()
_SEARCH_S_PER_OP = 1e-3  #: about, where it is not known what a search takes: it was made by an earlier process
_WORSE = 0.05  #: by this part a choice may save less for other shapes before a new one is searched for
_ADDS = "this plan is of a microbatch: each gradient is added to what waits in .grad as soon as it is complete"


_ONE_KERNEL = (
    "the update is torch's fused kernel, one pass over parameters and state, also where the optimizer is not told "
    "fused=True: mode='fast' need not round where eager's own path does"
)

USES_BEFORE_KERNELS = 50  #: of a plan for further shapes, for kernels that serve these alone
STATELESS = "it has no state yet, and makes it in its first step; the next plan has the update"

_EARLIER = (
    "choices from the cache: what is rebuilt and where everything lies was decided by an earlier process for the same "
    "step, and checked again"
)


class PlanMaker:
    """For one compiled step, on the device of its model."""

    def __init__(self, recipe: Recipe, options: Options, scaling: Scaling | None, group: Group | None) -> None:
        self.recipe, self.options, self.scaling, self.group = recipe, options, scaling, group
        self.device = subjects.device_of(recipe.model)
        on_cpu = self.device.type == "cpu"
        self.work = Work("")  #: of the call that is being made: it is told what is being done
        began = time.perf_counter()
        self.native = allocator.load(cache_dir(), compiler()) if on_cpu else None
        self.loading_s = time.perf_counter() - began  #: compiling it too, where it is not in the cache
        self.home = Home.ARENA if on_cpu else Home.ALLOCATOR
        self.arena = SharedArena(self.native)
        self.segments = let_segments_grow_(self.device) if self.device.type == "cuda" else None
        self.kernels = Kernels(self.device)
        self.fast = options.is_fast(self.device.type)
        if self.fast:
            warm_up_(self.device)
        self.graphs = GraphSettings(options.graphs, NEAR if self.fast else Bits())
        self.kernels_s = 0.0  #: what kernels for further shapes took, in all
        self.affords: Callable[[float], bool] = lambda seconds: True  #: whether a search of so many seconds is worth it
        self.affords_kernels: Callable[[float], bool] = lambda seconds: True  #: the same of kernels
        self.drawers = Drawers()
        self.given: dict[str, object] = {}  #: what the call has besides tensors
        self.arguments = parameters_of(recipe.loss_fn)
        self.microbatch_recipe = replace(recipe, clip_norm=None, updates=False)

    def start(self, what: str) -> Work:
        """Something that may be long; of a group's ranks one says so on its terminal."""
        self.work = Work(what, on_terminal=self.group is None or self.group.reducer.rank == 0)
        return self.work

    @property
    def optimizers(self) -> Optimizers:
        return self.recipe.optimizers

    def check_early(self) -> None:
        """Raises where `update="early"` is asked of an optimizer whose update is not part of the plan."""
        with Transaction():  # a twin of the optimizer takes a step under a recorder: Ctrl-C waits for that
            check_early(self.options, self.optimizers)

    def subject(self, leaves: Sequence[torch.Tensor], *, updates: bool = True) -> Subject:
        """What is to be recorded, as the user's objects are now."""
        return subjects.build(
            self.recipe.model,
            self.recipe.loss_fn,
            self.optimizers,
            leaves,
            accumulate=self.options.accumulate,
            clip_norm=self.options.clip_norm,
            scaling=self.scaling,
            updates=updates,
            drawers=self.drawers,
            exact=not self.fast,
            given=self.given,
            arguments=self.arguments,
        )

    def recorded(
        self, subject: Subject, measure: Measure, varying: Varying = _NOTHING, kin: Sequence[Plan] = ()
    ) -> RecordedStep:
        """A recording that is about to be made. What is `varying` is traced. `kin` are plans for other shapes."""
        return RecordedStep(
            subject,
            self.recipe if subject.updates else self.microbatch_recipe,
            scaling=self.scaling,
            group=self.group,
            measure=measure,
            recording=recorder(self.native, self.device),
            leave=self.native.off if self.native is not None else None,
            in_one_piece=self.home is Home.ARENA,
            revocable=self.options.has_target,  # the plan may turn out impossible when the step has been made
            proofs=ProvedRecordings(open_cache() if keeps_plans() else None),
            varying=varying,
            kin=kin,
            work=self.work,
        )

    def program_now(self, batch: Batch, leaves: Sequence[torch.Tensor], micro: Microbatch | None = None) -> Program:
        """The step as it is now, recorded and taken back."""
        with Transaction() as aside:
            aside.at_end(self.recipe.drop_grads_ if micro is None else micro.put_back_)
            aside.compute()
            got = capture(self.subject(leaves, updates=micro is None), *batch, on_abort=aside.on_abort)
            got.rewind_()
        return got.program

    @collector_paused()
    def plan(
        self,
        key: Hashable,
        outline: Hashable,
        subject: Subject,
        got: Capture,
        leaves: Sequence[torch.Tensor],
        sibling: Plan | None,
        micro: Microbatch | None = None,
        *,
        fitted: Callable[[Finished, Planned], Planned] = lambda finished, planned: planned,
        stateless: bool = False,
    ) -> Plan:
        """Of a recording; `micro`: of a call that adds its gradients to those that wait. The choices of a `sibling` are
        taken over, if they are as good here. `fitted` may put another layout in place of the one that `memory=` asks
        for. `stateless`: the optimizers' own step() makes their state first."""
        family = sibling.family if sibling is not None else Family()
        first = family.pattern is None
        self.work.begin(Doing.RECORDING)  # of the update
        finished = (
            self.finished(subject, got, (STATELESS,) * len(self.optimizers.members))
            if stateless
            else self._finished(subject, got, leaves, micro, family.pattern)
        )
        if family.pattern is not None:
            finished = replace(finished, program=knowing(finished.program, family.pattern.executor.program))
        sharing = self.group.sharing if self.group is not None and micro is None else None
        planned, searched = self._laid_out_like(finished, family.pattern, sharing)
        planned = fitted(finished, planned)
        numbers = numbers_of(planned.layout.draft.program)
        self.work.begin(Doing.WRITING)
        executor = self.executor(planned.layout, family.codes)
        took_over = False
        if self.fast and first:
            self.work.begin(Doing.KERNELS)
            self.kernels.compile_(executor.program, self.work.tell)
        elif self.fast:  # kernels for other shapes are compiled when that is worth it
            took_over = self.kernels.take_over_(executor.program)
        plan = Plan(
            key=key,
            outline=outline,
            batch_elements=sum(leaf.numel() for leaf in leaves),
            recorded=got.program,
            kin=got.kin if not got.assumptions.leaves_out else None,  # what it does not watch, a sibling's must
            family=family,
            is_sibling=not searched,
            rehearsals=0 if searched or took_over else 1,
            awaits_kernels=self.fast and bool(self.kernels.waiting(executor.program)),
            kernels_seen=self.kernels.changes,
            watch=Watch(subject, got.assumptions, leaves),
            finished=finished,
            executor=executor,
            aux_form=got.aux_form,
            has_aux=got.has_aux,
            names=_names(subject),
            planned=planned,
            numbers=numbers,
            aside=got.aside,
            notes=(
                *got.notes,
                *((_ADDS,) if micro is not None else ()),
                *((_ONE_KERNEL,) if finished.update is not None and finished.update.in_one_kernel else ()),
                *((_EARLIER,) if planned.from_earlier else ()),
                *(
                    (f"the allocator's segments do not grow, so it may reserve much more: {self.segments}",)
                    if self.segments is not None
                    else ()
                ),
            ),
        )
        self.work.begin(None)
        plan.spent = Spent.of(self.work.seconds)
        if searched and plan.kin is not None:
            family.pattern = plan
        return plan

    def _laid_out_like(self, finished: Finished, pattern: Plan | None, sharing: Sharing | None) -> tuple[Planned, bool]:
        """With what was chosen for a plan of other shapes, or else by a search of its own, and whether it was that."""
        if pattern is not None:
            planned = self.lay_out(finished, self.options, sharing, pattern.executor.layout)
            good = self.options.memory == "keep" or _as_good(planned.layout, finished.program, pattern)
            if good or not self.affords(max(pattern.spent.choosing_s, len(finished.program.ops) * _SEARCH_S_PER_OP)):
                return planned, False
        return self.lay_out(finished, self.options, sharing), True

    def lay_out(
        self, finished: Finished, options: Options, sharing: Sharing | None = None, sibling: Layout | None = None
    ) -> Planned:
        """A finished program, planned. `sharing`: its gradients are averaged over a group. `sibling`: of other shapes,
        whose choices are taken over."""
        self.work.begin(Doing.MEASURING)
        seconds = cost_of(finished.program)
        settings = settings_for(
            finished.program,
            options,
            seconds,
            home=self.home,
            sharing=sharing,
            progress=self.work.tell,
            notes=seconds.notes,
        )
        if finished.adds is not None:  # each gradient is added as soon as it is complete
            settings = replace(settings, early=True)
        kept_file = sibling is None and sharing is None and finished.adds is None and options is self.options
        key = plan_file.key_of(finished, options, seconds, self.home) if kept_file and keeps_plans() else None
        earlier = plan_file.read(open_cache(), key) if key is not None else None
        watch = watcher_for(self.work)
        planned = plan_within(
            finished.program, finished.kept, options, settings, watch=watch, sibling=sibling, earlier=earlier
        )
        return replace(planned, file_key=key)

    def compile_kernels_(self, plan: Plan) -> None:
        """Of a plan for further shapes, which runs on eager's so far, where that is worth its time: kernels for all
        lengths as soon as steps have earned them, and after many uses all that there can be. What they ask for inside
        is found out anew."""
        began = time.perf_counter()
        program, often = plan.executor.program, plan.replays > USES_BEFORE_KERNELS
        clusters = [kernel.cluster for kernel in self.kernels.waiting(program)]
        families = []
        if often or self.affords_kernels(len(clusters) * KEPT_S):  # the least that it may take
            families = self.kernels.families.uncompiled(clusters)
        if not (often or self.affords_kernels(self.kernels.families.seconds(families))):
            families = []
        if families or often:
            work = self.start(f"kernels for {plan.made_for}")
            with work.inside, work:
                work.begin(Doing.KERNELS)
                self.kernels.families.compile_(families, work.tell)
                took_over = self.kernels.take_over_(program)
                if often:
                    self.kernels.compile_(program, work.tell)
        else:
            took_over = self.kernels.take_over_(program)  # what other plans have compiled
        self.kernels_s += time.perf_counter() - began
        if took_over or often:
            plan.rehearsals = 0
        plan.awaits_kernels = bool(self.kernels.waiting(program))

    def heed_kernels_(self, plan: Plan) -> None:
        """Lays a plan out anew where a cluster of it has another kernel since: what the old one asked for, and when it
        gave that back, says nothing of the new one, whose values would be put onto one another."""
        seen, plan.kernels_seen = plan.kernels_seen, self.kernels.changes
        if seen == plan.kernels_seen or self.home is not Home.ARENA:
            return
        if any(kernel.changed_at > seen for kernel in self.kernels.in_program(plan.executor.program)):
            layout = plan.executor.layout
            draft = replace(layout.draft, program=of_any_kernel(layout.draft.program))
            plan.executor = self.executor(lay_out(draft, near=layout, like=layout.placed.placing), plan.family.codes)
            plan.rehearsals = 0

    def remember_(self, plan: Plan) -> None:
        """For another process, once replays have shown what ops ask for. What the clock had a part in is not kept."""
        planned, layout = plan.planned, plan.executor.layout
        if planned.file_key is None or (planned.from_earlier and layout is planned.layout):
            return
        if not cut_short(layout.draft.notes):
            plan_file.keep_(open_cache(), planned.file_key, planned.unrehearsed, layout)

    def _finished(
        self,
        subject: Subject,
        got: Capture,
        leaves: Sequence[torch.Tensor],
        micro: Microbatch | None,
        pattern: Plan | None,
    ) -> Finished:
        if micro is not None:
            return finish_microbatch(
                got.program, _names(subject), strides=micro.strides, copied=micro.copied, given=len(leaves)
            )
        return self.finished(subject, got, self._why_own_steps(pattern), one_by_one=self.options.update == "early")

    def finished(
        self, subject: Subject, got: Capture, own_steps: Sequence[str | None], *, one_by_one: bool = False
    ) -> Finished:
        """A recording with its update. `own_steps`: for each optimizer why its own step() is called, if it is."""
        return finish_program(
            got.program,
            self.optimizers,
            subject.parameters,
            subject.names,
            own_steps=own_steps,
            one_by_one=one_by_one,
            one_kernel=self.one_kernel,
            keep_grads=self.options.keep_grads,
            scaling=self.scaling,
        )

    @functools.cached_property
    def one_kernel(self) -> bool:
        """Whether updates are written in torch's kernels for them, whatever path eager takes: mode fast need not have
        eager's bits."""
        return self.fast and in_one_kernel(self.optimizers)

    def _why_own_steps(self, sibling: Plan | None) -> tuple[str | None, ...]:
        """What was found of the optimizers holds for a sibling: they are watched."""
        if sibling is None or sibling.finished.awaits_state:
            return why_own_steps(self.optimizers, self.scaling)
        known = {own.position: own.reason for own in sibling.finished.own_steps}
        return tuple(known.get(i) for i in range(len(self.optimizers.members)))

    def executor(self, layout: Layout, codes: dict[str, CodeType] | None = None) -> Executor:
        """Of a layout, on this step's device. `codes` are those of its siblings, by source."""
        sends = layout.program.flags is not None
        reducer = self.group.reducer if self.group is not None and sends else None
        if self.home is Home.ALLOCATOR:
            return AllocatorExecutor(
                layout, poison=self.options.poison, reducer=reducer, kernels=self.kernels, graphs=self.graphs
            )
        return ArenaExecutor(
            layout,
            self.arena,
            self.native,
            poison=self.options.poison,
            reducer=reducer,
            codes=codes,
            kernels=self.kernels,
        )


def _as_good(layout: Layout, recorded: Program, pattern: Plan) -> bool:
    """Whether a choice that was made for other shapes saves as large a part of eager's peak for these. For smaller ones
    it is enough to need no more than those: the largest batch decides how much memory the training takes."""
    here, there = transient_bytes(layout), transient_bytes(pattern.executor.layout)
    if here <= there and sums_up(recorded) <= sums_up(pattern.original):
        return True
    share = there / max(1, pattern.eager_bytes)
    return here <= eager_peak(recorded).transient_bytes * share * (1 + _WORSE)


def _names(subject: Subject) -> tuple[str, ...]:
    return tuple(subject.names[id(p)] for p in subject.parameters)


def reading_anew(got: Capture, older: Plan, varying: Varying) -> Capture | None:
    """The recording with these numbers read anew in each step, and whatever the values of the batch are; None where it
    does more than compute with the ones, or reads one of the others."""
    if got.trace is None:
        return None
    program = bound(got.program, got.trace, older.original, [place.then for place in varying.numbers])
    if program is None:
        return None
    got.assumptions.leave_out_(varying, got.trace.values)
    return replace(got, program=program)
