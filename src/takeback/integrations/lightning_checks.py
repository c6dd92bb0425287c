"""What of a Lightning Trainer a compiled step can honour.

In: a trainer and its module, just before training. Out: `Wants`, what the step must know of them; or an error for what
cannot be honoured, which names the way out. Nothing here changes anything. Works on what `pytorch_lightning` and
`lightning.pytorch` have in common, so by the names of their classes (checked on pytorch-lightning 2.6).
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from takeback.errors import CaptureError

_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
#: Between backward and update: they see gradients, or put something in the place of Lightning's own.
_BETWEEN = ("on_after_backward", "on_before_optimizer_step")
_OF_MODULE = ("optimizer_step", "configure_gradient_clipping")
#: Inside of what is one call now.
_IN_VAIN = {
    "backward": "the backward is the compiled step's own. Return another loss, or do without takeback",
    "optimizer_zero_grad": "the compiled step drops the gradients by itself. Remove the override",
    "on_before_backward": "forward and backward are one call. Use on_after_backward or on_train_batch_end",
}


@dataclass(frozen=True)
class Wants:
    """`leaves_grads`: why gradients must lie in `.grad` between backward and update; empty if they need not."""

    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    group: Any
    leaves_grads: tuple[str, ...]


def wants_of(trainer: Any) -> Wants:
    """Raises for what cannot be honoured."""
    _check_kinds(trainer)
    _check_vain(trainer)
    group = _group_of(trainer.strategy)
    clip = trainer.gradient_clip_val
    clips = clip is not None and clip > 0
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and type(trainer.strategy).__name__ == "DDPStrategy":
        raise CaptureError(
            "the precision is '16-mixed' with a scaler and the strategy is DDP. They do not go together yet: a "
            "compiled step would unscale gradients before they are averaged. Use precision='bf16-mixed', or one "
            "process."
        )
    leaves = tuple(_leaving(trainer, clips=clips, grouped=group is not None))
    if group is not None and leaves:
        raise CaptureError(
            f"{leaves[0]}, so gradients must be complete before the update, and those of several processes are "
            f"averaged by the update itself. Without it DDP works; or train in one process."
        )
    if clips and scaler is not None and getattr(trainer.optimizers[0], "_step_supports_amp_scaling", False):
        leaves = (*leaves, "a fused optimizer unscales gradients by itself, and they are to be clipped")
    return Wants(float(clip) if clips and not leaves else None, scaler, group, leaves)


def outline_of(trainer: Any) -> Hashable:
    """What `wants_of` depends on and callbacks change while a Trainer trains; cheap to compare."""
    groups = trainer.optimizers[0].param_groups if trainer.optimizers else ()
    trained = tuple(id(p) for group in groups for p in group["params"] if p.requires_grad)
    return trainer.gradient_clip_val, trainer.gradient_clip_algorithm, len(trainer.optimizers), trained


def _check_kinds(trainer: Any) -> None:
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    if not module.automatic_optimization:
        raise CaptureError(
            "the module has automatic_optimization = False: its training_step runs backward and update itself. There, "
            "compile the steps yourself, tb.compile_step(...), one for each optimizer, and call them in training_step; "
            "leave out the Takeback callback."
        )
    if len(trainer.optimizers) != 1:
        raise CaptureError(
            f"configure_optimizers gave {len(trainer.optimizers)} optimizers. Automatic optimization has one; for "
            f"several, compile each step yourself in manual optimization, without the Takeback callback."
        )
    if type(strategy).__name__ not in _STRATEGIES:
        raise CaptureError(
            f"the strategy is {type(strategy).__name__}. A compiled step trains on one device a process, alone or with "
            f"strategy='ddp'; parameters that are sharded or moved belong to their strategy."
        )
    if type(precision).__name__ not in _PRECISIONS:
        raise CaptureError(
            f"the precision plugin is {type(precision).__name__}, which takeback does not know. Use precision='32', "
            f"'16-mixed', 'bf16-mixed', '16-true', 'bf16-true' or '64-true'."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise CaptureError("training_step takes a dataloader_iter, and a compiled step needs the batch: take that.")


def _check_vain(trainer: Any) -> None:
    for owner, name in _overrides(trainer, _IN_VAIN):
        raise CaptureError(f"{owner} overrides {name}, which cannot be honoured: {_IN_VAIN[name]}.")


def _leaving(trainer: Any, *, clips: bool, grouped: bool) -> Iterator[str]:
    for owner, name in _overrides(trainer, (*_BETWEEN, *_OF_MODULE)):
        yield f"{owner} overrides {name}"
    if not clips:
        return
    if str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value":
        yield "gradients are clipped by value"
        return
    trained = [p for p in trainer.lightning_module.parameters() if p.requires_grad]
    optimized = [p for group in trainer.optimizers[0].param_groups for p in group["params"] if p.requires_grad]
    if {id(p) for p in trained} != {id(p) for p in optimized}:
        yield "gradients are clipped by the norm of the optimizer's parameters, and the module trains others besides"
    elif not grouped and [id(p) for p in trained] != [id(p) for p in optimized]:
        yield "gradients are clipped by their norm, whose sum is formed in the order of the optimizer's groups"


def _overrides(trainer: Any, names: Any) -> Iterator[tuple[str, str]]:
    """(whose, name) of each of these hooks that is not Lightning's own."""
    for owner, base in ((trainer.lightning_module, "LightningModule"), *((c, "Callback") for c in trainer.callbacks)):
        kind = next((k for k in type(owner).__mro__ if k.__name__ == base), None)
        for name in names:
            default = getattr(kind, name, None)
            now = getattr(owner, name, None)
            if default is not None and getattr(now, "__func__", now) is not default:
                what = "the module" if base == "LightningModule" else f"the callback {type(owner).__name__}"
                yield what, name


def _group_of(strategy: Any) -> Any:
    if type(strategy).__name__ != "DDPStrategy":
        return None
    settings: dict[str, Any] = getattr(strategy, "_ddp_kwargs", {})
    hook = getattr(strategy, "_ddp_comm_hook", None) or getattr(strategy, "_model_averaging_period", None)
    if hook is not None or settings.get("broadcast_buffers", True) is False:
        raise CaptureError(
            "the DDPStrategy has a communication hook, model averaging or broadcast_buffers=False. A compiled step "
            "averages gradients over all ranks and sends rank 0's buffers: use DDPStrategy without these."
        )
    return torch.distributed.group.WORLD
