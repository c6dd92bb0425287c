"""What must still hold for a plan to be used: Python values, tensors where they were, no new hooks, the same modes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from takeback.compiler.capture.assumptions import Assumptions
from takeback.compiler.capture.hooks import GLOBAL_HOOKS
from takeback.compiler.capture.subject import Subject


def ambient() -> Hashable:
    """The global modes that decide which kernels eager would run."""
    autocast = torch.is_autocast_enabled("cpu")
    return (
        _cuda_ambient() if torch.cuda.is_initialized() else None,
        autocast and (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        _precision(),
        torch.backends.mkldnn.enabled,
        # These flags are named after CUDA and rule the CPU's attention too.
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


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


class Watch:
    """Compared before every replay; costs a few list walks."""

    def __init__(self, subject: Subject, assumptions: Assumptions, leaves: Sequence[torch.Tensor]) -> None:
        self.parameters = subject.parameters
        self._assumptions = assumptions
        watched = {id(t): t for t in (*subject.parameters, *subject.model.buffers(), *assumptions.tensors)}
        self._tensors = [
            (t, t.data_ptr(), t.stride(), t.requires_grad) for t in watched.values() if t.layout is torch.strided
        ]
        # A batch tensor that the model or loss_fn holds as well: which of the two was read is not known, so the plan is
        # for this very tensor.
        reachable = {id(t) for t in assumptions.tensors}
        self._pinned = [(i, t) for i, t in enumerate(leaves) if id(t) in reachable]
        self._hooked = [t for t in watched.values() if t.requires_grad and t.is_leaf]

    def change(self, leaves: Sequence[torch.Tensor]) -> str | None:
        """None while the plan may be used; else what is different."""
        for kind in GLOBAL_HOOKS:
            if getattr(torch.nn.modules.module, kind):
                return "there is a global module hook"
        for i, tensor in self._pinned:
            if leaves[i] is not tensor:
                return f"batch tensor {i}, which the model or loss_fn holds too, is another one"
        for tensor, address, stride, needs_grad in self._tensors:
            if tensor.data_ptr() != address or tensor.stride() != stride:
                return "a tensor was given other memory"
            if tensor.requires_grad is not needs_grad:
                return "requires_grad of a tensor changed"
        for tensor in self._hooked:
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return "a parameter got a hook"
        return self._assumptions.change()
