"""The compiled step of a Trainer, as its loop uses it: a microbatch after the other, and an update.

There are two orders. "In turn", Trainer's own: gradients wait in `.grad`, the Trainer clips them, callbacks may look at
them, and `optimizer.step()` makes the update. "At once": the last microbatch's call clips and updates too, and when the
Trainer comes to it, both are done. That takes less memory where an update has one microbatch, and is how gradients of
several processes are averaged, and those of a scaler unscaled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from takeback.entry import compile_step
from takeback.errors import CaptureError, OptionError
from takeback.integrations.transformers.optimizer import StepOptimizer, innermost
from takeback.integrations.transformers.refusals import check_model, is_of_trl
from takeback.integrations.transformers.telling import Telling, loss_alone, reading, tell_
from takeback.step import CompiledStep

#: Where callbacks may look at gradients, or change them.
_BETWEEN = ("on_pre_optimizer_step", "on_optimizer_step")


@dataclass(frozen=True)
class Manner:
    """What a step is compiled for; when one of these changes, another is."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    in_turn: bool
    clip_norm: float | None


class Stepping:
    """Of one trainer. `options` are those of compile_step that the user gave."""

    def __init__(self, trainer: Trainer, options: Mapping[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self._tells = is_of_trl(type(trainer))  #: whether its loss keeps metrics
        self.kept: dict[str, Any] = {}  #: where they are between steps
        self.telling: Telling | None = None  #: while a loss is computed in a step
        self._parts = 1.0  #: microbatches of this update; a float, so that a plan reads it anew
        self.step: CompiledStep | None = None
        self._manner: Manner | None = None
        self._waiting = False  #: gradients wait, for an update in turn
        self.updated = False  #: the update was made, and the Trainer has not come to it yet
        self._skipped = False  #: the last update was left out by the scaler, as Accelerate sees it

    def microbatch(self, model: torch.nn.Module, inputs: Any, items: torch.Tensor | int | None) -> torch.Tensor:
        """The loss, with gradients that wait; or, at once and last of its update, with the update made."""
        if self.updated:
            raise CaptureError(
                "training_step() was called again after the update of this step. A training_step of yours that calls "
                "it more than once needs TakebackTrainer(..., takeback={'keep_grads': True}): then gradients wait for "
                "the Trainer's optimizer.step()."
            )
        trainer = self._trainer
        step, manner = self._compiled(model)
        self._parts = float(trainer.current_gradient_accumulation_steps)
        if manner.in_turn or not trainer.accelerator.sync_gradients:
            waiting = self._run(step, inputs, items, update=False)
            self._waiting = manner.in_turn
            return waiting
        scaler = trainer.accelerator.scaler
        before = scaler.get_scale() if scaler is not None else 0.0
        if trainer.args.gradient_accumulation_steps == 1:
            loss = self._run(step, inputs, items)
        else:  # a whole step would be a plan more, for the one that is left over at the end of an epoch
            loss = self._run(step, inputs, items, update=False)
            step.update()
        self.updated = True
        called = getattr(manner.optimizer, "_step_supports_amp_scaling", False)  # whose kernels leave the update out
        self._skipped = scaler is not None and not called and scaler.get_scale() < before
        return loss

    def update(self) -> bool:
        """For the optimizer's step(). True if the scaler left the update out."""
        if not self.updated and not self._waiting:
            raise CaptureError(
                "optimizer.step() was called, and no training step of TakebackTrainer came before it. A training_step "
                "of yours must call super().training_step(); to compute another loss, override compute_loss."
            )
        if self._waiting:
            assert self.step is not None
            assert self._manner is not None
            if any(p.grad is not None for p in self._manner.model.parameters()):
                self.step.update()
            else:  # a callback has dropped them
                self._manner.optimizer.step()
        self.updated = self._waiting = False
        return self._skipped

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Of the last update, before clipping."""
        return self.step.grad_norm if self.step is not None else None

    def forget(self) -> None:
        """No plan is kept."""
        self.step = self._manner = None
        self.updated = self._waiting = False

    # -- the step ------------------------------------------------------------------------------------------------------

    def _run(self, step: CompiledStep, inputs: Any, items: torch.Tensor | int | None, **update: bool) -> torch.Tensor:
        loss: torch.Tensor
        if not self._tells:
            loss = step(inputs, items, **update)
            return loss
        with loss_alone():
            loss, told = step(inputs, items, **update)
        tell_(self.kept, told)
        return loss

    def loss(self, model: torch.nn.Module, inputs: Any, items: torch.Tensor | int | None) -> torch.Tensor:
        """As Trainer computes it for one microbatch of several."""
        trainer = self._trainer
        mine = copy.copy(inputs)  # compute_loss takes the labels out
        with trainer.compute_loss_context_manager():
            loss: torch.Tensor = trainer.compute_loss(model, mine, num_items_in_batch=items)
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # a part of the whole update's loss already
        if scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and items is not None
            scaled = by_model or trainer.compute_loss_func is not None
        return loss if scaled else loss / self._parts

    def told_loss(
        self, model: torch.nn.Module, inputs: Any, items: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, list[Any]]:
        """The same of a trainer of TRL's. Beside it, what it would have kept."""
        with reading(self._trainer.accelerator) as telling:
            self.telling = telling
            try:
                loss = self.loss(model, inputs, items)
            finally:
                self.telling = None
        told = telling.data()
        telling.end({"trainer": self._trainer, "model": model, "metrics": told})
        return loss, told

    def _compiled(self, model: torch.nn.Module) -> tuple[CompiledStep, Manner]:
        trainer, args = self._trainer, self._trainer.args
        if not isinstance(trainer.optimizer, StepOptimizer):
            raise CaptureError(
                f"trainer.optimizer is a {type(trainer.optimizer).__name__} that was put there after the training had "
                f"begun, so the compiled step would not hear of its step(). Give it to the trainer as optimizers=, or "
                f"make it in create_optimizer()."
            )
        in_turn = self._waits()
        norm = args.max_grad_norm if args.max_grad_norm > 0 else float("inf")  # Trainer logs it all the same
        clips = not in_turn and self._options.get("update") != "early"
        manner = Manner(model, innermost(trainer.optimizer), in_turn, norm if clips else None)
        if self.step is None or manner != self._manner:
            check_model(model)
            self.step = compile_step(
                model,
                self.told_loss if self._tells else self.loss,
                manner.optimizer,
                group=torch.distributed.group.WORLD if args.world_size > 1 else None,
                scaler=trainer.accelerator.scaler,
                clip_norm=manner.clip_norm,
                **{**self._options, "keep_grads": in_turn},
            )
            self._manner = manner
        return self.step, manner

    def _waits(self) -> bool:
        """Whether the update is made in turn."""
        trainer, asked = self._trainer, self._options.get("keep_grads")
        cause = "keep_grads=True" if asked else next(self._lookers(), None)
        apart = [
            *(["several processes gradients are averaged in the update"] if trainer.args.world_size > 1 else ()),
            *(["a scaler they are unscaled in the update"] if trainer.accelerator.scaler is not None else ()),
            *(["takeback={'update': 'early'} there are none"] if self._options.get("update") == "early" else ()),
        ]
        if asked is False or cause is None:
            return asked is None and not apart and bool(trainer.args.gradient_accumulation_steps > 1)
        if apart:
            raise OptionError(
                f"{cause} is there to look at gradients between the backward and the update, and with {apart[0]}. If "
                f"it does not look at them, say takeback={{'keep_grads': False}}."
            )
        return True

    def _lookers(self) -> Iterator[str]:
        """Callbacks that may look at gradients."""
        for callback in self._trainer.callback_handler.callbacks:
            for event in _BETWEEN:
                if getattr(type(callback), event, None) is not getattr(TrainerCallback, event):
                    yield f"the callback {type(callback).__qualname__}.{event}"
