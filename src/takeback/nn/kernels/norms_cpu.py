"""Runs a norm's backward on the CPU: a `NormCall` in, its dx and slices written, or the reason why they were not."""

from __future__ import annotations

import ctypes
import functools
import threading

import torch

from takeback.nn.kernels.library import DTYPES, address, open_library
from takeback.nn.kernels.norm_call import Into, NormCall

_lock = threading.Lock()


class _NativeInto(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("accumulate", ctypes.c_int32)]


class _NativeCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dy", "x", "weight", "mean", "rstd", "dx")),
        *((name, _NativeInto) for name in ("weight_grad", "bias_grad")),
        *((name, ctypes.c_int64) for name in ("batch", "channels", "spots", "groups")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("dtype", "weight_dtype", "training", "threads")),
    ]


def run_(call: NormCall) -> str | None:
    """Write what `call` asks for; the reason where that cannot be, and then nothing was written."""
    with _lock:
        library = _library()
    if isinstance(library, str):
        return library
    native = _NativeCall(
        *map(address, (call.dy, call.x, call.weight, call.mean, call.rstd, call.dx)),
        _native_into(call.weight_grad),
        _native_into(call.bias_grad),
        call.batch,
        call.channels,
        call.spots,
        call.groups,
        call.eps,
        DTYPES[call.x.dtype],
        DTYPES[call.x.dtype if call.weight is None else call.weight.dtype],
        call.training,
        torch.get_num_threads(),
    )
    if library.tb_norm_backward(int(call.norm), ctypes.byref(native)):
        raise MemoryError(f"no memory for the sums of {call.channels} channels")
    return None


def _native_into(into: Into | None) -> _NativeInto:
    if into is None:
        return _NativeInto(None, 0, 0)
    return _NativeInto(into.slice.data_ptr(), DTYPES[into.slice.dtype], into.accumulate)


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    return open_library("norms.cpp", {"tb_norm_backward": [ctypes.c_int, ctypes.POINTER(_NativeCall)]})
