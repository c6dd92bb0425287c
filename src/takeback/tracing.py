"""A step as `compile_step` would record it, seen through fake tensors: model, optimizer and batch are replaced by fakes
of the same shapes, so nothing of the user's is touched or computed. Programs go out, ready to be planned: for the CPU,
or for a GPU, which need not be there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from takeback.compiler.capture import subject as subjects
from takeback.compiler.capture.batch import map_tensors, tensors_of
from takeback.compiler.capture.cuda_scratch import with_scratch
from takeback.compiler.capture.fakes import FakeWorld
from takeback.compiler.capture.finish import Finished, check_early, finish_program, in_one_kernel, why_own_steps
from takeback.compiler.capture.leaks import disarm_
from takeback.compiler.capture.no_gpu import as_if_on_gpu
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.record_step import capture
from takeback.compiler.explain.half import Autocast, HalfTraced
from takeback.compiler.explain.replan import Replan
from takeback.compiler.passes.draft import Home
from takeback.compiler.planning import Planned, plan_within, settings_for
from takeback.compiler.program import BufferId, Program
from takeback.compiler.run import allocator
from takeback.compiler.run.calibrate import OpCost, cost_of, rates_with
from takeback.compiler.run.gpu_table import Gpu
from takeback.compiler.run.probe import probe_scratch
from takeback.compiler.run.transaction import Transaction
from takeback.errors import OptionError
from takeback.options import Options, cache_dir, compiler


@dataclass(frozen=True)
class Traced:
    """What was seen."""

    finished: Finished
    native: allocator.Native | None

    @property
    def program(self) -> Program:
        return self.finished.program

    @property
    def kept(self) -> frozenset[BufferId]:
        return self.finished.kept


@dataclass(frozen=True)
class TracedStep:
    """What is to be traced."""

    model: torch.nn.Module
    loss_fn: Callable[..., Any]
    optimizer: Optimizer | Sequence[Optimizer]
    batch: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options
    gpu: Gpu | None = None  #: on which the step is predicted, if not on the CPU

    def traced(self, progress: Callable[[int, int], None] | None = None) -> Traced:
        """The program of the step, update and scratch included."""
        if self.gpu is not None:
            return self._traced_for_gpu()
        optimizers = subjects.check(self.model, self.loss_fn, self.optimizer)
        if subjects.device_of(self.model).type != "cpu":
            raise OptionError(
                f"the model is on {subjects.device_of(self.model)}, and the prediction would be for the CPU: say "
                f"device='cuda' and gpu=, or move the model"
            )
        native = allocator.load(cache_dir(), compiler())
        with Transaction() as tracing:  # for the modes and traps that Ctrl-C would leave behind
            tracing.at_end(disarm_)
            tracing.compute()
            finished = _finished(self.model, self.loss_fn, optimizers, self.batch, self.kwargs, self.options)
        if native is not None:
            finished = replace(finished, program=probe_scratch(finished.program, native, progress))
        return Traced(finished, native)

    def _traced_for_gpu(self) -> Traced:
        optimizers = subjects.check(self.model, self.loss_fn, self.optimizer, anywhere=True)
        stack = contextlib.ExitStack()
        with Transaction() as tracing:
            tracing.at_end(stack.close)  # while Ctrl-C waits
            tracing.at_end(disarm_)
            stack.enter_context(as_if_on_gpu())
            tracing.compute()
            cuda = torch.device("cuda", 0)
            finished = _finished(
                self.model, self.loss_fn, optimizers, self.batch, self.kwargs, self.options, device=cuda
            )
        return Traced(replace(finished, program=with_scratch(finished.program)), None)


def cost_on(program: Program, gpu: Gpu | None) -> OpCost:
    """What the ops of a program cost here, or on a GPU."""
    return cost_of(program) if gpu is None else OpCost(gpu.rates)


def planned(finished: Finished, options: Options, *, gpu: Gpu | None = None) -> Planned:
    """A traced step, planned as it would be here, or on a GPU."""
    seconds = cost_on(finished.program, gpu)
    home = Home.ARENA if gpu is None else Home.ALLOCATOR
    notes = seconds.notes if gpu is None else ()
    settings = settings_for(finished.program, options, seconds, home=home, notes=notes)
    return plan_within(finished.program, finished.kept, options, settings)


def half_of(step: TracedStep, replan: Replan, program: Program) -> HalfTraced:
    """The tip for products in bfloat16. `program`: the step's, as it is."""

    def traced() -> Finished:
        return replace(step, loss_fn=Autocast(step.loss_fn, program.device_type)).traced().finished

    return HalfTraced(program, lambda: rates_with(program, torch.bfloat16), replan, traced)


def _finished(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizers: Optimizers,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    device: torch.device | None = None,
) -> Finished:
    """`device`: where the step is taken to be, if not where the model is."""
    twins_on = None if device is None else "cpu"
    check_early(options, optimizers, twins_on=twins_on)
    own_steps = why_own_steps(optimizers, twins_on=twins_on)
    fast = options.is_fast((device or subjects.device_of(model)).type)
    one_kernel = fast and in_one_kernel(optimizers, twins_on=twins_on)
    with FakeWorld(unnoticed=device is not None, device=device) as world:
        fake_model, fake_optimizers, fake_loss_fn = world.copy(model, optimizers, loss_fn)
        fake_batch, fake_kwargs = map_tensors((batch, kwargs), world.fake)
        subject = subjects.build(
            fake_model,
            fake_loss_fn,
            fake_optimizers,
            tensors_of((fake_batch, fake_kwargs)),
            accumulate=options.accumulate,
            clip_norm=options.clip_norm,
            exact=False,  # which way eager goes depends on values, and there are none
        )
        got = capture(subject, fake_batch, fake_kwargs, real=False)
        for member, reason in zip(fake_optimizers.members, own_steps, strict=True):
            if reason is None:
                world.fill_states(member, subject.parameters)
        return finish_program(
            got.program,
            fake_optimizers,
            subject.parameters,
            subject.names,
            own_steps=own_steps,
            one_by_one=options.update == "early",
            one_kernel=one_kernel,
            keep_grads=options.keep_grads,
        )
