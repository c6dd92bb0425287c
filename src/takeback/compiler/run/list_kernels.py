"""torch's own kernels for lists of tensors, for clusters that are nothing but casts, or sums in place
(passes/bundle.py): one call, of few launches, with the bits that eager's kernels give one by one. Nothing is generated
or compiled.

`torch._foreach_copy_` and `torch._foreach_add_`: checked on 2.11 and 2.13. How many launches a list takes is read in
their MultiTensorApply.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from takeback.compiler.ownership.lists import list_form_of
from takeback.compiler.program import Cluster

ListKernel = Callable[[list[torch.Tensor]], list[torch.Tensor]]

_CHUNK = 65536  #: elements that one block of threads goes over
_MOST_BLOCKS = 320  #: of one launch; built for CUDA 13, torch takes more
_MOST_CASTS, _MOST_SUMS = 64, 110  #: tensors of one launch, for two lists and for one


def list_kernel(cluster: Cluster) -> ListKernel | None:
    """What runs the cluster; None if it is none of these."""
    form = list_form_of(cluster)
    if form is None:
        return None
    return _casts(cluster, form.target) if form.added is None else _sums(form.added)


def _casts(cluster: Cluster, dtype: torch.dtype) -> ListKernel:
    geometry = [(r.shape, r.stride) for r in cluster.results]
    sources = [op.inputs[0].buffer for op in cluster.ops]
    in_order = sources == list(range(len(cluster.inputs)))  # else one tensor is cast twice
    empty, copy_ = torch.empty_strided, torch._foreach_copy_

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        device = operands[0].device
        results = [empty(shape, stride, dtype=dtype, device=device) for shape, stride in geometry]
        copy_(results, operands if in_order else [operands[i] for i in sources])
        return results

    return run


def _sums(added: int) -> ListKernel:
    add_ = torch._foreach_add_

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        add_(operands, added)
        return []

    return run


def launches(cluster: Cluster) -> int:
    """How many at most, on a GPU."""
    most = _MOST_CASTS if cluster.results else _MOST_SUMS
    blocks = sum(math.ceil(r.numel / _CHUNK) for op in cluster.ops for r in op.inputs)
    return max(1, math.ceil(blocks / _MOST_BLOCKS) + math.ceil(len(cluster.ops) / most) - 1)
