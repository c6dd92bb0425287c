"""A world of fake tensors for prediction: copies of the user's objects with the same shapes and no bytes."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import _subclasses  # checked on 2.11 and 2.13
from torch._subclasses.fake_tensor import (  # checked on 2.11 and 2.13
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _foreach_utils  # checked on 2.11 and 2.13

from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.capture.site import belongs_to_user
from takeback.errors import CaptureError

_FakeTensor = _subclasses.FakeTensor
_ELSEWHERE = ("FakeTensor Device Propagation", "to be on the same device")  #: as 2.11 and 2.13 say it


def _line_of(trace: TracebackType | None) -> str:
    """The innermost line of the user's that an error came through, in words; nothing if there is none."""
    found = ""
    while trace is not None:
        if belongs_to_user(trace.tb_frame):
            found = f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


class _Nobody:
    """A class that no tensor is of."""


class _Discreet(ModuleType):
    """torch._subclasses for whoever asks there whether a tensor is a fake one (transformers does, and then takes
    another way than in training): none is, except to torch itself."""

    @property
    def FakeTensor(self) -> type:
        asks = str(sys._getframe(1).f_globals.get("__name__", ""))
        return _FakeTensor if asks.partition(".")[0] == "torch" else _Nobody


class FakeWorld:
    """A context in which copies are made and traced. Errors of fake tensors become `CaptureError`s. `unnoticed`: the
    step is not to see that its tensors are fakes. `device`: where the fakes are, if not where the tensors are; whatever
    the model and the batch hold is taken to be there."""

    def __init__(self, *, unnoticed: bool = False, device: torch.device | None = None) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._unnoticed = unnoticed
        self._device = device

    def __enter__(self) -> FakeWorld:
        self._mode.__enter__()
        if self._unnoticed:
            _subclasses.__class__ = _Discreet
            _foreach_utils._foreach_supported_types.append(_FakeTensor)  # clip_grad_norm_ asks for the type
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unnoticed:
            _subclasses.__class__ = ModuleType
            _foreach_utils._foreach_supported_types.remove(_FakeTensor)
        self._mode.__exit__(kind, error, trace)
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            raise CaptureError(
                f"the step reads a tensor's value into Python ({error.func}){_line_of(trace)}, which a prediction "
                f"cannot know. To look at it (a log, a history), return the tensor as aux instead. If the step "
                f"needs it, compile and run it: compile_step holds such values with guards."
            ) from error
        if isinstance(error, UnsupportedOperatorException):
            raise CaptureError(
                f"{error.func} has no fake kernel, so its result's shape is not known without running it. Register one "
                f"with torch.library.register_fake, or compile and run the step."
            ) from error
        if (
            self._device is not None
            and isinstance(error, RuntimeError)
            and any(text in str(error) for text in _ELSEWHERE)
        ):
            raise CaptureError(
                f"the step uses tensors on different devices{_line_of(trace)}: {error} What the model and the batch "
                f"hold is predicted on {self._device.type}. Hand other tensors over in the batch, register them as "
                f"buffers, or make them on the device of an operand."
            ) from error

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._data(tensor).requires_grad_(tensor.requires_grad)

    def _data(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device is None:
            return self._mode.from_tensor(tensor.detach())
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)

    def copy(
        self, model: torch.nn.Module, optimizers: Optimizers, loss_fn: Callable[..., Any]
    ) -> tuple[torch.nn.Module, Optimizers, Callable[..., Any]]:
        """The three copied together, so that they still share what they shared; their tensors are fakes."""
        memo: dict[int, Any] = {}
        for p in model.parameters():
            memo[id(p)] = torch.nn.Parameter(self._data(p), requires_grad=p.requires_grad)
        for t in model.buffers():
            memo.setdefault(id(t), self.fake(t))
        for module in model.modules():  # what stands there may have a graph, and could not be copied
            for value in vars(module).values():
                if isinstance(value, torch.Tensor) and (self._device is not None or not value.is_leaf):
                    where = self._device or value.device
                    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where)
                    memo.setdefault(id(value), made)
        for _, table in optimizers.states:
            for value in table.values():
                if isinstance(value, torch.Tensor):
                    steps = value.dim() == 0  # which an optimizer may count on the CPU
                    memo.setdefault(id(value), self._mode.from_tensor(value) if steps else self.fake(value))
        copied = copy.deepcopy([model, optimizers, loss_fn], memo)
        return copied[0], copied[1], copied[2]

    def fill_states(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The state that the optimizer's first own step would make, for SGD, Adam and AdamW."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                if type(optimizer) is torch.optim.SGD:
                    if group["momentum"] != 0 and state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.empty_like(p.detach())
                elif not state:
                    on_device = bool(group.get("fused") or group.get("capturable"))
                    state["step"] = torch.empty((), dtype=torch.float32, device=p.device if on_device else "cpu")
                    state["exp_avg"] = torch.empty_like(p.detach())
                    state["exp_avg_sq"] = torch.empty_like(p.detach())
