"""Compiles and opens the C++ beside this file: a source's name in, its library out, or the reason why there is none.

A library is compiled on first use, for the vector width that torch itself uses on this machine. That width is part of
its key in the cache, so machines that share a cache never run each other's instructions.
"""

from __future__ import annotations

import ctypes
import subprocess
import warnings
from pathlib import Path

import torch
from torch import Tensor

from takeback.native import load
from takeback.options import compiler, open_cache

FOLDER = Path(__file__).parent
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  #: Dtype of spans.h
_VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}


def open_library(source: str, functions: dict[str, list[object]]) -> ctypes.CDLL | str:
    """The compiled `source`, its functions declared with their argument types, each an int; or why there is none."""
    headers = [path.read_text() for path in sorted(FOLDER.glob("*.h"))]

    def opened(path: Path) -> ctypes.CDLL:
        library = ctypes.CDLL(str(path))  # lets go of the GIL while it runs
        for name, arguments in functions.items():
            function = getattr(library, name)
            function.restype = ctypes.c_int
            function.argtypes = arguments
        return library

    try:
        return load(FOLDER / source, _flags(), opened, cache=open_cache(), compiler=compiler(), built_from=headers)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the native CPU kernels are not available: {error}"


def opened_or_warned(source: str, functions: dict[str, list[object]]) -> ctypes.CDLL | None:
    """The library; where there is none, a warning that says why and what happens instead."""
    library = open_library(source, functions)
    if isinstance(library, ctypes.CDLL):
        return library
    text = f"takeback: {library}. Plain torch operators, which are slower and take more memory, stand in for {source}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return None


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def dtype_code(tensor: Tensor | None) -> int:
    """As the kernels number dtypes; 0 where there is no tensor."""
    return 0 if tensor is None else DTYPES[tensor.dtype]


def _flags() -> list[str]:
    vectors = _VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())
    # libgomp.so.1 is already loaded, by torch, under that very name: its threads are used.
    shared = ("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-fopenmp")
    return ["-O3", "-ffp-contract=fast", *shared, *vectors]
