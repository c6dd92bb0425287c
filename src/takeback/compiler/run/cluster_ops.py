"""Runs the ops of a cluster one by one on given operands, and gives its results: with eager's kernels, under a tracer,
or in double precision. What a cluster computes is written down here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from takeback.compiler.geometry import path
from takeback.compiler.program import Argument, BufferId, Cluster, Op, Region
from takeback.compiler.schema import schema_of

Call = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]  #: what gives the results of an op for its operands
_Made = dict[BufferId, tuple[Region, torch.Tensor]]  #: what was made so far, and in which region


def run_ops(
    cluster: Cluster,
    operands: Sequence[torch.Tensor],
    call: Call,
    last: Mapping[int, Sequence[BufferId]] | None = None,
) -> list[torch.Tensor]:
    """The results, in whatever strides they come. Operands that the cluster writes are written. `last`: of
    `last_reads`, for who runs it often."""
    made: _Made = {}
    inputs = len(cluster.inputs)
    last = last_reads(cluster) if last is None else last
    for position, op in enumerate(cluster.ops):
        args = tuple(_look(a, operands, made) for a in op.args)
        out = call(op, args, {name: _look(value, operands, made) for name, value in op.kwargs.items()})
        outs = out if isinstance(out, tuple | list) else (out,)
        for region, tensor in zip(op.results, outs, strict=True):
            assert isinstance(region, Region | None)
            if region is not None and region.buffer >= inputs:
                made[region.buffer] = region, tensor
        for b in last.get(position, ()):
            del made[b]
        del args, out, outs
    return [made[r.buffer][1] for r in cluster.results]


# No function inside of `run_ops`: one that calls itself is a cycle, which would keep all it sees until it is collected.
def _look(arg: Argument, operands: Sequence[torch.Tensor], made: _Made) -> Any:
    """What an argument is: an operand, a view of a value, or itself."""
    if isinstance(arg, Region):
        if arg.buffer not in made:
            return operands[arg.buffer]
        whole, tensor = made[arg.buffer]
        if whole.same_place(arg):
            return tensor
        way = path(whole, arg)
        assert way is not None, "a value that is seen through windows has bytes"
        return way.walk(tensor)
    return [_look(a, operands, made) for a in arg] if isinstance(arg, tuple) else arg


def last_reads(cluster: Cluster) -> dict[int, list[BufferId]]:
    """Which values nobody reads after each op."""
    leaving = {r.buffer for r in cluster.results}
    last: dict[BufferId, int] = {}
    for position, op in enumerate(cluster.ops):
        for region in (*op.inputs, *op.outputs):
            last[region.buffer] = position
    found: dict[int, list[BufferId]] = {}
    for b, position in last.items():
        if b >= len(cluster.inputs) and b not in leaving:
            found.setdefault(position, []).append(b)
    return found


def plainly(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Eager's kernel."""
    assert callable(op.target)
    return op.target(*args, **kwargs)


def as_recorded(results: Sequence[torch.Tensor], cluster: Cluster) -> list[torch.Tensor]:
    """The results in the strides in which they were recorded."""
    return [restrided(t, r) for t, r in zip(results, cluster.results, strict=True)]


def restrided(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    if tensor.stride() == region.stride:
        return tensor
    order = sorted(range(len(region.shape)), key=lambda dim: (-region.stride[dim], dim))
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).contiguous().permute(back)


def eagerly(cluster: Cluster) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The cluster with eager's kernels, each of its values in bytes of its own."""

    last = last_reads(cluster)

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        return as_recorded(run_ops(cluster, operands, plainly, last), cluster)

    return run


def in_double(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on operands of double precision, whatever precision it was told."""
    assert callable(op.target)
    args, kwargs = _widened(args), {name: _widened(value) for name, value in kwargs.items()}
    if schema_of(op.target).name in ("_softmax", "_log_softmax") and len(args) > 2:
        args = (*args[:2], False)
    return op.target(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, tuple | list):
        return type(value)(_widened(v) for v in value)
    return value


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in double precision where that means something."""
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor.clone()
