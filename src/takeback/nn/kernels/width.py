"""How wide the kernels compute: one rule for all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(of: Tensor | torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    dtype = of.dtype if isinstance(of, Tensor) else of
    return torch.float64 if dtype == torch.float64 else torch.float32
