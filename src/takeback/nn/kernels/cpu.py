"""Runs a norm's backward on the CPU: a `Call` in, its dx and slices written, or the reason why they were not.

The C++ beside this file is compiled on first use, for the vector width that torch itself uses on this machine. That
width is in the file's name in the cache, so machines that share a cache never run each other's instructions.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

from takeback.native import load
from takeback.nn.kernels.call import Call, Into
from takeback.options import cache_dir, compiler

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "norms.cpp"
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
_lock = threading.Lock()


class _Slice(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("accumulate", ctypes.c_int32)]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dy", "x", "weight", "mean", "rstd", "dx")),
        *((name, _Slice) for name in ("weight_grad", "bias_grad")),
        *((name, ctypes.c_int64) for name in ("batch", "channels", "spots", "groups")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("dtype", "weight_dtype", "training", "threads")),
    ]


def run_(call: Call) -> str | None:
    """Write what `call` asks for; the reason where that cannot be, and then nothing was written."""
    with _lock:
        library = _library()
    if isinstance(library, str):
        return library
    native = _Call(
        *map(_address, (call.dy, call.x, call.weight, call.mean, call.rstd, call.dx)),
        _slice(call.weight_grad),
        _slice(call.bias_grad),
        call.batch,
        call.channels,
        call.spots,
        call.groups,
        call.eps,
        _DTYPES[call.x.dtype],
        _DTYPES[call.x.dtype if call.weight is None else call.weight.dtype],
        call.training,
        torch.get_num_threads(),
    )
    if library.tb_norm_backward(int(call.norm), ctypes.byref(native)):
        raise MemoryError(f"no memory for the sums of {call.channels} channels")
    return None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _slice(into: Into | None) -> _Slice:
    if into is None:
        return _Slice(None, 0, 0)
    return _Slice(into.slice.data_ptr(), _DTYPES[into.slice.dtype], into.accumulate)


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    headers = [path.read_text() for path in sorted(_FOLDER.glob("*.h"))]
    try:
        library, unkept = load(
            _SOURCE, _flags(), _opened, cache_dir=cache_dir(), compiler=compiler(), built_from=headers
        )
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the native CPU kernels are not available: {error}"
    if unkept is not None:
        text = f"takeback: cannot keep the compiled norms in {cache_dir()} ({unkept}): compiled in every process"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return library


def _flags() -> list[str]:
    vectors = _VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())
    # libgomp.so.1 is already loaded, by torch, under that very name: its threads are used.
    shared = ("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-fopenmp")
    return ["-O3", "-ffp-contract=fast", *shared, *vectors]


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))  # lets go of the GIL while it runs
    library.tb_norm_backward.restype = ctypes.c_int
    library.tb_norm_backward.argtypes = [ctypes.c_int, ctypes.POINTER(_Call)]
    return library
