"""What a call of the step asks for besides its batch: whether to update, and what to divide the gradients by before.

In: the step's own keywords as the user gave them. Out: an `Ask`, or an `OptionError` for what cannot be meant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from takeback.errors import OptionError
from takeback.options import Options

Divisor: TypeAlias = float | torch.Tensor


@dataclass(frozen=True)
class Ask:
    """What a call asks for besides its batch."""

    update: bool
    divide: Divisor | None

    @property
    def accumulates(self) -> bool:
        """Whether gradients must outlive the plan that computes them."""
        return not self.update or self.divide is not None


def asked(
    update: bool | None,
    divide: Divisor | None,
    *,
    loss_fn: Callable[..., Any],
    options: Options,
    device: torch.device,
) -> Ask:
    """Raises for what cannot be meant. `device`: the model's."""
    if update is None and divide is None:
        return Ask(True, None)
    for name, value in (("update", update), ("divide", divide)):
        if value is not None and name in _parameters_of(loss_fn):
            raise OptionError(
                f"{name}= is an argument of the step's own, and loss_fn has a parameter of that name, so it is not "
                f"known which is meant. Rename the parameter of loss_fn, or pass it by position."
            )
    if update is not None and not isinstance(update, bool):
        raise OptionError(f"update must be True or False, got {update!r}")
    ask = Ask(update is not False, divide)
    if divide is not None:
        if not ask.update:
            raise OptionError("divide= divides the summed gradients before the update, and update=False leaves it out.")
        number = isinstance(divide, int | float) and not isinstance(divide, bool) and divide > 0
        if not number and not _is_scalar(divide, device):
            raise OptionError(
                f"divide must be a positive number, or a real tensor without dimensions on the CPU or the model's "
                f"device ({device}); got {divide!r}"
            )
    if ask.accumulates:
        check_accumulates(options)
    return ask


def _is_scalar(value: object, device: torch.device) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 0
        and value.layout is torch.strided
        and value.dtype is not torch.bool
        and not value.is_complex()
        and value.device in (torch.device("cpu"), device)
    )


def check_accumulates(options: Options) -> None:
    """Raises where gradients cannot wait for an update."""
    if options.update == "early":
        raise OptionError(
            "update='early' updates each parameter before all gradients are known, but update=False and divide= need "
            "their sum first. Compile the step with update='end'."
        )
    if options.accumulate != 1:
        raise OptionError(
            f"accumulate={options.accumulate} splits the batch of one call, and update=False adds calls up: a step "
            f"does one of them. Compile it with accumulate=1 and hand over smaller microbatches."
        )


def _parameters_of(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(loss_fn).parameters)
    except (TypeError, ValueError):  # some callables of C have none
        return ()
