"""What is in force around a step and decides what its ops do: torch's global settings, and modes and hooks that the
user has entered. `ambient()` is part of a plan's key. And how a mode of takeback's own is left, wherever it is, and how
torch's modules take the path that they take without one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # checked on 2.11 and 2.13
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext  # checked on 2.11 and 2.13
from torch.utils._python_dispatch import (  # checked on 2.11 and 2.13
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)


def ambient() -> Hashable:
    """The global modes that decide which kernels eager would run."""
    autocast = torch.is_autocast_enabled("cpu")
    return (
        _cuda_ambient() if torch.cuda.is_initialized() else None,
        autocast and (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
        _precision(),
        torch.backends.mkldnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        # These flags are named after CUDA and rule the CPU's attention too.
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        tuple(m.device if isinstance(m, DeviceContext) else _Same(m) for m in _get_current_function_mode_stack()),
        tuple(_Same(m) for m in _get_current_dispatch_mode_stack()),
        tuple(_Same(h) for h in _saved_tensors_hooks()),
    )


def modes() -> tuple[object, ...]:
    """The user's code that torch calls for what runs inside the step."""
    return (*_get_current_function_mode_stack(), *_saved_tensors_hooks())


def dispatch_mode() -> object | None:
    """A mode of the user's below autograd, which would see a replay's ops in place of eager's."""
    return next(iter(_get_current_dispatch_mode_stack()), None)


def be_on_function_stack_(mode: TorchFunctionMode) -> None:
    """Puts `mode` on top, before it is left: torch pops whatever is there. It takes a mode off while it asks it, and
    Ctrl-C may strike before it has put it on again; then the one to be popped is none, or the user's."""
    others: list[TorchFunctionMode] = []
    if any(m is mode for m in _get_current_function_mode_stack()):
        while (top := overrides._pop_mode()) is not mode:
            others.append(top)
    for other in reversed(others):
        overrides._push_mode(other)
    overrides._push_mode(mode)


def be_off_function_stack_(*gone: object) -> None:
    """Takes these off, however often they are on: where Ctrl-C strikes just after a mode has been put on, or on its way
    out, nobody leaves it."""
    others = []
    while _get_current_function_mode_stack():
        top = overrides._pop_mode()
        if not any(top is mode for mode in gone):
            others.append(top)
    for other in reversed(others):
        overrides._push_mode(other)


class WithoutDispatchModes:
    """Inside, no dispatch mode looks on. Torch has a generator for it: where Ctrl-C strikes on the way in, that ends
    when it is collected, some time after the step was left, and puts modes on that nobody takes off any more."""

    def __init__(self) -> None:
        self._off: list[TorchDispatchMode] = []

    def __enter__(self) -> None:
        for _ in _get_current_dispatch_mode_stack():
            self._off.append(_python_dispatch._pop_mode())

    def __exit__(self, *error: object) -> None:
        while self._off:
            _python_dispatch._push_mode(self._off.pop())


def be_on_dispatch_stack_(mode: TorchDispatchMode) -> None:
    """The same for what `WithoutDispatchModes` takes off; others above it are left by whoever aborts the step."""
    if not any(m is mode for m in _get_current_dispatch_mode_stack()):
        _python_dispatch._push_mode(mode)


def _saved_tensors_hooks() -> tuple[object, ...]:
    # Checked on 2.11 and 2.13: the pair entered last, whatever is below it.
    return tuple(torch._C._autograd._top_saved_tensors_default_hooks(True) or ())


class _Same:
    """Equal to itself alone, whatever the object inside makes of equality."""

    __slots__ = ("inside",)

    def __init__(self, inside: object) -> None:
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.inside is self.inside

    def __hash__(self) -> int:
        return id(self.inside)

    def __repr__(self) -> str:
        return type(self.inside).__qualname__


def _precision() -> Hashable:
    """What set_float32_matmul_precision and the fp32_precision settings have set: the former's own getter raises where
    a user has set the latter (checked on 2.13)."""
    backends = torch.backends
    mkldnn = backends.mkldnn
    return (
        backends.cuda.matmul.fp32_precision,
        (mkldnn.matmul.fp32_precision, mkldnn.conv.fp32_precision, mkldnn.rnn.fp32_precision),
    )


def _cuda_ambient() -> Hashable:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    autocast = torch.is_autocast_enabled("cuda")
    return (
        autocast and (torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()),
        torch.cuda.current_device(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        (cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction),
        (cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.preferred_blas_library()),
    )


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Use around a recorded step: attention and encoder layers of torch's ask whether something overrides functions,
    and then leave their fast path, which eager takes where nothing needs a gradient. takeback's modes override none."""
    me = object()
    try:
        with _asking:
            _recordings.append(me)
            overrides.has_torch_function = _is_overridden
        yield
    finally:
        with _asking:
            _recordings[:] = [other for other in _recordings if other is not me]
            if not _recordings:
                overrides.has_torch_function = _has_torch_function


_asking = threading.RLock()
_recordings: list[object] = []  #: that go on, on any thread
_has_torch_function = overrides.has_torch_function


def _is_overridden(arguments: Iterable[object]) -> bool:
    given = tuple(arguments)
    if not _has_torch_function(given):
        return False
    others = (mode for mode in _get_current_function_mode_stack() if not type(mode).__module__.startswith("takeback."))
    return any(True for _ in others) or any(_overrides(type(argument)) for argument in given)


def _overrides(kind: type) -> bool:
    """As torch's C++ asks of an argument. Checked on 2.11 and 2.13."""
    known = getattr(kind, "__torch_function__", torch._C._disabled_torch_function_impl)
    return kind not in (torch.Tensor, torch.nn.Parameter) and known is not torch._C._disabled_torch_function_impl
