"""Trainers of transformers and TRL whose training step is compiled. The loop stays the Trainer's: batches, callbacks,
schedulers, logs, evaluation and checkpoints; what this replaces is its forward and backward, and its update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from takeback.compiler.explain.report import Report
from takeback.errors import CaptureError
from takeback.integrations.transformers.optimizer import StepOptimizer, innermost
from takeback.integrations.transformers.refusals import (
    check_accelerator,
    check_arguments,
    check_class,
    check_model,
    check_of_trl,
    checked_options,
    is_of_trl,
)
from takeback.integrations.transformers.stepping import Stepping
from takeback.integrations.transformers.telling import ToldLater
from takeback.step import CompiledStep

_NEEDED = ("_clip_grad_norm", "_get_grad_norm", "_wrap_model", "_update_auto_batch_size")
if _missing := [name for name in _NEEDED if not hasattr(Trainer, name)]:
    raise ImportError(
        f"TakebackTrainer needs a transformers whose Trainer has {_missing[0]}(); it was checked on 5.17 and 5.22."
    )


class CompiledTrainer(Trainer):
    """What stands in the place of Trainer's own methods. It comes right before Trainer in the order of classes, so that
    what others make of these methods, and hand on by `super()`, is called as ever."""

    _takeback: Stepping

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one microbatch, compiled."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        return self._takeback.microbatch(model, self._prepare_inputs(inputs), num_items_in_batch)

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        """Not into DistributedDataParallel: the step averages gradients. By now the optimizer is made, by whomever, and
        its step() becomes the compiled one's update."""
        if training and self.optimizer is not None and not isinstance(self.optimizer, StepOptimizer):
            self.optimizer: torch.optim.Optimizer = StepOptimizer(innermost(self.optimizer), self._takeback.update)
        wrapped: torch.nn.Module = super()._wrap_model(model, training, dataloader)
        if training and not getattr(wrapped, "_is_accelerate_prepared", False):
            self.accelerator.prepare_model(wrapped, evaluation_mode=True)  # autocast alone
            wrapped._is_accelerate_prepared = True
        return wrapped

    def _update_auto_batch_size(self, batch_size: int) -> None:
        self._takeback.forget()  # its plans are for a batch that did not fit
        super()._update_auto_batch_size(batch_size)

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        return self._takeback.grad_norm if self._takeback.updated else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        return self._takeback.grad_norm if self._takeback.updated else super()._get_grad_norm(model, grad_norm)


class CompiledTrlTrainer(CompiledTrainer):
    """The same, where `compute_loss` is TRL's: what it keeps while a step runs is told after the step."""

    _metrics = ToldLater("_metrics")
    _total_train_tokens = ToldLater("_total_train_tokens")


class TakebackMixin:
    """In front of any Trainer: `class Compiled(TakebackMixin, SFTTrainer): ...` is SFTTrainer with a compiled training
    step. All arguments are that trainer's, and `takeback`: options of `takeback.compile_step` (memory, update,
    verify_every, max_plans, unplanned, ...). What Trainer decides (accumulation, clipping, processes, the scaler)
    follows from TrainingArguments.

    `keep_grads=True` among the options leaves gradients in `.grad` until Trainer's `zero_grad()`, as in Trainer. Unless
    it is said, that is done with accumulation, and where a callback has `on_pre_optimizer_step` or `on_optimizer_step`;
    False: in no case."""

    args: Any
    accelerator: Any
    model: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, Trainer) and not issubclass(cls, CompiledTrainer):
            core = CompiledTrlTrainer if is_of_trl(cls) else CompiledTrainer
            plain = cls.__bases__.index(Trainer) if Trainer in cls.__bases__ else len(cls.__bases__)
            cls.__bases__ = (*cls.__bases__[:plain], core, *cls.__bases__[plain:])
        if issubclass(cls, CompiledTrainer):
            check_class(cls, CompiledTrainer)

    def __init__(self, *args: Any, takeback: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        options = checked_options(takeback)
        if not isinstance(self, Trainer):
            raise CaptureError(
                f"{type(self).__qualname__} is no Trainer: TakebackMixin comes in front of one, "
                f"class Compiled(TakebackMixin, SFTTrainer)."
            )
        for given in (*args, *kwargs.values()):  # before Trainer's own checks, which know no way out
            if isinstance(given, TrainingArguments):
                check_arguments(given, options)
                check_of_trl(type(self), given)
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, torch.nn.Module):
            check_model(model)
        self._takeback = Stepping(self, options)
        super().__init__(*args, **kwargs)
        check_arguments(self.args, options)
        check_accelerator(self.accelerator)
        check_model(self.model)

    @property
    def compiled_step(self) -> CompiledStep:
        """There is one from the first training step on."""
        if self._takeback.step is None:
            raise CaptureError("there is no compiled step yet: it is made by the first training step. Call train().")
        return self._takeback.step

    def takeback_report(self) -> Report:
        """What lives where in the plan used last."""
        return self.compiled_step.report()


class TakebackTrainer(TakebackMixin, Trainer):
    """`transformers.Trainer` with a compiled training step: all arguments are Trainer's, and `takeback`, options of
    `takeback.compile_step`. See `TakebackMixin`."""
