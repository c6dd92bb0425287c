"""One Triton kernel at one size: compiled at its first launch, then launched without asking Triton which one it is.

Triton's own launch looks at every argument each time, which takes longer than most kernels here run. What it looks for
is fixed for a `Launch`: sizes and constants are its own, dtypes are the caller's promise, and alignment is checked.
Run with Triton 3.6; 3.7 and 3.8 call a compiled kernel the same way, by their source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from takeback import engine


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
        self._compiled: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor, scalars: tuple[float, ...] = ()) -> None:
        for tensor in tensors:
            if tensor.data_ptr() & 15:  # compiled for a multiple of 16: Triton looks for another variant
                self._kernel[self._grid](*tensors, *self._sizes, *scalars, **self._keywords)
                return
        if self._run is None:
            compiled = self._kernel[self._grid](*tensors, *self._sizes, *scalars, **self._keywords)
            if compiled is not None:  # None in Triton's interpreter
                self._compiled = compiled.function, compiled.packed_metadata, None, None, None  # no launch hooks
                self._run = compiled.run
            return
        stream = engine.cuda_stream(tensors[0].device.index)
        self._run(*self._grid, stream, *self._compiled, *tensors, *self._sizes, *scalars, *self._constants)


class on:
    """`torch.cuda.device` of the tensor, without its cost where that device is current already."""

    def __init__(self, tensor: Tensor) -> None:
        index = tensor.device.index
        is_current = _only_one_device() or index == torch.cuda.current_device()
        self._switch = None if is_current else torch.cuda.device(index)

    def __enter__(self) -> None:
        if self._switch is not None:
            self._switch.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._switch is not None:
            self._switch.__exit__(*error)


@functools.cache
def _only_one_device() -> bool:
    return bool(torch.cuda.device_count() == 1)


def given(tensor: Tensor | None, otherwise: Tensor) -> Tensor:
    """A kernel's argument is a pointer even where a constant says that it is not used."""
    return otherwise if tensor is None else tensor


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
