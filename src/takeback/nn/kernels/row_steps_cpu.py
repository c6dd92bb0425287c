"""The kernels along rows on the CPU: the C++ of row_steps.cpp, or, where it cannot be compiled, plain torch."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from takeback.nn.kernels import row_steps_plain as plain
from takeback.nn.kernels.library import DTYPES, address, dtype_code, opened_or_warned
from takeback.nn.kernels.width import wide

if TYPE_CHECKING:
    from takeback.nn.kernels.row_steps import Rows

_lock = threading.Lock()


class _NativeRows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_int32) for name in ("dtype", "weight_dtype", "bias_dtype")),
        *((name, ctypes.c_int32) for name in ("centred", "from_output", "threads")),
    ]


class _Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


def rms_norm_(x: Tensor, out: Tensor, norm: Rows, eps: float) -> Tensor:
    library = _kernels()
    if library is None:
        return plain.rms_norm_(x, out, norm, eps)
    rstd = torch.empty(norm.rows, dtype=wide(x))
    _check(library.tb_rms_norm(_native(x, norm), address(x), address(out), eps, address(rstd)), norm)
    return rstd


def backward_(dy: Tensor, saved: Tensor, out: Tensor | None, norm: Rows, mean: Tensor | None, rstd: Tensor) -> Tensor:
    library = _kernels()
    if library is None:
        return plain.backward_(dy, saved, out, norm, mean, rstd)
    sums = torch.empty((2, norm.columns), dtype=wide(dy))
    tables = (None if norm.from_output else mean, rstd)
    _check(library.tb_row_backward(_native(dy, norm), *map(address, (dy, saved, out, *tables, sums))), norm)
    return sums


def swiglu_(gate: Tensor, up: Tensor, out: Tensor) -> None:
    library = _kernels()
    if library is None:
        return plain.swiglu_(gate, up, out)
    library.tb_swiglu(*_sizes(gate), *map(_matrix, (gate, up, out)))
    return None


def swiglu_backward_(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    library = _kernels()
    if library is None:
        return plain.swiglu_backward_(dy, gate, up, dgate, dup)
    library.tb_swiglu_backward(*_sizes(gate), *map(_matrix, (dy, gate, up, dgate, dup)))
    return None


def _native(x: Tensor, norm: Rows) -> ctypes._CArgObject:
    return ctypes.byref(
        _NativeRows(
            address(norm.weight),
            address(norm.bias),
            norm.rows,
            norm.columns,
            DTYPES[x.dtype],
            dtype_code(norm.weight),
            dtype_code(norm.bias),
            norm.centred,
            norm.from_output,
            torch.get_num_threads(),
        )
    )


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    return DTYPES[x.dtype], torch.get_num_threads(), x.shape[0], x.shape[1]


def _matrix(x: Tensor) -> _Matrix:
    return _Matrix(x.data_ptr(), x.stride(0))


def _check(failed: int, norm: Rows) -> None:
    if failed:
        raise MemoryError(f"no memory for the tables of {norm.columns} columns")


def _kernels() -> ctypes.CDLL | None:
    with _lock:
        return _library()


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    rows, tensor, sizes = ctypes.POINTER(_NativeRows), ctypes.c_void_p, [*[ctypes.c_int] * 2, *[ctypes.c_int64] * 2]
    return opened_or_warned(
        "row_steps.cpp",
        {
            "tb_rms_norm": [rows, tensor, tensor, ctypes.c_double, tensor],
            "tb_row_backward": [rows, *[tensor] * 6],
            "tb_swiglu": [*sizes, *[_Matrix] * 3],
            "tb_swiglu_backward": [*sizes, *[_Matrix] * 5],
        },
    )
