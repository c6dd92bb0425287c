"""Which kernel `scaled_dot_product_attention` runs on an H200, for fake tensors: torch itself asks the GPU.

As torch 2.13's sources have it for a Hopper GPU with cuDNN 9.15 or later: cuDNN's, flash, memory-efficient, plain math;
the first that is enabled and takes the operands. That 2.11 does the same on the H200 is inferred, not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MOST_CUDNN, _MOST_FLASH = 128, 256  #: elements of a head


@contextlib.contextmanager
def chosen_attention() -> Iterator[None]:
    """In here `scaled_dot_product_attention` on CUDA is `_attention`: below autocast, and above autograd. For the whole
    process: who trains on a GPU in another thread meanwhile gets the kernels that are chosen here."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()  # checked on 2.11 and 2.13


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    kind = choice(query, key, value, attn_mask, is_causal, enable_gqa)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device))
    made: Any
    if kind == "cudnn":
        made = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, False, scale=scale
        )
        return made[0]
    if kind == "flash":
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        padded = [_padded(t, 8) for t in (query, key, value)]
        made = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
        return made[0][..., :width] if width % 8 else made[0]
    if kind == "efficient":
        if mask is not None:
            rows, columns = query.shape[-2], key.shape[-2]
            mask = _padded(mask, 16)[..., :columns] if mask.shape[-1] % 16 else mask
            mask = mask.expand(query.shape[0], query.shape[1], rows, columns)
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
        )
        return made[0]
    made = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return made[0]


def choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    """ "cudnn", "flash", "efficient" or "math"."""
    operands, cuda = (query, key, value), torch.backends.cuda
    if any(t.dim() != 4 or t.numel() == 0 or t.stride(-1) != 1 for t in operands):
        return "math"
    if mask is not None and mask.stride(-1) != 1:  # a bias that lies by heads (T5)
        return "math"
    heads = {t.shape[1] for t in operands}
    if len({t.shape[0] for t in operands}) > 1 or (len(heads) > 1 and not enable_gqa):
        return "math"
    half, width = query.dtype in _HALF, query.shape[-1]
    alike = width == key.shape[-1] == value.shape[-1]
    wants_mask_grad = mask is not None and mask.requires_grad
    if (
        cuda.cudnn_sdp_enabled()
        and half
        and alike
        and width % 8 == 0
        and width <= _MOST_CUDNN
        and query.shape[2] > 1
        and not wants_mask_grad
        and not repeats()
    ):
        return "cudnn"
    square = query.shape[2] == key.shape[2]
    plain = mask is None and (square or not is_causal)
    if cuda.flash_sdp_enabled() and half and alike and width <= _MOST_FLASH and plain:
        return "flash"
    aligned = 8 if half else 4
    fits = width == key.shape[-1] and width % aligned == 0 and value.shape[-1] % aligned == 0
    known = half or query.dtype is torch.float32
    if cuda.mem_efficient_sdp_enabled() and known and fits and len(heads) == 1:
        return "efficient"
    return "math"


def repeats() -> bool:
    """Whether kernels are to give the same bits in each run."""
    asked = torch.are_deterministic_algorithms_enabled()
    return asked and not torch.is_deterministic_algorithms_warn_only_enabled()


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor
