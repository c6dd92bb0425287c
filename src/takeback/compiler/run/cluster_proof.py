"""Compares a generated kernel with double precision on the operands of its first use, and says whether it may be used.

It may be no further off than twice what eager's kernels are, and a few units in the last place of the result's norm.
Whole numbers and truth values may differ where eager's do, and in one of a thousand places: what is near a boundary
falls on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from takeback.compiler.program import Cluster
from takeback.compiler.run.cluster_ops import in_double, plainly, run_ops, wide

TIMES = 2.0  #: eager's own distance from double precision
UNITS = 4.0  #: in the last place, of the norm
STRAYS = 1e-3  #: of whole numbers that may differ


def what_is_wrong(
    cluster: Cluster, kernel: Callable[[list[torch.Tensor]], Any], operands: Sequence[torch.Tensor]
) -> str | None:
    """None if the kernel is right on these operands, which stay as they are; else what is not, in words."""
    with torch.no_grad():
        mine = _own(cluster, operands)
        found = _outcome(cluster, mine, kernel(list(mine)))
        wrong = _geometry(cluster, found)
        if wrong is not None:
            return wrong
        theirs = _own(cluster, operands)
        eager = _outcome(cluster, theirs, run_ops(cluster, theirs, plainly))
        exact = [wide(t) for t in operands]
        truth = _outcome(cluster, exact, run_ops(cluster, exact, in_double))
    for number, (ours, plain, true) in enumerate(zip(found, eager, truth, strict=True)):
        wrong = _distance(ours, plain, true)
        if wrong is not None:
            return f"result {number}, {_name(cluster, number)}, {wrong}"
    return None


def shaped(
    cluster: Cluster, kernel: Callable[[list[torch.Tensor]], Any], operands: Sequence[torch.Tensor]
) -> Callable[[list[torch.Tensor]], Any]:
    """The kernel with its results in the shapes that were recorded: Inductor of 2.11 leaves out dimensions of extent 1
    where it sums over rows and columns at once."""
    with torch.no_grad():
        found = kernel(_own(cluster, operands))
    regions = dict(enumerate(cluster.results))
    others = [i for i, r in regions.items() if tuple(found[i].shape) != r.shape and found[i].numel() == r.numel]
    others = [i for i in others if found[i].is_contiguous()]
    if not others:
        return kernel

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        results = list(kernel(operands))
        for i in others:
            results[i] = results[i].view(regions[i].shape)
        return results

    return run


def _own(cluster: Cluster, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands, with copies of what the cluster writes."""
    return [t.clone() if i in cluster.writes else t for i, t in enumerate(operands)]


def _outcome(cluster: Cluster, operands: Sequence[torch.Tensor], results: Any) -> list[torch.Tensor]:
    return [*results, *(operands[i] for i in cluster.writes)]


def _geometry(cluster: Cluster, found: Sequence[torch.Tensor]) -> str | None:
    for number, region in enumerate(cluster.results):
        tensor = found[number]
        if tuple(tensor.shape) != region.shape or tensor.dtype != region.dtype:
            return f"result {number} is {tensor.dtype}{list(tensor.shape)}, not {region.dtype}{list(region.shape)}"
    return None


def _name(cluster: Cluster, number: int) -> str:
    if number >= len(cluster.results):
        return "which it writes in place"
    wanted = cluster.results[number].buffer
    return next(f"of {op.name}" for op in cluster.ops if any(r.buffer == wanted for r in op.outputs))


def _distance(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> str | None:
    if not ours.is_floating_point():
        strays, others = int((ours != truth).sum()), int((eager != truth).sum())
        if strays <= TIMES * others + STRAYS * ours.numel():
            return None
        return f"differs from double precision in {strays:,} of {ours.numel():,} places, eager's kernels in {others:,}"
    ours_wide, eager_wide = ours.double(), eager.double()
    finite = truth.isfinite() & eager_wide.isfinite()
    if not bool((ours_wide.isfinite() | ~finite).all()):
        return "is not finite where eager's is"
    zero = torch.zeros((), dtype=torch.float64, device=truth.device)
    truth = truth.where(finite, zero)
    mine = float((ours_wide.where(finite, zero) - truth).norm())
    theirs = float((eager_wide.where(finite, zero) - truth).norm())
    floor = UNITS * torch.finfo(ours.dtype).eps * float(truth.norm())
    if mine <= TIMES * theirs + floor:
        return None
    return f"is {mine:.3g} from double precision, eager's kernels {theirs:.3g} (norm {float(truth.norm()):.3g})"
