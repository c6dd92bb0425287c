"""`compile_step` for what an `accelerate.Accelerator` has prepared: one call in the place of backward, clip, step and
zero_grad.

    step = compile_step(accelerator, model, loss_fn, optimizer, clip_norm=1.0)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = step(x, y)
            scheduler.step()

Accumulation, mixed precision, the scaler and the processes are the accelerator's to say. Guaranteed: parameters have
the bits of the same loop with accelerator.backward(), accelerator.clip_grad_norm_() and optimizer.step().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from takeback.compiler.explain.report import Report
from takeback.entry import compile_step as compile_plain_step
from takeback.errors import CaptureError, OptionError
from takeback.step import CompiledStep

_ACCELERATORS = {
    "accumulate": "Accelerator(gradient_accumulation_steps=...)",
    "scaler": "Accelerator(mixed_precision='fp16')",
    "group": "accelerate launch, or torchrun",
}
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")


class _DividedLoss:
    """loss_fn, whose loss is divided as accelerator.backward() divides it; the loss itself goes beside it."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self.loss_fn = loss_fn

    def __call__(self, model: torch.nn.Module, divisor: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = self.loss_fn(model, *args, **kwargs)
        loss = out[0] if isinstance(out, tuple) and len(out) == 2 else out
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(f"loss_fn returned a {type(out).__name__}; it must return the loss, or (loss, aux).")
        return loss / divisor, out


class AcceleratedStep:
    """Called with a batch, inside of `accelerator.accumulate(...)` or not: what loss_fn returns for it. `compiled` is
    the step itself, with its report and counts."""

    def __init__(self, accelerator: Any, optimizer: Any, compiled: CompiledStep) -> None:
        self.compiled = compiled
        self._accelerator, self._optimizer = accelerator, optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        accelerator = self._accelerator
        last = accelerator.sync_gradients
        scaler: Any = self.compiled.options.scaler
        before = scaler.get_scale() if scaler is not None and last else None
        update = {} if last else {"update": False}
        _, out = self.compiled(accelerator.gradient_accumulation_steps, *args, **kwargs, **update)
        if scaler is not None and before is not None:
            # What its own step() would have said to schedulers, and to who asks for optimizer_step_was_skipped.
            self._optimizer._is_overflow = scaler.get_scale() < before
        return out

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Of the last update, before clipping."""
        return self.compiled.grad_norm

    def report(self) -> Report:
        return self.compiled.report()


def compile_step(
    accelerator: Any, model: torch.nn.Module, loss_fn: Callable[..., Any], optimizer: Any, **options: Any
) -> AcceleratedStep:
    """`model` and `optimizer` as `accelerator.prepare` gave them; `loss_fn(model, *batch)` gets the model inside of
    DDP. `options` are those of `takeback.compile_step`, but for what the accelerator itself says."""
    for name in options.keys() & _ACCELERATORS.keys():
        raise OptionError(f"{name}= is the accelerator's to say: {_ACCELERATORS[name]}.")
    kind = accelerator.distributed_type.name
    if kind not in _KINDS:
        raise CaptureError(
            f"the accelerator is of type {kind}, where parameters or updates belong to another library. A compiled "
            f"step trains on one device a process, alone or with DDP (MULTI_CPU, MULTI_GPU)."
        )
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    compiled = compile_plain_step(
        inner,
        _DividedLoss(loss_fn),
        optimizer,
        scaler=accelerator.scaler,
        group=torch.distributed.group.WORLD if accelerator.num_processes > 1 else None,
        **options,
    )
    return AcceleratedStep(accelerator, optimizer, compiled)
