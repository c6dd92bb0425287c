"""One Triton kernel at one size: compiled at its first launch, then launched without asking Triton which one it is.

Triton's own launch looks at every argument each time, which takes longer than most kernels here run. What it looks for
is fixed for a `Launch`: sizes and constants are its own, dtypes are the caller's promise, and alignment is checked.
Checked with Triton 3.6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Launch:
    """Call it with the kernel's tensors, always of the same dtypes on one device, and its unspecialised scalars."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], sizes: tuple[int, ...], constants: dict[str, Any], **options: int
    ) -> None:
        names = [name for name in kernel.arg_names if name in constants]
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._sizes = sizes
        self._keywords = {name: constants[name] for name in names} | options
        self._constants = tuple(constants[name] for name in names)
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor, scalars: tuple[float, ...] = ()) -> None:
        aligned = not any(tensor.data_ptr() & 15 for tensor in tensors)
        if self._run is not None and aligned:
            self._run(*tensors, *self._sizes, *scalars, *self._constants)
            return
        compiled = self._kernel[self._grid](*tensors, *self._sizes, *scalars, **self._keywords)
        if aligned and compiled is not None:
            self._run = compiled[self._grid]


class on:
    """`torch.cuda.device` of the tensor, without its cost where that device is current already."""

    def __init__(self, tensor: Tensor) -> None:
        index = tensor.device.index
        self._switch = None if index == torch.cuda.current_device() else torch.cuda.device(index)

    def __enter__(self) -> None:
        if self._switch is not None:
            self._switch.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._switch is not None:
            self._switch.__exit__(*error)


def parts_of(items: int, each: int) -> int:
    """How many parts of `each` items there are."""
    return -(-items // each)


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@functools.lru_cache
def processors(device: torch.device) -> int:
    """How many multiprocessors the device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
