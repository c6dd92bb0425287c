"""A step for CUDA traced where there is no GPU: inside `as_if_on_gpu()`, torch takes fake tensors of CUDA through its
dispatcher, autograd and autocast as it would tensors on a GPU, and chooses the kernels that it would on an H200.

Nothing is computed, and nothing stays: the device guard and the answers about cuDNN (native/no_gpu.cpp), the two
questions that autocast asks, and the choice of an attention (cuda_attention.py) are put back at the end. Where there is
a GPU, only the choice of an attention is ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from takeback import native
from takeback.compiler.capture.cuda_attention import chosen_attention
from takeback.errors import OptionError
from takeback.options import compiler, open_cache

_SOURCE = Path(__file__).parent / "native" / "no_gpu.cpp"
_TORCH = Path(torch.__file__).parent
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def as_if_on_gpu() -> Iterator[None]:
    """Raises `OptionError` where there is neither a GPU nor a compiler."""
    with _one_at_a_time, contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            library = _library()
            # Autograd counts devices, and starts their threads, in the first backward of a process: let it see none,
            # or processes that are forked later could not compute gradients.
            with torch.enable_grad():
                torch.ones((), requires_grad=True, device="cpu").backward()
            library.tb_begin()
            stack.callback(library.tb_end)
            stack.enter_context(_autocast_is_there())
        # Autograd's thread for a device is started once in a process, for the devices that were there then.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(chosen_attention())
        yield


@contextlib.contextmanager
def _autocast_is_there() -> Iterator[None]:
    """torch.autocast("cuda") asks for a GPU, and is disabled where there is none."""
    common, cuda = torch.cuda.amp.common, torch.cuda
    before = common.amp_definitely_not_available, cuda.is_bf16_supported
    common.amp_definitely_not_available = lambda: False
    cuda.is_bf16_supported = lambda including_emulation=True: True
    try:
        yield
    finally:
        common.amp_definitely_not_available, cuda.is_bf16_supported = before


@functools.cache
def _library() -> ctypes.PyDLL:
    try:
        return native.load(
            _SOURCE,
            _flags(),
            lambda path: ctypes.PyDLL(str(path)),
            cache=open_cache(),
            compiler=compiler(),
            built_from=(torch.__version__, str(torch.version.git_version)),
        )
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise OptionError(
            f"a prediction for CUDA needs a GPU, or a C++20 compiler for the few lines by which torch takes fake "
            f"tensors of CUDA without one: {error}. Install one ({compiler()!r} was tried)."
        ) from None


def _flags() -> list[str]:
    # torch.compiled_with_cxx11_abi and the include/ and lib/ folders of the wheel: checked on torch 2.13.
    return [
        *("-O1", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(_TORCH / "include")),
        *(f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
