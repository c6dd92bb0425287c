"""A call that adds its gradients to those that wait for the update: recorded, replayed, compared with eager, or plain.

What each gives its caller is the loss, and aux; the gradients go to a `Microbatch`, and are written after its `begin_`.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from takeback.compiler.capture.batch import map_tensors
from takeback.compiler.capture.leaks import disarm_
from takeback.compiler.capture.record_step import Capture
from takeback.compiler.run.eager import Batch, Recipe
from takeback.compiler.run.pending import Microbatch
from takeback.compiler.run.plans import Plan
from takeback.compiler.run.proof import differing, in_words, keep
from takeback.compiler.run.recorded_step import RecordedStep, loss_of
from takeback.compiler.run.replayed_step import Results, given_results
from takeback.compiler.run.transaction import Transaction
from takeback.compiler.run.verify import BesideEager, Run, advice, saved
from takeback.errors import CaptureError, VerifyError


def record_microbatch(
    recorded: RecordedStep, batch: Batch, micro: Microbatch, then: Callable[[Capture, Plan | None], None]
) -> Results:
    """What eager gave. `then` makes the plan before anything is added: if it raises, the call is taken back."""
    with Transaction() as step:
        step.on_abort(micro.abandon_)
        step.at_end(disarm_)
        if recorded.leave is not None:
            step.at_end(recorded.leave)
        step.compute()
        got = recorded.capture(batch, step.on_abort)
        sibling = recorded.sibling_of(got)
        got = recorded.proved(got, sibling, batch, _accumulated_once(micro.parameters))
        step.commit()
        then(got, sibling)
        found = {i: p.grad for i, p in enumerate(micro.parameters) if p.grad is not None}
        grads = {i: g.resolve_conj().resolve_neg() for i, g in found.items()}  # autograd may leave a flag
        micro.begin_()
        for i, before in micro.before.items():
            if i in grads:
                with torch.no_grad():
                    before.add_(grads[i])
        micro.leave_({i: micro.before.get(i, grad) for i, grad in grads.items()})
    return Results(loss_of(got), got.aux, got.has_aux, None)


@contextlib.contextmanager
def _accumulated_once(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Raises where eager adds to a gradient more than once in one backward: onto what waits, in another order than a
    plan, which adds the sum."""
    times: collections.Counter[torch.Tensor] = collections.Counter()
    handles = [p.register_post_accumulate_grad_hook(lambda p: times.update([p])) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if any(count > 1 for count in times.values()):
        raise CaptureError(
            "one backward adds to the gradient of a parameter more than once (checkpoints with use_reentrant=True that "
            "use it twice, or a backward inside the backward), and onto gradients that wait for the update eager adds "
            "each part by itself, with other bits. Use use_reentrant=False, or a step without update=False."
        )


def replay_microbatch(
    plan: Plan,
    leaves: Sequence[torch.Tensor],
    micro: Microbatch,
    *,
    inspect: Callable[[], None] | None,
    log: bool,
) -> Results:
    """`inspect` is called when the loss is known and nothing has been added yet."""
    assert plan.finished.adds is not None
    homes = micro.homes(plan.finished.adds)
    given = [*leaves, *homes.values()]

    def begin_() -> None:
        if inspect is not None:
            inspect()
        micro.begin_()

    plan.executor.run(given, (), inspect=begin_, log=log)
    # A replay calls kernels below the level that counts writes.
    torch.autograd.graph.increment_version(list(homes.values()))
    results = given_results(plan.executor, given, plan.aux_form, has_aux=plan.has_aux, sharing=plan.sharing)
    plan.executor.release_()
    micro.leave_(homes)
    return results


def plain_microbatch(recipe: Recipe, batch: Batch, micro: Microbatch) -> Results:
    """As eager makes it, for a batch that cannot be planned. What its forward raises changes no gradient."""
    torch.clear_autocast_cache()
    with torch.enable_grad():
        made = recipe.add_backward_(batch, recipe.scaler, micro.begin_)
    return Results(made.loss, map_tensors(made.aux, lambda t: t.detach()), made.has_aux, None)


@dataclass(frozen=True)
class MicrobatchBesideEager(BesideEager):
    """One replay of a microbatch beside eager: the sums are compared. It needs a copy of the gradients that wait."""

    micro: Microbatch = field(kw_only=True)

    def of_gradients(self, run: Run) -> Any:
        """The result of the replay, whose loss, sums and statistics are eager's; else the call is taken back."""
        micro = self.micro
        self.goes_this_way(run)
        put_back_ = saved([*self.written(), *micro.before.values()], self.executor.program)
        with Transaction() as aside:
            aside.at_end(micro.put_back_)
            aside.at_end(put_back_)
            aside.compute()
            with torch.enable_grad(), self.aside.around(self.batch):
                if self.scaling is not None:
                    self.scaling.begin_()
                loss = self.recipe.add_backward_(self.batch, self.scaling).loss
            expected = keep(self.proof.measure, self._sums(loss))
        out = run(None)
        different = differing(self.proof.measure, expected, self._sums(out[0] if isinstance(out, tuple) else out))
        if different:
            put_back_()
            micro.put_back_()
            raise VerifyError(
                f"the microbatch of a plan was compared with eager, and {different[0]} "
                f"{in_words(self.proof.measure)}. The call was taken back: model, optimizer and gradients are as "
                f"before it. {advice(self.executor.program, self.proof.measure)}"
            )
        return out

    def of_whole_steps(self, run: Run) -> Any:
        """A microbatch has no update to compare."""
        return self.of_gradients(run)

    def _sums(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.named(loss, {i: p.grad for i, p in enumerate(self.micro.parameters) if p.grad is not None}, None)
