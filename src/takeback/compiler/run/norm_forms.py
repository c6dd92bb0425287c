"""Forms in which norms are traced for Inductor, so that their kernels go over memory as seldom as they can.

A batch norm's backward adds up over all rows: in two stages (sum_forms.py), where the gradient that it is given is
written by the same kernels. What it makes of the sums is traced as a matrix, or Inductor would go over it in the order
of the sums. A layer norm of a tensor whose rows lie in another order than its dimensions name them is traced in the
order in which they lie: Inductor would go over them in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from takeback.compiler.program import Op, Region
from takeback.compiler.run.cluster_ops import plainly
from takeback.compiler.run.sum_forms import worth

#: Layer norms by name: where the input, and the shape that is normalised, are among the operands.
LAYER_NORMS = {"native_layer_norm": (0, 1), "native_layer_norm_backward": (1, 2)}


def layer_norm(op: Op, name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A layer norm, or its backward, in the order of its rows; None where that is the order of its dimensions."""
    x, shape = LAYER_NORMS[name]
    given = op.args[x]
    assert isinstance(given, Region)
    order = _order(given, rows=len(args[shape]))
    if order is None:
        return None
    back = [order.index(dim) for dim in range(len(order))]
    turned = [a.permute(*order) if isinstance(a, torch.Tensor) and a.dim() == len(order) else a for a in args]
    found = plainly(op, tuple(turned), {})
    return tuple(t.permute(*back) if t is not None and t.dim() == len(order) else t for t in found)


def _order(region: Region, rows: int) -> tuple[int, ...] | None:
    """The dimensions in the order in which they lie, where that is another one than they are named in, for a tensor
    without gaps whose last `rows` dimensions are where they belong; else None."""
    count = len(region.shape) - rows
    order = sorted(range(count), key=lambda dim: (-region.stride[dim], dim))
    if order == list(range(count)):
        return None
    dims = (*order, *range(count, len(region.shape)))
    lies = replace(region, shape=tuple(region.shape[d] for d in dims), stride=tuple(region.stride[d] for d in dims))
    return dims if lies.contiguous else None


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
