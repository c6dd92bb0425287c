"""`Takeback`, a callback of Lightning's Trainer: training steps are compiled, and everything else stays Lightning's.

    trainer = Trainer(max_epochs=3, gradient_clip_val=1.0, callbacks=[Takeback(memory="auto")])

In automatic optimization forward, backward, clipping and the optimizer's update become one `CompiledStep`, with the
bits of stock Lightning. Where somebody must see gradients between backward and update (a hook, clipping by value, an
optimizer_step of the module's own), forward and backward are compiled, gradients lie in `.grad`, and Lightning goes on
from there by itself. See docs/lightning.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from takeback.compiler.explain.report import Report
from takeback.entry import compile_step
from takeback.errors import CaptureError, OptionError
from takeback.integrations.deferred import NoIndex, deferred, tell_
from takeback.integrations.lightning_checks import Wants, outline_of, wants_of
from takeback.step import CompiledStep

#: Each with classes of its own. A program has one of them in use, and its Trainer asks for its own Callback.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class _Adopting:
    """Whose subclass becomes a Callback when the first of it is made: by then the package in use is imported."""


def _adopt_(kind: type) -> None:
    """Makes it a Callback of each package that is imported; of one that is installed, if none is."""
    used = [name for name in _PACKAGES if name in sys.modules]
    for name in used or _PACKAGES:
        try:
            callback = importlib.import_module(name).Callback
        except ImportError:
            continue
        if not issubclass(kind, callback):
            kind.__bases__ = (*kind.__bases__, callback)
        if not used:
            return


if not any(importlib.util.find_spec(name.partition(".")[0]) for name in _PACKAGES):
    raise ImportError("takeback.integrations.lightning needs Lightning: pip install 'takeback[lightning]'.")


_TRAINERS = {
    "clip_norm": "Trainer(gradient_clip_val=...)",
    "accumulate": "Trainer(accumulate_grad_batches=...)",
    "scaler": "Trainer(precision='16-mixed')",
    "group": "Trainer(strategy='ddp')",
}
_WAY_OUT = (
    "In Lightning: what training_step is to leave for others it returns with the loss, "
    "{'loss': loss, 'logits': logits}, and on_train_batch_end(outputs, ...) gets it after each step. self.log "
    "takes the tensor, without .item(); it and metrics of torchmetrics work as they are."
)


def training_step(
    module: Any, divide: int, context: Callable[[], Any], arguments: Mapping[str, Any]
) -> tuple[torch.Tensor, Any]:
    """The loss of the compiled step. Beside it: what training_step returned, and what it told others."""
    index = NoIndex()
    with deferred(module) as told, context():
        output = module.training_step(*(index if name == "batch_idx" else value for name, value in arguments.items()))
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"training_step returned {type(output).__name__} without a loss. A compiled step always trains: leave out "
            f"a batch in on_train_batch_start (which returns -1), or in the data loader."
        )
    return (loss / divide if divide != 1 else loss), (output, told)


def _send_(module: torch.nn.Module, parameters: Iterable[torch.Tensor] = ()) -> None:
    """Rank 0's buffers, and these parameters, to all."""
    with torch.no_grad():
        for tensor in (*parameters, *module.buffers()):
            torch.distributed.broadcast(tensor.detach(), src=0)


class Takeback(_Adopting):
    """Compiles the training steps of the Trainer that it is a callback of. `options` are those of `compile_step`, but
    for what the Trainer itself says: clipping, accumulation, precision and strategy."""

    def __new__(cls, **options: Any) -> Takeback:
        _adopt_(Takeback)
        return super().__new__(cls)

    def __init__(self, **options: Any) -> None:
        for name in options.keys() & _TRAINERS.keys():
            raise OptionError(f"{name}= is the Trainer's to say: {_TRAINERS[name]}.")
        self.options = options
        self.step: CompiledStep | None = None  #: made at the first training batch
        self.leaves_grads: tuple[str, ...] = ()  #: why gradients lie in `.grad` between backward and update
        self._trainer: Any = None
        self._loop: Any = None  #: Lightning's own, two of whose methods are replaced while it trains
        self._outline: Hashable = None
        self._wants: Wants | None = None
        self._updates = False

    def report(self) -> Report:
        """Of the plan used last."""
        if self.step is None:
            raise CaptureError("there is no compiled step yet: the Trainer has trained no batch.")
        return self.step.report()

    # -- Lightning calls these ---------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and type(trainer.strategy).__name__ == "DDPStrategy":
            # The step averages gradients, of the plain module: all that DDP would do here is to make ranks equal.
            trainer.strategy.configure_ddp = lambda: _send_(pl_module, pl_module.parameters())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._wants is not None and self._wants.group is not None:
            _send_(pl_module)  # as DDP does before each forward, in a validation too

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._release_()
        self.step = None
        wants_of(trainer)  # what can be refused is refused before anything has run
        loop = self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        loop._make_closure = self._make_closure
        self._trainer = trainer

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._release_()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._release_()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._release_()

    def _release_(self) -> None:
        """Lightning's loop is as it was."""
        if self._loop is not None:
            for name in ("_make_closure", "_optimizer_step"):
                vars(self._loop).pop(name, None)
            vars(self._trainer.strategy).pop("configure_ddp", None)
        self._loop = self._wants = None

    # -- in the place of Lightning's own -----------------------------------------------------------------------

    def _make_closure(self, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """Lightning's closure with a compiled step inside. It has no backward: the step has run that."""
        self._compile_(self._trainer)
        stock = type(self._loop)._make_closure(self._loop, kwargs, optimizer, batch_idx)
        if self._loop._skip_backward:  # forward alone, for running statistics: nothing is trained
            return stock
        zero_grad = self._loop._make_zero_grad_fn(batch_idx, optimizer)

        def step_fn() -> Any:
            if zero_grad is not None:
                zero_grad()
            return self._run(kwargs)

        return type(stock)(step_fn=step_fn)

    def _optimizer_step(self, batch_idx: int, closure: Callable[[], Any]) -> None:
        """The update is part of the step that the closure runs."""
        progress = self._loop.optim_progress.optimizer.step
        progress.increment_ready()
        self._updates = True
        try:
            closure()
        finally:
            self._updates = False
        progress.increment_completed()

    def _run(self, kwargs: Mapping[str, Any]) -> Any:
        trainer = self._trainer
        module = trainer.lightning_module
        step = self.step
        assert step is not None
        arguments = {name: None if name == "batch_idx" else value for name, value in kwargs.items()}
        divide = trainer.accumulate_grad_batches
        fx, module._current_fx_name = module._current_fx_name, "training_step"
        try:
            with trainer.profiler.profile("[Takeback]step"):
                update = {} if self._updates else {"update": False}
                loss, (output, told) = step(divide, trainer.precision_plugin.train_step_context, arguments, **update)
            tell_(told)
        except CaptureError as error:
            error.add_note(_WAY_OUT)
            raise
        finally:
            module._current_fx_name = fx
        if self.leaves_grads:
            trainer.precision_plugin.post_backward(loss, module)  # on_after_backward
        return self._loop.output_result_cls.from_training_step_output(output, divide)

    def _compile_(self, trainer: Any) -> None:
        """Before the first step, and again where a callback has changed what the step was compiled for: a clip value,
        or which parameters are trained and in which order."""
        outline = outline_of(trainer)
        if self.step is not None and outline == self._outline:
            return
        self._outline = outline
        wants = wants_of(trainer)
        if self.step is not None and wants == self._wants:
            return
        self._wants = wants
        module = trainer.lightning_module
        self.leaves_grads = wants.leaves_grads
        vars(self._loop).pop("_optimizer_step", None)
        if not wants.leaves_grads:
            self._loop._optimizer_step = self._optimizer_step
        self.step = compile_step(
            module,
            training_step,
            trainer.optimizers[0],
            clip_norm=wants.clip_norm,
            scaler=wants.scaler,
            group=wants.group,
            **self.options,
        )
