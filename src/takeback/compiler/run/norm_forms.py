"""Forms in which norms are traced for Inductor, so that their kernels go over memory as seldom as they can.

A batch norm's backward adds up over all rows: in two stages (sum_forms.py), where the gradient that it is given is
written by the same kernels. What it makes of the sums is traced as a matrix, or Inductor would go over it in the order
of the sums. Where a layer norm's rows lie in another order than its dimensions name them, Inductor is told to leave
loops as they are: it would go over them in both orders.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from takeback.compiler.program import Cluster, Op, Region, Special
from takeback.compiler.run.sum_forms import worth
from takeback.compiler.schema import schema_of

#: Layer norms by name: where the input, and the shape that is normalised, are among the operands.
_LAYER_NORMS = {"native_layer_norm": (0, 1), "native_layer_norm_backward": (1, 2)}


def lies_turned(cluster: Cluster) -> bool:
    """Whether a layer norm is of rows that lie in another order than their dimensions name them, as they come out of
    nn.MultiheadAttention with batch_first: some kernels would go over them in one order, some in the other."""
    for op in cluster.ops:
        assert not isinstance(op.target, Special)
        places = _LAYER_NORMS.get(schema_of(op.target).name)
        if places is not None:
            given, shape = (op.args[place] for place in places)
            assert isinstance(given, Region)
            assert isinstance(shape, tuple)
            if _is_turned(given, len(given.shape) - len(shape)):
                return True
    return False


def _is_turned(region: Region, leading: int) -> bool:
    """Of a tensor without gaps, its first dimensions are in another order, and the last ones where they belong."""
    order = sorted(range(leading), key=lambda dim: (-region.stride[dim], dim))
    dims = (*order, *range(leading, len(region.shape)))
    lies = replace(region, shape=tuple(region.shape[d] for d in dims), stride=tuple(region.stride[d] for d in dims))
    return order != list(range(leading)) and lies.contiguous


def batch_norm_backward(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Of a training batch norm whose channels lie together; None for any other."""
    grad, x, weight, _, _, mean, invstd, training, _, mask = args
    given = op.args[1]
    assert isinstance(given, Region)
    dims = (0, *range(2, x.dim()), 1)
    last = replace(given, shape=tuple(given.shape[d] for d in dims), stride=tuple(given.stride[d] for d in dims))
    if not training or not last.contiguous or given.contiguous:
        return None
    wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    places = [1, x.shape[1], *(1 for _ in range(x.dim() - 2))]
    count = x.numel() // x.shape[1]
    over = list(dims[:-1])
    if not worth(x, over):
        return None
    parts = grad.to(wide), grad.to(wide) * (x.to(wide) - mean.reshape(places))
    total, product = torch.stack([part.sum(over[1:]) for part in parts]).sum(1)  # side by side: one kernel adds both up

    def matrix(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(*dims).reshape(count, x.shape[1]).to(wide)

    share = (matrix(x) - mean) * (product / count * invstd * invstd)
    scale = invstd if weight is None else invstd * weight
    made = ((matrix(grad) - share - total / count) * scale).to(x.dtype)
    back = [dims.index(d) for d in range(x.dim())]
    into = made.reshape([x.shape[d] for d in dims]).permute(*back)
    like = x.dtype if weight is None else weight.dtype
    return (
        into if mask[0] else None,
        (product * invstd).to(like) if mask[1] else None,
        total.to(like) if mask[2] else None,
    )
