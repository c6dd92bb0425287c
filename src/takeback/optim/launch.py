"""Launches the kernels of kernels.py: all chunks of one group in one launch.

In: parameters, and where their gradients and states lie in flat tensors. A table of `Chunks` is made once and kept
while the parameters stay where they are. `refuses` says why torch's own operators must do it instead.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from takeback.errors import GradBufferError
from takeback.nn.kernels.launch import Launch, given, on
from takeback.optim.fused import AdamSettings, ScalerTensors, SGDSettings

CHUNK = 8192
"""Elements that one program updates."""

BLOCK = 2048
WARPS = 8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(
    device: torch.device, dtype: torch.dtype, settings: AdamSettings | SGDSettings, scaling: ScalerTensors
) -> str:
    """Why the kernels do not serve here, or nothing."""
    if device.type != "cuda":
        return f"the kernels are for CUDA, and this is {device.type}"
    if torch.version.hip is not None:
        return "the kernels were checked on CUDA only, and this is ROCm"
    if not _has_triton():
        return "triton is not installed"
    if dtype not in DTYPES:
        return f"the kernels compute in float32, and the parameters are {dtype}"
    if isinstance(settings.lr, Tensor) and settings.lr.device.type != "cpu":
        return "lr is a tensor on the device"
    if scaling.grad_scale is not None or scaling.found_inf is not None:
        return "GradScaler wants the gradients unscaled and the step skipped in the same pass"
    if isinstance(settings, SGDSettings) and settings.maximize and settings.momentum and not settings.weight_decay:
        # Seen in the machine code of 2.11: the sum is fused one way where four elements are loaded at once, and the
        # other way where they are not.
        return "maximize with momentum and without weight decay: torch rounds it in two ways, by the tensors' alignment"
    return ""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Chunks:
    """One row for each chunk of the parameters; kernels.py says what a row holds."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grad_offsets: Sequence[int],
        state_offsets: Sequence[int],
        indices: Sequence[int],
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = []
        for param, grad, state, index, name in zip(params, grad_offsets, state_offsets, indices, names, strict=True):
            if param.dtype != dtype or param.device != device:
                raise GradBufferError(
                    f"{name} is {param.dtype} on {param.device} now; its state is {dtype} on {device}. Move or convert "
                    f"the model first, then make the GradBuffer and the optimizer."
                )
            for start in range(0, param.numel(), CHUNK):
                address = param.data_ptr() + start * param.itemsize
                rows.append((address, grad + start, state + start, min(CHUNK, param.numel() - start), index))
        self.params = tuple(params)
        self.addresses = addresses(params)
        self.aligned = all(address % 16 == 0 for address in self.addresses)
        self.device = device
        self.chunks = len(rows)
        self.rows = torch.tensor(rows, dtype=torch.int64).to(device)
        self._betas: tuple[tuple[float, float], Tensor] | None = None
        self._powers: Tensor | None = None

    def powers(self, beta1: float, beta2: float, steps: Tensor) -> Tensor:
        """The betas to the power of each step count, by the function that torch's fused kernel calls for itself."""
        if self._betas is None or self._betas[0] != (beta1, beta2):
            betas = torch.tensor([[beta1, beta2]], dtype=torch.float32).to(self.device)
            self._betas = ((beta1, beta2), betas)
        if self._powers is None or len(self._powers) != len(steps):
            self._powers = torch.empty(len(steps), 2, dtype=torch.float32, device=self.device)
        return torch.pow(self._betas[1], steps.unsqueeze(1), out=self._powers)


def addresses(params: Sequence[Tensor]) -> list[int]:
    return [p.data_ptr() for p in params]


def adam_(
    table: Chunks,
    grads: Tensor,
    states: dict[str, Tensor],
    steps: Tensor,
    settings: AdamSettings,
    factor: Tensor | None,
) -> None:
    """The step counts have been increased already."""
    if not table.chunks:
        return
    from takeback.optim import kernels

    powers = table.powers(settings.beta1, settings.beta2, steps)
    exp_avg_sq = states["exp_avg_sq"]
    tensors = (
        table.rows,
        grads,
        states["exp_avg"],
        exp_avg_sq,
        states["max_exp_avg_sq"] if settings.amsgrad else exp_avg_sq,
        powers,
        given(factor, powers),
    )
    constants = (
        ("DECOUPLED", settings.decoupled),
        ("DECAYS", _float32(settings.weight_decay) != 0.0),
        ("AMSGRAD", settings.amsgrad),
        ("MAXIMIZE", settings.maximize),
        ("SCALED", factor is not None),
        ("ALIGNED", table.aligned),
    )
    scalars = float(settings.lr), settings.beta1, settings.beta2, settings.eps, settings.weight_decay
    with on(grads):
        _launch(kernels.adam, table, tensors, constants)(*tensors, scalars=scalars)
    torch.autograd.graph.increment_version(table.params)


def sgd_(
    table: Chunks,
    grads: Tensor,
    states: dict[str, Tensor],
    settings: SGDSettings,
    first: bool,
    factor: Tensor | None,
) -> None:
    """`first`: no parameter of the table has a momentum yet; it becomes the gradient."""
    if not table.chunks:
        return
    from takeback.optim import kernels

    # Without momentum there is no state; the kernel takes the parameters' dtype from what stands there.
    state = states["momentum_buffer"] if settings.momentum else table.params[0]
    tensors = table.rows, grads, state, given(factor, table.rows)
    constants = (
        ("MOMENTUM", settings.momentum != 0.0),
        ("FIRST", first),
        ("NESTEROV", settings.nesterov),
        ("DECAYS", _float32(settings.weight_decay) != 0.0),
        ("MAXIMIZE", settings.maximize),
        ("SCALED", factor is not None),
        ("ALIGNED", table.aligned),
    )
    scalars = float(settings.lr), settings.momentum, settings.dampening, settings.weight_decay
    with on(grads):
        _launch(kernels.sgd, table, tensors, constants)(*tensors, scalars=scalars)
    torch.autograd.graph.increment_version(table.params)


def _launch(kernel: Any, table: Chunks, tensors: Sequence[Tensor], constants: tuple[tuple[str, bool], ...]) -> Launch:
    return _launch_of(kernel, table.device, table.chunks, tuple(t.dtype for t in tensors), constants)


@functools.lru_cache(maxsize=256)
def _launch_of(
    kernel: Any,
    device: torch.device,
    chunks: int,
    dtypes: tuple[torch.dtype, ...],
    constants: tuple[tuple[str, bool], ...],
) -> Launch:
    form = dict(constants) | {"CHUNK": CHUNK, "BLOCK": BLOCK}
    return Launch(kernel, (chunks,), (), form, num_warps=WARPS, enable_fp_fusion=False)


def _float32(value: float) -> float:
    """As the fused kernels see a setting."""
    return ctypes.c_float(value).value
