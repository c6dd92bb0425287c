"""Products in bfloat16: whether that helps a step at all, and what it would come to.

What autocast makes of a step cannot be read off its program: which values become half as large depends on torch's lists
of ops and on the user's own casts. So a figure is given only where the user's code is traced anyway, on fake tensors:
by `predict` and `takeback explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.capture.finish import Finished
from takeback.compiler.explain.advice import OF_PEAK, Tip
from takeback.compiler.explain.replan import Replan
from takeback.compiler.explain.report import Report
from takeback.compiler.passes.cost import Rates, operations
from takeback.compiler.program import Phase, Program
from takeback.errors import CaptureError, OptionError, PlanError

_HELPS = 1.2  #: times as many operations a second: less is eaten up by casts
_WHY = (
    "around the forward in loss_fn: products in bfloat16, and what is kept of them for backward half as large. It "
    "changes results: look whether your model trains as well"
)
_UNKNOWN = "takeback.predict and takeback explain say how much: they trace your code with it, which a report does not"


class Autocast:
    """The user's loss function, with products in bfloat16. An object, so that a copy has a copy of what is inside."""

    def __init__(self, loss_fn: Callable[..., Any], device: str) -> None:
        self.loss_fn, self.device = loss_fn, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device, torch.bfloat16):
            return self.loss_fn(*args, **kwargs)


def what_to_write(device: str) -> str:
    return f'with torch.autocast("{device}", torch.bfloat16):'


def helps(program: Program, rates: Rates) -> bool:
    """Whether there are float32 products, and this machine makes them faster in bfloat16."""
    if rates.product(torch.bfloat16) < _HELPS * rates.product(torch.float32):
        return False
    forward = (op for op in program.ops if op.phase is Phase.FORWARD)
    return any(op.outputs and op.outputs[0].dtype == torch.float32 and operations(op) for op in forward)


@dataclass(frozen=True)
class HalfUnknown:
    """The tip without a figure."""

    program: Program
    rates: Callable[[], Rates]  #: products in bfloat16 included

    def __call__(self, report: Report) -> Iterator[Tip]:
        if helps(self.program, self.rates()):
            yield Tip(what_to_write(self.program.device_type), None, OF_PEAK, None, f"{_WHY}. {_UNKNOWN}")


@dataclass(frozen=True)
class HalfTraced:
    """The tip for a step that can be traced. `traced`: the step with autocast."""

    program: Program
    rates: Callable[[], Rates]
    replan: Replan
    traced: Callable[[], Finished]

    def __call__(self, report: Report) -> Iterator[Tip]:
        if not helps(self.program, self.rates()):
            return
        do = what_to_write(self.program.device_type)
        try:
            planned = self.replan.planned(self.traced())
        except (CaptureError, OptionError, PlanError):  # what fakes cannot show, or a target that cannot be kept
            yield Tip(do, None, OF_PEAK, None, f"{_WHY}. How much could not be traced")
        else:
            yield from self.replan.tip(report, planned, do, _WHY)
