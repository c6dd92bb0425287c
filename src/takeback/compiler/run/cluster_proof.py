"""Compares a generated kernel with double precision on the operands of its first use, and says whether it may be used.

It may be no further off than twice what eager's kernels are, and a few units in the last place: as a whole, by the
norm, and in each place, by the largest number. Whole numbers and truth values may differ where eager's do, and in one
of a thousand places: what is near a boundary falls on either side. Results have bytes of their own, in the strides that
were recorded, and no operand changes but those that the cluster writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from takeback.compiler.program import Cluster
from takeback.compiler.run.cluster_ops import in_double, plainly, run_ops, wide
from takeback.compiler.run.proof import Bits, same

TIMES = 2.0  #: eager's own distance from double precision
UNITS = 16.0  #: in the last place, of the norm: what a long sum loses in another order, added up in single precision
UNITS_OF_HALVES = 4.0  #: of half precision, whose sums are in single
STRAYS = 1e-3  #: of whole numbers that may differ


def what_is_wrong(
    cluster: Cluster, kernel: Callable[[list[torch.Tensor]], Any], operands: Sequence[torch.Tensor]
) -> str | None:
    """None if the kernel is right on these operands, which stay as they are; else what is not, in words."""
    with torch.no_grad():
        mine = [_copy(t) for t in operands]
        found = _outcome(cluster, mine, kernel(list(mine)))
        wrong = _geometry(cluster, found) or _sharing(found, mine) or _overwritten(cluster, mine, operands)
        del mine
        if wrong is not None:
            return wrong
        theirs = [_copy(t) if i in cluster.writes else t for i, t in enumerate(operands)]
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
        found = kernel([_copy(t) for t in operands])
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


def drawn(cluster: Cluster, device: torch.device) -> list[torch.Tensor]:
    """Operands for a cluster: numbers between 0.1 and 1.1, of which logarithms and roots exist, truth values, and
    zeros for whole numbers, which may be indices."""
    generator = torch.Generator(device).manual_seed(0)
    made: list[torch.Tensor] = []
    for region in cluster.inputs:
        reach = 1 + sum((n - 1) * step for n, step in zip(region.shape, region.stride, strict=True))
        span = torch.rand(reach if region.numel else 0, generator=generator, device=device)
        if region.dtype is torch.bool:
            span = span < 0.5
        elif region.dtype.is_floating_point:
            span = (span + 0.1).to(region.dtype)
        else:
            span = torch.zeros_like(span, dtype=region.dtype)
        made.append(span.as_strided(region.shape, region.stride))
    return made


def _copy(operand: torch.Tensor) -> torch.Tensor:
    """The same in bytes of its own, in the same strides: a kernel is made for these."""
    reach = 1 + sum((n - 1) * step for n, step in zip(operand.shape, operand.stride(), strict=True))
    span = operand.as_strided((reach if operand.numel() else 0,), (1,))
    return span.clone().as_strided(operand.shape, operand.stride())


def _outcome(cluster: Cluster, operands: Sequence[torch.Tensor], results: Any) -> list[torch.Tensor]:
    return [*results, *(operands[i] for i in cluster.writes)]


def _geometry(cluster: Cluster, found: Sequence[torch.Tensor]) -> str | None:
    for number, region in enumerate(cluster.results):
        tensor = found[number]
        if tuple(tensor.shape) != region.shape or tensor.dtype != region.dtype:
            return f"result {number} is {tensor.dtype}{list(tensor.shape)}, not {region.dtype}{list(region.shape)}"
        lies = [step for n, step in zip(region.shape, tensor.stride(), strict=True) if n != 1]
        if lies != [step for n, step in zip(region.shape, region.stride, strict=True) if n != 1]:
            return f"result {number} has the strides {list(tensor.stride())}, not {list(region.stride)}"
    return None


def _sharing(found: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> str | None:
    """Whether two results are in the same bytes, or one in those of an operand that it is not."""
    taken: dict[int, torch.Tensor] = {t.untyped_storage().data_ptr(): t for t in operands if t.numel()}
    for number, tensor in enumerate(found):
        start = tensor.untyped_storage().data_ptr()
        if tensor.numel() and taken.setdefault(start, tensor) is not tensor:
            return f"result {number} shares its bytes with an operand or another result"
    return None


def _overwritten(cluster: Cluster, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> str | None:
    """Whether an operand changed that the cluster does not write, by its bits: NaNs are no news."""
    for number, (now, then) in enumerate(zip(after, before, strict=True)):
        if number not in cluster.writes and not same(Bits(one_nan=True), then, now):
            return f"it overwrites operand {number}"
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
    if not ours.numel():
        return None
    ours_wide, eager_wide = ours.double(), eager.double()
    finite = truth.isfinite() & eager_wide.isfinite()
    if not bool((ours_wide.isfinite() | ~finite).all()):
        return "is not finite where eager's is"
    agreed = ((eager_wide == truth) | (eager_wide.isnan() & truth.isnan())) & ~finite
    if not bool(((ours_wide == truth) | (ours_wide.isnan() & truth.isnan()) | ~agreed).all()):
        return "is not the infinity, or NaN, that eager's is"
    zero = torch.zeros((), dtype=torch.float64, device=truth.device)
    truth = truth.where(finite, zero)
    ours_wide, eager_wide = ours_wide.where(finite, zero) - truth, eager_wide.where(finite, zero) - truth
    units = UNITS_OF_HALVES if ours.element_size() == 2 else UNITS
    for name, order in (("norm", 2), ("largest", math.inf)):
        mine, theirs, all_of_it = (float(torch.linalg.vector_norm(t, order)) for t in (ours_wide, eager_wide, truth))
        if mine > TIMES * theirs + units * torch.finfo(ours.dtype).eps * all_of_it:
            return f"is {mine:.3g} from double precision, eager's kernels {theirs:.3g} ({name} {all_of_it:.3g})"
    return None
