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

    def __init__(self, accelerator: Any, model: torch.nn.Module, optimizer: Any, compiled: CompiledStep) -> None:
        self.compiled = compiled
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer

    def __call__(self, *args: Any, update: bool | None = None, **kwargs: Any) -> Any:
        """`update`: whether this microbatch is the last of its update, where no `accumulate()` says it."""
        accelerator = self._accelerator
        if update is None and accelerator.sync_gradients and _holds_back(self._model):
            raise CaptureError(
                "the step was called inside of no_sync() and would make an update all the same. For a microbatch that "
                "is not the last one say step(..., update=False), or use accelerator.accumulate(model)."
            )
        last = accelerator.sync_gradients if update is None else update
        scaler: Any = self.compiled.options.scaler
        before = scaler.get_scale() if scaler is not None and last else None
        waits = {} if last else {"update": False}
        _, out = self.compiled(accelerator.gradient_accumulation_steps, *args, **kwargs, **waits)
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


def _holds_back(model: torch.nn.Module) -> bool:
    """Whether DDP is told not to average now."""
    return isinstance(model, DistributedDataParallel) and not model.require_backward_grad_sync


def _check(accelerator: Any) -> None:
    """Raises for an accelerator whose training no compiled step can honour."""
    if not hasattr(accelerator, "distributed_type"):
        raise OptionError(
            f"the first argument is a {type(accelerator).__name__} and not an Accelerator: "
            f"compile_step(accelerator, model, loss_fn, optimizer)."
        )
    kind = accelerator.distributed_type.name
    if kind not in _KINDS:
        raise CaptureError(
            f"the accelerator is of type {kind}, where parameters or updates belong to another library. A compiled "
            f"step trains on one device a process, alone or with DDP (MULTI_CPU, MULTI_GPU)."
        )
    if accelerator.mixed_precision == "fp8":
        raise CaptureError(
            "the accelerator has mixed_precision='fp8': its layers keep a history of scales that a replay would not "
            "write. Use mixed_precision='bf16'."
        )
    if accelerator.num_processes > 1 and accelerator.scaler is not None:
        raise CaptureError(
            "the accelerator has mixed_precision='fp16' with a scaler and several processes. They do not go together "
            "yet: a compiled step would unscale gradients before they are averaged. Use mixed_precision='bf16'."
        )
    handler = accelerator.ddp_handler
    if accelerator.num_processes > 1 and handler is not None:
        hook = str(getattr(handler.comm_hook, "value", handler.comm_hook))
        if hook != "no" or not handler.broadcast_buffers:
            raise CaptureError(
                "DistributedDataParallelKwargs have a comm_hook or broadcast_buffers=False. A compiled step averages "
                "gradients over all ranks and sends rank 0's buffers: leave these out."
            )


def compile_step(
    accelerator: Any, model: torch.nn.Module, loss_fn: Callable[..., Any], optimizer: Any, **options: Any
) -> AcceleratedStep:
    """`model` and `optimizer` as `accelerator.prepare` gave them; `loss_fn(model, *batch)` gets the model inside of
    DDP. `options` are those of `takeback.compile_step`, but for what the accelerator itself says."""
    _check(accelerator)
    for name in options.keys() & _ACCELERATORS.keys():
        raise OptionError(f"{name}= is the accelerator's to say: {_ACCELERATORS[name]}.")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    compiled = compile_plain_step(
        inner,
        _DividedLoss(loss_fn),
        optimizer,
        scaler=accelerator.scaler,
        group=torch.distributed.group.WORLD if accelerator.num_processes > 1 else None,
        **options,
    )
    return AcceleratedStep(accelerator, model, optimizer, compiled)
