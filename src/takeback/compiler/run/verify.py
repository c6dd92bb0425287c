"""Runs eager beside a compiled step, as a `Proof` asks for it, and compares: a recording when it is made, a replay when
that is due. What differs raises, and the state after it is said in the error.

Gradients are compared inside the step, which is taken back if they differ; whole steps are compared after both were
run, and eager's result is what stays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from takeback.compiler.capture.aside import Aside
from takeback.compiler.capture.record_step import Capture
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.ownership.writes import generators_of, written_before_update
from takeback.compiler.program import Program
from takeback.compiler.run.eager import Batch, Recipe, clip_
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.nondeterminism import nondeterminism
from takeback.compiler.run.proof import (
    GRADIENT,
    Bits,
    Kept,
    Measure,
    Norms,
    Proof,
    differing,
    in_words,
    keep,
    same,
)
from takeback.compiler.run.transaction import Transaction
from takeback.errors import CaptureError, VerifyError

_SEEN = (
    "Either the step reads something that takeback cannot see (a clock, a file, Python state out of its sight), or "
    "this is a bug of takeback's: please report it with str(step.report())."
)
_KEPT = "The model and optimizer hold eager's result. "
_FOUND_INF = "the scaler's found_inf"

Inspect = Callable[[], None]
Run = Callable[[Inspect | None], Any]  #: a replay; what it is given is called between its backward and its update


class ForwardDiffers(Exception):
    """A replay's loss is not that of eager's forward without gradients: the plan is stale, or torch takes another way
    where no gradients are wanted."""


class _Reached(Exception):
    """A replay has computed everything before its update."""


class _Compared(Exception):
    """Takes back a replay that has shown what it was to show."""


class ForwardFails(Exception):
    """There is no eager forward without gradients to compare with; says why."""


@dataclass(frozen=True)
class BesideEager:
    """One replay beside eager, from the same state and batch."""

    proof: Proof
    recipe: Recipe
    batch: Batch
    scaling: Scaling | None
    executor: Executor
    leaves: Sequence[torch.Tensor]
    names: tuple[str, ...]  #: of the parameters
    aside: Aside = field(default_factory=Aside)

    def of_gradients(self, run: Run) -> Any:
        """The result of the replay, whose loss, gradients and statistics are eager's; else the step is taken back."""
        self.goes_this_way(run)
        expected = self._eager_gradients()
        return run(functools.partial(self._compare, expected))

    def goes_this_way(self, run: Run) -> None:
        """Replays as far as the update, and takes that back. Raises `HeldValueChanged` where the step decides by a
        value that is another one now: eager would go another way, and write what the plan does not know of."""
        program = self.executor.program
        if not any(op.may_send_back for op in program.ops):
            return
        with Transaction() as tried:
            tried.at_end(saved(self.written(), program))
            tried.compute()
            with contextlib.suppress(_Reached):
                run(_stop)

    def taken_back(self) -> None:
        """Compares as `of_gradients` does, by a replay that is taken back whatever it gave."""
        expected = self._eager_gradients()

        def compare() -> None:
            self._compare(expected)
            raise _Compared

        with contextlib.suppress(_Compared):
            self.executor.run(self.leaves, (), inspect=compare)

    def _eager_gradients(self) -> dict[str, Kept]:
        """Of eager's forward and backward for this step, which are then taken back: also what only eager writes, where
        the plan is stale."""
        with Transaction() as aside:
            aside.at_end(self.recipe.drop_grads_)
            aside.at_end(saved([*self.written(), *self.recipe.model.buffers()], self.executor.program))
            aside.compute()
            with torch.enable_grad(), self.aside.around(self.batch):
                loss = _gradients(self.recipe, self.batch, self.scaling)
            grads = {i: p.grad for i, p in enumerate(self.recipe.parameters) if p.grad is not None}
            found_inf = self.scaling.found_inf if self.scaling is not None else None
            return keep(self.proof.measure, self.named(loss, grads, found_inf))

    def _compare(self, expected: Mapping[str, Kept]) -> None:
        """Of the step that has just been computed. A gradient that nobody reads any more is not looked for."""
        executor, program = self.executor, self.executor.program
        here = {i: r for i, r in program.grads.items() if executor.still_has(r)}
        grads = {i: executor.tensor(r, self.leaves) for i, r in here.items()}
        found_inf = executor.found_inf(self.leaves) if program.found_inf is not None else None
        found = self.named(executor.tensor(program.loss, self.leaves), grads, found_inf)
        gone = {_gradient(self.names[i]) for i in program.grads if i not in here}
        expected = {name: kept for name, kept in expected.items() if name not in gone}
        different = differing(self.proof.measure, expected, found)
        if different:
            raise VerifyError(
                f"a new plan's first step was compared with eager, and {different[0]} "
                f"{in_words(self.proof.measure)}. The step was taken back: model and optimizer are as before it. "
                f"{advice(program, self.proof.measure)}"
            )

    def named(
        self, loss: torch.Tensor, grads: Mapping[int, torch.Tensor], found_inf: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """What is compared: these, and what the forward and backward write of the user's."""
        found = {"loss": loss} | {_gradient(self.names[i]): grad for i, grad in grads.items()}
        if found_inf is not None:
            found[_FOUND_INF] = found_inf
        program = self.executor.program
        for b in written_before_update(program):
            if b in program.externals:
                name = program.buffers[b].name or "a tensor that the step writes"
                found[f"{name} (%{b})" if name in found else name] = program.externals[b]
        return found

    def of_forward(self, run: Run, seen: Callable[[int], None] | None = None) -> Any:
        """The result of the replay, whose loss is that of eager's forward, which is run without gradients. Raises
        `ForwardDiffers` where it is not, with the step taken back, and `ForwardFails` where it cannot be run so. `seen`
        is told the most bytes that eager's forward took, where the allocator counts them."""
        self.goes_this_way(run)
        program = self.executor.program
        self.executor.make_room_()
        with Transaction() as aside:
            aside.at_end(saved(self.written(), program))
            aside.compute()
            try:
                with torch.no_grad(), self.aside.around(self.batch):
                    end = self.executor.count_aside()
                    expected = keep(self.proof.measure, {"loss": self.recipe.forward(self.batch)})
                    if seen is not None:
                        seen(end())
            except Exception as error:
                raise ForwardFails(f"its forward cannot be run without gradients ({type(error).__name__})") from error
        self.executor.make_room_()
        states = [(g, g.get_state()) for g in generators_of(program)]

        def compare() -> None:
            if differing(self.proof.measure, expected, {"loss": self.executor.tensor(program.loss, self.leaves)}):
                raise ForwardDiffers

        try:
            return run(compare)
        except ForwardDiffers:
            for generator, state in states:
                generator.set_state(state)
            raise

    def of_whole_steps(self, run: Run) -> Any:
        """The result of the replay, after eager gave the same from the same state. Eager's state is what stays."""
        recipe, program = self.recipe, self.executor.program
        with Transaction() as both:
            put_back = saved([*(t for _, t in self._state()), *self.written()], program)
            self._takes_back(both, put_back)
            both.compute()  # a Ctrl-C that waits for the replay's own commit strikes after it, and takes that back too
            out = run(None)
            both.commit()
            compiled = {name: t.detach().clone() for name, t in self._state()}
            grads = {p: p.grad for p in recipe.parameters}
            put_back()
            both.done()
            del put_back  # eager's step needs the memory
            self._takes_back(both, saved(self.written(), program))
            both.compute()
            with torch.enable_grad(), self.aside.around(self.batch):
                expected = recipe.backward_(self.batch, recipe.scaler)
                both.commit()
                recipe.update_()
            for p, grad in grads.items():
                p.grad = grad
        self._compare_steps(out[0] if isinstance(out, tuple) else out, expected, compiled)
        return out

    def _takes_back(self, step: Transaction, put_back: Callable[[], None]) -> None:
        step.on_abort(put_back)
        step.on_abort(self.recipe.drop_grads_)
        if self.scaling is not None:
            step.on_abort(self.scaling.forget_)

    def _compare_steps(self, loss: torch.Tensor, expected: torch.Tensor, compiled: Mapping[str, torch.Tensor]) -> None:
        measure = self.proof.measure
        cause = _KEPT + advice(self.executor.program, measure)
        if isinstance(measure, Bits):
            measure = Bits(one_nan=True)  # training went on with them on both sides
        if isinstance(measure, Norms):
            measure = measure.among(t for _, t in self._state())
        if not same(measure, expected, loss):
            raise VerifyError(f"the compiled step's loss is {loss.item()!r}, eager's {expected.item()!r}. {cause}")
        for name, now in self._state():
            if not same(measure, now, compiled[name]):
                worst = (compiled[name].double() - now.detach().double()).abs().max().item()
                raise VerifyError(f"after the step {name} differs from eager's by up to {worst:g}. {cause}")

    def written(self) -> list[torch.Tensor]:
        """What a forward and backward write of the user's: statistics, the batch."""
        program = self.executor.program
        live = [program.externals[b] for b in written_before_update(program) if b in program.externals]
        return live + [self.leaves[i].detach() for i in self.executor.written_leaves]

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that a whole step writes, by name."""
        model = self.recipe.model
        names = {id(p): n for n, p in model.named_parameters()}
        yield from model.named_parameters()
        yield from model.named_buffers()
        for p, table in self.recipe.optimizers.states:
            for key, value in table.items():
                if isinstance(value, torch.Tensor):
                    yield f"{names.get(id(p), 'parameter')}.{key}", value
        if self.scaling is not None:
            yield from self.scaling.tensors


def prove_recording(
    recipe: Recipe,
    batch: Batch,
    got: Capture,
    measure: Measure,
    *,
    scaling: Scaling | None = None,
    unclipped: bool = False,
) -> None:
    """Runs the recorded forward and backward again without the recorder, and compares. Eager's results are what stays;
    `unclipped`: its gradients as they were before they were clipped, for whoever has to average them first. If it
    raises, what the step has written is for the caller to take back.

    torch's own formulas ask whether somebody is looking (at::isTensorSubclassLike), and some then take another way:
    eager_forms.py has those that are known, looked_on.py refuses more, and this finds others, but where chance hides
    them.
    """
    names = [name for name, _ in recipe.model.named_parameters()]
    raw: dict[torch.nn.Parameter, torch.Tensor] = {}

    def results(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        grads = {_gradient(names[i]): p.grad for i, p in enumerate(recipe.parameters) if p.grad is not None}
        return {"loss": loss} | grads | {f"statistic {i}": t for i, t in enumerate(got.statistics)}

    def again() -> dict[str, torch.Tensor]:
        got.rewind_()
        with torch.enable_grad(), got.aside.around(batch):
            loss = _gradients(recipe, batch, scaling)
        if recipe.clip_norm is not None and scaling is None:
            if unclipped:
                raw.update({p: p.grad.clone() for p in recipe.parameters if p.grad is not None})
            clip_(recipe.parameters, recipe.clip_norm)
        torch.clear_autocast_cache()
        return results(loss)

    recorded = keep(measure, results(got.loss))
    plain = again()
    different = differing(measure, recorded, plain)
    if different and not isinstance(measure, Bits):
        raise CaptureError(
            f"the step gives other results each time it runs, by more than rounding explains: "
            f"{', '.join(different[:3])}. Nothing has been changed. A step whose results depend on more than its "
            f"inputs (Python state, a clock, random numbers that are not torch's) cannot be replayed: pass it what it "
            f"reads, as arguments."
        )
    if different:
        first = keep(measure, plain)
        seen = got.program.device_type == "cuda" and bool(differing(measure, first, again()))
        raise CaptureError(
            f"the step gives other bits each time it runs, or when it is recorded: {', '.join(different[:3])}. Nothing "
            f"has been changed. {nondeterminism(got.program, seen=seen)}A step whose results depend on more than its "
            f"inputs (Python state, a clock), or that computes otherwise while a dispatch mode looks on, cannot be "
            f"replayed."
        )
    for p, grad in raw.items():
        p.grad = grad


def _gradients(recipe: Recipe, batch: Batch, scaling: Scaling | None) -> torch.Tensor:
    """Eager's forward and backward, as far as a plan computes before its update: with a scaler, gradients are unscaled
    and clipped."""
    if scaling is None:
        return recipe.backward_(batch)
    scaling.begin_()
    loss = recipe.backward_(batch, scaling)
    if recipe.updates:
        scaling.unscale_()
        clip_(recipe.parameters, recipe.clip_norm)
    return loss


def _stop() -> None:
    raise _Reached


def _gradient(parameter: str) -> str:
    return GRADIENT + parameter


def saved(live: Sequence[torch.Tensor], program: Program) -> Callable[[], None]:
    """Saves tensors, and the generators that the step draws from. Gives what puts them back, whenever called."""
    saved = [t.detach().clone() for t in live]
    states = [(g, g.get_state()) for g in generators_of(program)]

    def put_back() -> None:
        for t, before in zip(live, saved, strict=True):
            t.detach().copy_(before)
        for generator, state in states:
            generator.set_state(state)

    return put_back


def advice(program: Program, measure: Measure) -> str:
    """What a difference may come from. Where bits do not count, the order of sums is no explanation."""
    return (nondeterminism(program) if isinstance(measure, Bits) else "") + _SEEN
