"""Uses plans: a replay, compared with eager where that is due, and rehearsed at first.

In: a plan whose assumptions hold, and a batch. Out: what the step gives. A plan that turns out to be stale, or that can
be made better now, is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from takeback.compiler.capture.batch import tensors_of
from takeback.compiler.layout import compute_alike
from takeback.compiler.program import Program
from takeback.compiler.run.checked_replay import CheckedReplay
from takeback.compiler.run.collector import collector_paused
from takeback.compiler.run.eager import Batch
from takeback.compiler.run.fitting import short_of
from takeback.compiler.run.microbatch import MicrobatchBesideEager, replay_microbatch
from takeback.compiler.run.pending import Microbatch
from takeback.compiler.run.plan_maker import USES_BEFORE_KERNELS, PlanMaker
from takeback.compiler.run.plans import Plan, PlanCache
from takeback.compiler.run.proof import Proof
from takeback.compiler.run.replayed_step import ReplayedStep, Results
from takeback.compiler.run.room import is_out_of_memory, let_go_, what_it_said
from takeback.compiler.run.verify import BesideEager
from takeback.errors import StalePlanError
from takeback.progress import Doing


class Replayer:
    """Of one compiled step."""

    def __init__(self, maker: PlanMaker, plans: PlanCache, proof: Proof) -> None:
        self.count = 0  #: replays so far
        self._maker, self._plans, self._proof = maker, plans, proof

    def use(self, plan: Plan, batch: Batch, leaves: Sequence[torch.Tensor], micro: Microbatch | None) -> Results:
        """A replay, compared with eager where that is due. `micro`: it adds its gradients to those that wait. Raises
        `NoRoomError` where it is refused memory."""
        try:
            return self._use(plan, batch, leaves, micro)
        except (RuntimeError, MemoryError) as error:
            if micro is not None or not is_out_of_memory(error):
                raise
            refused = what_it_said(error)
        if not plan.executor.committing and self._maker.graphs.give_up_():  # their pools may be what is short
            let_go_(self._maker.device)
            return self.use(plan, batch, leaves, micro)
        # Out of that block: the error's traceback holds what the step had in memory.
        raise short_of(self._maker, plan.finished, plan.planned, refused, begun=plan.executor.committing)

    def _use(self, plan: Plan, batch: Batch, leaves: Sequence[torch.Tensor], micro: Microbatch | None) -> Results:
        self.count += 1
        plan.replays += 1
        plan.family.replays += 1
        if plan.awaits_kernels and (plan.replays & (plan.replays - 1) == 0 or plan.replays == USES_BEFORE_KERNELS + 1):
            self._maker.compile_kernels_(plan)
        self._maker.heed_kernels_(plan)
        due = self._proof.is_due(proved=plan.is_proved, replays=self.count)
        if not due and (plan.unsampled is not None or not self._proof.samples(plan.family.replays)):
            results = self.replay(plan, leaves, micro=micro)
            if plan.executor.kernels.compared:  # what that took is no part of a steady step
                plan.executor.settle_()
            return results
        gave: list[Results] = []
        plan.executor.uncapture_()

        def run(inspect: Callable[[], None] | None = None) -> object:
            gave.append(self.replay(plan, leaves, inspect, micro))
            return gave[-1].returned

        checked = self._checked(plan, batch, leaves, micro, run)
        if due:
            # What is compared is whether the plan computes what eager does, with eager's kernels; each generated kernel
            # is compared by itself when it is first used (run/kernels.py).
            executor, counters, again = plan.executor, plan.executor.counters, plan.is_proved
            executor.kernels.plain = True
            try:
                self._proved(plan, checked)
            finally:
                executor.kernels.plain = False
                if again:
                    for kernel in executor.kernels.in_program(executor.program):
                        kernel.prove_again_()
                if self._maker.fast:  # what eager's kernels asked for is not what the plan's do
                    executor.counters = counters
        else:
            try:
                checked.beside_a_forward()
            except StalePlanError:
                self._plans.drop_(plan)
                raise
        plan.executor.settle_()
        return gave[-1]

    def _proved(self, plan: Plan, checked: CheckedReplay) -> None:
        new = not plan.is_proved
        work = self._maker.start(f"first replays of the plan for {plan.made_for}" if new else "a replay")
        with work.inside, work:
            work.begin(Doing.PROVING)
            checked.beside_a_step()
        plan.spent = plan.spent.plus(work.seconds) if new else plan.spent
        plan.family.proved |= plan.proved

    def _checked(
        self,
        plan: Plan,
        batch: Batch,
        leaves: Sequence[torch.Tensor],
        micro: Microbatch | None,
        run: Callable[[Callable[[], None] | None], object],
    ) -> CheckedReplay:
        maker = self._maker
        beside_eager = BesideEager if micro is None else functools.partial(MicrobatchBesideEager, micro=micro)
        beside = beside_eager(
            self._proof.of(plan.original),
            recipe=maker.recipe if micro is None else maker.microbatch_recipe,
            batch=batch,
            scaling=maker.scaling,
            executor=plan.executor,
            leaves=leaves,
            names=plan.names,
            aside=plan.aside,
        )

        def recorded() -> Program:
            """On the excerpt, where the whole batch does not fit."""
            if plan.foreseen is None:
                return maker.program_now(batch, leaves, micro)
            part: Batch = plan.foreseen.excerpt.of(batch)
            return maker.program_now(part, tensors_of(part), micro)

        return CheckedReplay(
            plan,
            beside,
            run,
            updates_early=maker.options.update == "early",
            in_group=maker.group is not None,
            give_back_=maker.arena.give_back_,
            record=recorded,
        )

    def replay(
        self,
        plan: Plan,
        leaves: Sequence[torch.Tensor],
        inspect: Callable[[], None] | None = None,
        micro: Microbatch | None = None,
    ) -> Results:
        """The replay itself. `inspect` is called before anything is updated."""
        maker = self._maker
        rehearse = plan.rehearsals < 2 and not plan.executor.plain
        for number in plan.numbers:
            number.read_()
        if micro is None:
            replayed = ReplayedStep(
                plan.executor,
                maker.optimizers,
                [maker.optimizers.members[own.position] for own in plan.finished.own_steps],
                plan.watch.parameters,
                leaves,
                update=plan.update,
                group=maker.group,
                scaling=maker.scaling,
                clip_norm=maker.options.clip_norm,
            )
            updated = replayed.run(inspect=inspect, log=rehearse)
            results = replayed.take(
                plan.aux_form, has_aux=plan.has_aux, keep_grads=maker.options.keep_grads, sharing=plan.sharing
            )
        else:
            results, updated = replay_microbatch(plan, leaves, micro, inspect=inspect, log=rehearse), True
        if rehearse and updated:
            self._rehearsed(plan)
        self._plans.used_(plan)
        if plan.has_state_now(maker.optimizers):
            self._plans.drop_(plan)  # the next step is recorded with its update in the plan
        return results

    def _rehearsed(self, plan: Plan) -> None:
        """The first replay shows what the chosen kernels really ask of the allocator; the plan is corrected by it."""
        plan.rehearsals += 1
        with collector_paused():
            layout = plan.executor.rehearsed()
            if layout is None:
                plan.rehearsals = 2
            else:
                # With generated kernels it is what is computed that was proved, and not where.
                same = self._maker.fast or compute_alike(layout, plan.executor.layout)
                plan.proved = plan.proved and same
                plan.executor = self._maker.executor(layout, plan.family.codes)
        if plan.rehearsals == 2:
            self._maker.remember_(plan)
