"""The user's GradScaler as a compiled step uses it: what is private to it is known here alone (2.11 and 2.13).

Contract: the user's scaler is the truth, and is not written before the commit. Until then everything is done with an
attempt: a shallow copy that shares the tensor of the scale and keeps an account of its own of what was unscaled.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from takeback.errors import CaptureError

_SET_ON_OPTIMIZER = ("grad_scale", "found_inf")  #: by GradScaler.step, for the time of an optimizer's step()


class Scaling:
    """A scaler and the optimizer that it steps. `clips`: gradients are unscaled before the step, to be clipped."""

    def __init__(self, scaler: Any, optimizer: torch.optim.Optimizer, *, clips: bool) -> None:
        self.scaler = scaler
        self._optimizer = optimizer
        self._clips = clips
        self._attempt: Any = None

    # -- what is asked ---------------------------------------------------------------------------------------------

    @property
    def in_kernel(self) -> bool:
        """Whether the optimizer's kernels skip the update themselves; else it is skipped before they are called."""
        return bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    @property
    def divides(self) -> bool:
        """Whether the optimizer's kernels also divide the gradients by the scale."""
        return self.in_kernel and not self._clips

    @property
    def scale_tensor(self) -> torch.Tensor:
        """Where the scale is, read afresh in each step. Call `prepare_` before."""
        return self.scaler._scale

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """What the scaler holds between steps, by name."""
        return (("scaler.scale", self.scale_tensor), ("scaler.growth_tracker", self.scaler._growth_tracker))

    @property
    def found_inf(self) -> torch.Tensor:
        """Of the attempt: not 0 if a gradient is not finite."""
        [found] = self._attempt._per_optimizer_states[id(self._optimizer)]["found_inf_per_device"].values()
        return found

    def own_step_reason(self) -> str | None:
        """Why an update with this scaler is not written into the plan, or None if it can be."""
        if any(hasattr(self._optimizer, name) for name in _SET_ON_OPTIMIZER):
            return "grad_scale or found_inf is set on the optimizer"
        if self.scale_tensor.device != self._device():
            return f"the scaler's scale is on {self.scale_tensor.device}, the parameters on {self._device()}"
        return None

    def _device(self) -> torch.device:
        return next(p.device for group in self._optimizer.param_groups for p in group["params"])

    # -- an attempt ------------------------------------------------------------------------------------------------

    def prepare_(self) -> Hashable:
        """Called before each step: raises if the scaler is in use, and makes the tensor of the scale if there is none
        yet, as `GradScaler.scale` would. Gives what must be the same for a plan to be used."""
        for account in self.scaler._per_optimizer_states.values():
            if account["stage"] is not OptState.READY or account["found_inf_per_device"]:
                raise CaptureError(
                    "the scaler is in the middle of a step: scaler.unscale_() or scaler.step() was called, and "
                    "scaler.update() was not. A compiled step scales, unscales, steps and updates the scale itself: "
                    "call none of these around it. To give up the step that was begun, call scaler.update()."
                )
        # Ctrl-C may have struck between the two that it makes.
        if self.scaler._scale is None or self.scaler._growth_tracker is None:
            self.scaler._lazy_init_scale_growth_tracker(self._device())
        return (self.scale_tensor.data_ptr(), self.in_kernel, self.own_step_reason())

    def begin_(self) -> None:
        """A new attempt; what the one before it found is forgotten."""
        attempt = self._attempt = object.__new__(type(self.scaler))
        attempt.__dict__.update(self.scaler.__dict__)
        attempt._per_optimizer_states = collections.defaultdict(self.scaler._per_optimizer_states.default_factory)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._attempt.scale(loss)

    def unscale_(self) -> None:
        """Divides the gradients by the scale and looks for infs and NaNs, by the ops that eager would run; where the
        optimizer's kernels divide, they are only looked through."""
        if all(p.grad is None for group in self._optimizer.param_groups for p in group["params"]):
            raise CaptureError(
                "no parameter of the optimizer got a gradient, so the scaler has nothing to check (eager raises too). "
                "Give the optimizer the parameters that the loss depends on."
            )
        if self.divides:
            self._attempt._check_inf_per_device(self._optimizer)
        else:
            self._attempt.unscale_(self._optimizer)

    # -- the commit ------------------------------------------------------------------------------------------------

    def step_(self, found_inf: torch.Tensor) -> None:
        """The optimizer's own step() as the scaler calls it, or does not, and the next scale. Gradients are in `.grad`,
        as `unscale_` left them. If it raises, the scaler is as before."""
        before = {name for name in _SET_ON_OPTIMIZER if hasattr(self._optimizer, name)}
        try:
            self.optimize_(found_inf)
            self.scaler.update()
        except BaseException:
            self.forget_()
            for name in set(_SET_ON_OPTIMIZER) - before:
                vars(self._optimizer).pop(name, None)
            raise
        self._attempt = None

    def optimize_(self, found_inf: torch.Tensor) -> None:
        """Of `step_`, the optimizer's part alone."""
        self._account_(OptState.READY if self.divides else OptState.UNSCALED, found_inf)
        self.scaler.step(self._optimizer)

    def update_(self, found_inf: torch.Tensor) -> None:
        """The next scale, after an update that was run or skipped by the plan."""
        self._account_(OptState.STEPPED, found_inf)
        self.scaler.update()
        self._attempt = None

    def forget_(self) -> None:
        """The scaler has not begun a step of this optimizer."""
        self.scaler._per_optimizer_states.pop(id(self._optimizer), None)

    def _account_(self, stage: OptState, found_inf: torch.Tensor) -> None:
        account = {"stage": stage, "found_inf_per_device": {found_inf.device: found_inf}}
        self.scaler._per_optimizer_states[id(self._optimizer)] = account

    # -- a twin ----------------------------------------------------------------------------------------------------

    def twin(self, optimizer: torch.optim.Optimizer) -> Scaling:
        """The same for a twin of the optimizer, with a scaler of its own, which takes the check of the gradients as
        done: its `optimize_` shows the optimizer's own ops."""
        scaler = GradScaler(self.scale_tensor.device.type)
        scaler._check_inf_per_device = lambda _: None
        made = Scaling(scaler, optimizer, clips=self._clips)
        made.prepare_()
        return made
