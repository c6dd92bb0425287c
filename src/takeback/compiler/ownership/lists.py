"""Which ops do to one tensor what a kernel of torch's does to a list of them, with the same arithmetic: casts that
change nothing but the dtype, and whole numbers that are added in place. In: an op, or a cluster. Out: what is done to
each tensor of the list, or None.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from takeback.compiler.program import Cluster, Op, Region

aten = torch.ops.aten

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


@dataclass(frozen=True, slots=True)
class ListForm:
    """What is done to every tensor of a list: read as `source` and written as `target`, or in place with `added` on top
    of it."""

    source: torch.dtype
    target: torch.dtype
    added: int | None = None

    def __str__(self) -> str:
        return f"{_short(self.source)} to {_short(self.target)}" if self.added is None else f"+= {self.added}"


def list_form(op: Op) -> ListForm | None:
    """Of one op: tensors that lie alike and dense, which is when torch's kernels take them as a list."""
    if op.target is aten._to_copy.default:
        return _cast(op)
    if op.target is aten.add_.Tensor:
        return _sum(op)
    return None


def _cast(op: Op) -> ListForm | None:
    if len(op.inputs) != 1 or len(op.outputs) != 1 or op.mutates or op.kwargs.get("pin_memory"):
        return None
    [given], [made] = op.inputs, op.outputs
    if not {given.dtype, made.dtype} <= _FLOATS or given.dtype is made.dtype:
        return None
    if (given.shape, given.stride) != (made.shape, made.stride) or not given.packed or not given.numel:
        return None
    return ListForm(given.dtype, made.dtype)


def _sum(op: Op) -> ListForm | None:
    if len(op.args) != 2 or op.kwargs:
        return None
    tensor, number = op.args
    if not isinstance(tensor, Region) or type(number) is not int or op.mutates != (tensor.buffer,):
        return None
    if tensor.dtype is not torch.int64 or not tensor.packed or not tensor.numel or op.outputs != (tensor,):
        return None
    return ListForm(tensor.dtype, tensor.dtype, number)


def list_form_of(cluster: Cluster) -> ListForm | None:
    """Of a cluster that does the same to several tensors that come in, and to nothing else."""
    forms = {list_form(op) for op in cluster.ops}
    if len(cluster.ops) < 2 or len(forms) != 1:
        return None
    [form] = forms
    come_in = {r.buffer for r in cluster.inputs}
    if any(r.buffer not in come_in for op in cluster.ops for r in op.inputs):
        return None
    made = [r for op in cluster.ops for r in op.outputs if r.buffer not in op.mutates]
    written = [b for op in cluster.ops for b in op.mutates]
    if tuple(made) != cluster.results or len(written) != len(set(written)):
        return None
    return form


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
