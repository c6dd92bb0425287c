"""One norm's backward as plain data: checked by `norms.py`, computed by `norms_cpu.py` and `norms_cuda.py`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor


class Norm(enum.IntEnum):
    """What is computed, over which layout. The numbers are those of norms.cpp."""

    LAYER = 0
    RMS = 1
    BATCH = 2  #: of N × C × S
    BATCH_LAST = 3  #: of N × S × C: channels last
    GROUP = 4


@dataclass(frozen=True)
class Into:
    """Where a parameter's gradient goes: a contiguous slice, overwritten or added onto."""

    slice: Tensor
    accumulate: bool = False


@dataclass(frozen=True)
class NormCall:
    """Everything lies dense in the layout that `norm` names; mean and rstd are as wide as the arithmetic.

    layer_norm and rms_norm are rows of `channels` elements: `batch` rows, one spot.
    """

    norm: Norm
    dy: Tensor
    x: Tensor
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    dx: Tensor | None  #: written where it is given
    weight_grad: Into | None
    bias_grad: Into | None
    batch: int
    channels: int
    spots: int = 1
    groups: int = 1
    eps: float = 0.0
    training: bool = True
