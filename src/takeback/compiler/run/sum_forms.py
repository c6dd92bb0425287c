"""Sums over all rows of a tensor in two stages: of each part along the first dimension, then of these.

A bias's gradient is such a sum, and a batch norm's backward takes two. Inductor splits it as it likes, into sums over
some rows each: loops that no kernel has which makes the rows, so that they are written first and read again. Split
where the first dimension ends, the sum has the loops of what it adds up, and both become one kernel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from takeback.compiler.ownership.facts import COPY
from takeback.compiler.program import Cluster, Op, Region, Special
from takeback.compiler.run.cluster_ops import plainly
from takeback.compiler.schema import schema_of

Shapes = Mapping[int, tuple[int, ...]]  #: by the number of elements

_LEAST = 8192  #: sums that are formed side by side, or a GPU would wait: Inductor splits further by itself
#: Ops that add up along rows. Inductor can go over rows and columns in one kernel where it splits the sums itself.
_ALONG_ROWS = frozenset(
    (
        *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        *("native_group_norm", "native_group_norm_backward"),
        *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
    )
)
_BATCH_NORMS = {"native_batch_norm": 0, "native_batch_norm_backward": 1}  #: where its input is among its operands
_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "var_mean", "var", "std", "logsumexp", "prod"))


def adds_up_rows(cluster: Cluster) -> bool:
    """Whether something is added up along the last dimension."""
    return any(map(_adds_up_rows, cluster.ops))


def adds_up_columns(cluster: Cluster) -> bool:
    """Whether all that is added up is, for each of several numbers that lie together, over others that do not."""
    found = [reduced for op in cluster.ops if (reduced := _reduced(op)) is not None]
    return bool(found) and not adds_up_rows(cluster) and all(_keeps_fastest(*reduced) for reduced in found)


def columns_of(cluster: Cluster) -> int | None:
    """How many numbers lie together for which something is added up, where all are so many and nothing else is."""
    if not adds_up_columns(cluster):
        return None
    regions = [reduced[0] for op in cluster.ops if (reduced := _reduced(op)) is not None]
    [count, *others] = dict.fromkeys(region.shape[d] for region in regions for d in _fastest(region))
    return None if others else count


def _adds_up_rows(op: Op) -> bool:
    if _name(op) in _ALONG_ROWS:
        return True
    reduced = _reduced(op)
    return reduced is not None and _name(op) in _REDUCTIONS and len(reduced[0].shape) - 1 in reduced[1]


def _reduced(op: Op) -> tuple[Region, tuple[int, ...]] | None:
    """What an op adds up, and over which dimensions; None if it adds nothing up."""
    name = _name(op)
    if name in _BATCH_NORMS:
        x = op.args[_BATCH_NORMS[name]]
        assert isinstance(x, Region)
        return x, tuple(d for d in range(len(x.shape)) if d != 1)
    given = op.args[0] if op.args else None
    if name not in _REDUCTIONS or not isinstance(given, Region):
        return None
    dims = op.args[1] if len(op.args) > 1 else None
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    some = [d % len(given.shape) for d in dims if isinstance(d, int)] if isinstance(dims, tuple) and given.shape else []
    return given, tuple(sorted(some or range(len(given.shape))))


def _keeps_fastest(region: Region, dims: Sequence[int]) -> bool:
    fastest = _fastest(region)
    return bool(fastest) and not set(fastest) & set(dims)


def _fastest(region: Region) -> list[int]:
    return [d for d, (n, step) in enumerate(zip(region.shape, region.stride, strict=True)) if n > 1 and step == 1]


def _name(op: Op) -> str:
    assert not isinstance(op.target, Special)
    return schema_of(op.target).name


def common_shapes(cluster: Cluster) -> Shapes:
    """For tensors of so many elements that lie one after the other: the shape that most of them have, of three or more
    dimensions. Kernels become one where they have the same loops."""
    seen: dict[int, Counter[tuple[int, ...]]] = {}
    for op in cluster.ops:
        for region in (*op.inputs, *op.outputs):
            if len(region.shape) > 2 and region.contiguous:
                seen.setdefault(region.numel, Counter())[region.shape] += 1
    return {count: shapes.most_common(1)[0][0] for count, shapes in seen.items()}


def in_common_shape(op: Op, shapes: Shapes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """An op that treats every element by itself, in the shape that others have. None if that is not what it is, or if
    it is in that shape."""
    assert not isinstance(op.target, Special)
    if torch.Tag.pointwise not in op.target.tags and op.target not in COPY:
        return None
    result = op.outputs[0]
    shape = shapes.get(result.numel, result.shape)
    if shape == result.shape or len(op.outputs) > 1 or op.mutates:
        return None
    if any(r.shape != result.shape or not r.contiguous for r in (result, *op.inputs)):
        return None
    seen = tuple(a.reshape(shape) if isinstance(a, torch.Tensor) else a for a in args)
    made: torch.Tensor = plainly(op, seen, kwargs)
    return made.reshape(result.shape)


def sum_of_rows(
    op: Op, made: Region, shapes: Shapes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """A sum over the first dimension and others, of a tensor that the cluster makes. Where it is over all rows, it is
    taken in the dimensions in which that was `made`, or which others of its size have. None if that is not what the op
    is."""
    reduced = _reduced(op)
    if reduced is None or not _keeps_fastest(*reduced):
        return None
    given, dims = reduced
    x, over = args[0], list(dims)
    if given.contiguous and dims == tuple(range(len(dims))):
        rows = math.prod(given.shape[: len(dims)])
        own = made.shape if made.contiguous and made.numel == given.numel else ()
        for shape in (own, shapes.get(given.numel, ())):
            leading = next((k for k in range(2, len(shape)) if math.prod(shape[:k]) == rows), None)
            if leading is not None:
                x, over = x.reshape(shape), list(range(leading))
                break
    total = two_stages(x, over, kwargs.get("dtype"))
    return None if total is None else total.reshape(op.outputs[0].shape)


def two_stages(x: torch.Tensor, dims: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """The sum over dimensions of which the first is 0; None where it is not worth it."""
    if not worth(x, dims):
        return None
    result = dtype or x.dtype
    wide = torch.float32 if result.itemsize < 4 else result
    return x.sum(list(dims[1:]), dtype=wide).sum(0).to(result)


def worth(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether a sum over these dimensions can be taken in two stages, and enough sums are formed side by side."""
    if len(dims) < 2 or dims[0] != 0 or not x.is_floating_point():
        return False
    beside = int(x.numel()) // max(1, math.prod(int(x.shape[d]) for d in dims[1:]))
    return beside >= _LEAST
