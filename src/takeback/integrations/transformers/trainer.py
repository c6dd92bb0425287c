"""A transformers Trainer whose training step is compiled. The loop stays the Trainer's: batches, callbacks, schedulers,
logs, evaluation and checkpoints; what this replaces is its forward and backward, and its update.

There are two orders. "In turn", Trainer's own: gradients wait in `.grad`, the Trainer clips them, callbacks may look at
them, and `optimizer.step()` makes the update. "At once": the last microbatch's call clips and updates too, and when the
Trainer comes to it, both are done. That takes less memory where an update has one microbatch, and is how gradients of
several processes are averaged, and those of a scaler unscaled.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from takeback.compiler.explain.report import Report
from takeback.errors import CaptureError, OptionError
from takeback.integrations.transformers.optimizer import StepOptimizer, innermost
from takeback.integrations.transformers.refusals import check_arguments, check_class, check_model, checked_options
from takeback.step import CompiledStep, compile_step

_METHODS = ("_clip_grad_norm", "_get_grad_norm", "_wrap_model", "_update_auto_batch_size")
if missing := [name for name in _METHODS if not hasattr(Trainer, name)]:
    raise ImportError(
        f"TakebackTrainer needs a transformers whose Trainer has {missing[0]}(); 5.22 is what it was checked on."
    )

#: What callbacks may do between the backward and the next step, with the gradients there.
_BETWEEN = ("on_pre_optimizer_step", "on_optimizer_step")


@dataclasses.dataclass(frozen=True)
class Manner:
    """What a compiled step is made for; when one of these changes, another is made."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    in_turn: bool
    clip_norm: float | None


class TakebackTrainer(Trainer):
    """`transformers.Trainer` with a compiled training step. All arguments are Trainer's, and `takeback`: options of
    `takeback.compile_step` (memory, update, verify_every, max_plans, unplanned, ...). What Trainer decides
    (accumulation, clipping, processes, the scaler) follows from TrainingArguments.

    `keep_grads=True` among the options leaves gradients in `.grad` until Trainer's `zero_grad()`, as in Trainer. Unless
    it is said, that is done with accumulation, and where a callback has `on_pre_optimizer_step` or `on_optimizer_step`;
    False: in no case."""

    def __init__(self, *args: Any, takeback: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._options = checked_options(takeback)
        self._manner: Manner | None = None
        self._step: CompiledStep | None = None
        self._parts = 1.0  #: microbatches of this update; a float, so that a plan reads it anew
        self._updated = False  #: the update of this step was made before the Trainer asked for it
        self._skipped = False  #: the scaler left out the last update
        check_class(type(self))
        for given in (*args, *kwargs.values()):  # before Trainer's own checks, which know no way out
            if isinstance(given, TrainingArguments):
                check_arguments(given, self._options)
            elif isinstance(given, torch.nn.Module):
                check_model(given)
        super().__init__(*args, **kwargs)
        check_arguments(self.args, self._options)
        check_model(self.model)

    # -- what the user asks -------------------------------------------------------------------------------------------

    @property
    def step(self) -> CompiledStep:
        """The compiled step. There is one from the first training step on."""
        if self._step is None:
            raise CaptureError("there is no compiled step yet: it is made by the first training step. Call train().")
        return self._step

    def takeback_report(self) -> Report:
        """What lives where in the plan used last."""
        return self.step.report()

    # -- what the Trainer calls ----------------------------------------------------------------------------------------

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one microbatch, compiled, and "at once" the update with the last one."""
        if self._updated:
            raise CaptureError(
                "training_step() was called again after the update of this step. A training_step of yours that calls "
                "it more than once needs TakebackTrainer(..., takeback={'keep_grads': True}): then gradients wait for "
                "the Trainer's optimizer.step()."
            )
        step = self._compiled(model)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._parts = float(self.current_gradient_accumulation_steps)
        batch = (self._prepare_inputs(inputs), num_items_in_batch)
        if self._in_turn or not self.accelerator.sync_gradients:
            return step(*batch, update=False)
        scaler = self.accelerator.scaler
        before = scaler.get_scale() if scaler is not None else 0.0
        if self.args.gradient_accumulation_steps == 1:
            loss = step(*batch)
        else:  # a whole step would be a plan more, for the one that is left over at the end of an epoch
            loss = step(*batch, update=False)
            step.update()
        self._updated = True
        # As Accelerate sees it: a step() whose kernels leave out the update was called.
        seen = not getattr(innermost(self.optimizer), "_step_supports_amp_scaling", False)
        self._skipped = seen and scaler is not None and scaler.get_scale() < before
        return loss

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's, whose step() is the compiled one's update."""
        super().create_optimizer(model)
        if not isinstance(self.optimizer, StepOptimizer):
            self.optimizer = StepOptimizer(innermost(self.optimizer), self._update)
        return self.optimizer

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        """Not into DistributedDataParallel: the step averages gradients."""
        model = super()._wrap_model(model, training, dataloader)
        if training and not getattr(model, "_is_accelerate_prepared", False):
            self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast alone
            model._is_accelerate_prepared = True
        return model

    def _update_auto_batch_size(self, batch_size: int) -> None:
        self._step = self._manner = None  # its plans are for a batch that did not fit
        self._updated = False
        super()._update_auto_batch_size(batch_size)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self._step.grad_norm if self._updated and self._step else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        return self._step.grad_norm if self._updated and self._step else super()._get_grad_norm(model, grad_norm)

    # -- the compiled step ---------------------------------------------------------------------------------------------

    def _loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """As Trainer computes it for one microbatch of several."""
        mine = copy.copy(inputs)  # compute_loss takes the labels out
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, mine, num_items_in_batch=num_items_in_batch)
        return loss if self._is_scaled(num_items_in_batch) else loss / self._parts

    def _is_scaled(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """Whether the loss is a part of the whole update's already."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return by_model or self.compute_loss_func is not None

    @property
    def _in_turn(self) -> bool:
        return self._manner is not None and self._manner.in_turn

    def _update(self) -> bool:
        """For the optimizer's step(). True if the scaler left the update out."""
        if self._step is not None and self._in_turn:
            self._step.update()
        elif not self._updated:
            raise CaptureError(
                "optimizer.step() was called, and no training step of TakebackTrainer came before it. A training_step "
                "of yours must call super().training_step(); to compute another loss, override compute_loss."
            )
        self._updated = False
        return self._skipped

    def _compiled(self, model: torch.nn.Module) -> CompiledStep:
        early = self._options.get("update", "end") == "early"
        in_turn = self._waits()
        norm = self.args.max_grad_norm if self.args.max_grad_norm > 0 else float("inf")
        manner = Manner(model, innermost(self.optimizer), in_turn, None if in_turn or early else norm)
        if self._step is None or manner != self._manner:
            check_model(model)
            options = {**self._options, "keep_grads": in_turn, "clip_norm": manner.clip_norm}
            group = torch.distributed.group.WORLD if self.args.world_size > 1 else None
            self._step = compile_step(
                model, self._loss, manner.optimizer, group=group, scaler=self.accelerator.scaler, **options
            )
            self._manner = manner
        return self._step

    def _waits(self) -> bool:
        """Whether the update is made in turn."""
        asked = self._options.get("keep_grads")
        cause = "keep_grads=True" if asked else next(self._lookers(), None)
        apart = [
            *(["several processes gradients are averaged in the update"] if self.args.world_size > 1 else ()),
            *(["a scaler they are unscaled in the update"] if self.accelerator.scaler is not None else ()),
            *(["takeback={'update': 'early'} there are none"] if self._options.get("update") == "early" else ()),
        ]
        if asked is False or cause is None:
            return asked is None and not apart and self.args.gradient_accumulation_steps > 1
        if apart:
            raise OptionError(
                f"{cause} is there to look at gradients between the backward and the update, and with {apart[0]}. If "
                f"it does not look at them, say takeback={{'keep_grads': False}}."
            )
        return True

    def _lookers(self) -> Iterator[str]:
        """Callbacks that may look at gradients."""
        for callback in self.callback_handler.callbacks:
            for event in _BETWEEN:
                if getattr(type(callback), event, None) is not getattr(TrainerCallback, event):
                    yield f"the callback {type(callback).__qualname__}.{event}"
