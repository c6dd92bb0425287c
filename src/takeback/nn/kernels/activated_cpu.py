"""The activated norm's kernels on the CPU: the C++ of activated.cpp, or, where it cannot be compiled, plain torch."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from takeback.nn.kernels import activated_plain as plain
from takeback.nn.kernels.library import DTYPES, address, dtype_code, opened_or_warned
from takeback.nn.kernels.width import wide

if TYPE_CHECKING:
    from takeback.nn.kernels.activated import Layer

_lock = threading.Lock()


class _NativeLayer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("batch", "channels", "spots")),
        *((name, ctypes.c_double) for name in ("param", "absolute_eps")),
        *((name, ctypes.c_int32) for name in ("dtype", "weight_dtype", "bias_dtype", "activation")),
        *((name, ctypes.c_int32) for name in ("last", "absolute", "from_output", "threads")),
    ]


def statistics(x: Tensor, layer: Layer) -> Tensor:
    library = _kernels()
    if library is None:
        return plain.statistics(x, layer)
    out = torch.empty((2, layer.channels), dtype=wide(x))
    _check(library.tb_statistics(_native(x, layer), address(x), address(out)), layer)
    return out


def normalise_(x: Tensor, out: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> None:
    library = _kernels()
    if library is None:
        return plain.normalise_(x, out, layer, mean, invstd)
    _check(library.tb_normalise(_native(x, layer), *map(address, (x, out, mean, invstd))), layer)
    return None


def gather_sums(dy: Tensor, saved: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> Tensor:
    library = _kernels()
    if library is None:
        return plain.gather_sums(dy, saved, layer, mean, invstd)
    out = torch.empty((2, layer.channels), dtype=wide(dy))
    tables = (None, None) if layer.from_output else (mean, invstd)
    _check(library.tb_gather_sums(_native(dy, layer), *map(address, (dy, saved, *tables, out))), layer)
    return out


def put_(
    dy: Tensor, saved: Tensor, out: Tensor, layer: Layer, mean: Tensor, invstd: Tensor, means: Tensor | None
) -> None:
    library = _kernels()
    if library is None:
        return plain.put_(dy, saved, out, layer, mean, invstd, means)
    tables = (None if layer.from_output else mean, invstd, means)
    _check(library.tb_put(_native(dy, layer), *map(address, (dy, saved, out, *tables))), layer)
    return None


def _native(x: Tensor, layer: Layer) -> ctypes._CArgObject:
    return ctypes.byref(
        _NativeLayer(
            address(layer.weight),
            address(layer.bias),
            layer.batch,
            layer.channels,
            layer.spots,
            layer.param,
            layer.absolute_eps or 0.0,
            DTYPES[x.dtype],
            dtype_code(layer.weight),
            dtype_code(layer.bias),
            int(layer.activation),
            layer.last,
            layer.absolute_eps is not None,
            layer.from_output,
            torch.get_num_threads(),
        )
    )


def _check(failed: int, layer: Layer) -> None:
    if failed:
        raise MemoryError(f"no memory for the tables of {layer.channels} channels")


def _kernels() -> ctypes.CDLL | None:
    with _lock:
        return _library()


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    layer, tensor = ctypes.POINTER(_NativeLayer), ctypes.c_void_p
    functions = {"tb_statistics": 2, "tb_normalise": 4, "tb_gather_sums": 5, "tb_put": 6}
    return opened_or_warned("activated.cpp", {name: [layer, *[tensor] * n] for name, n in functions.items()})
