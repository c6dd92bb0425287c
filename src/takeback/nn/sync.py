"""Statistics and sums over a process group: every rank's part is weighed by its number of elements, which may be 0.

All ranks of the group must come here alike. Numbers travel as float64, so counts are exact and every rank gets the same
bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from takeback.errors import ReduceError


def group_of(group: Any) -> Any:
    """The process group to use; raises `ReduceError` where there is none, rather than going on by itself."""
    if not dist.is_available() or not dist.is_initialized():
        raise ReduceError(
            "InPlaceABNSync takes statistics over a process group, and torch.distributed has none: call "
            "torch.distributed.init_process_group() before training, or use InPlaceABN for one process."
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ReduceError("this rank is not a member of InPlaceABNSync's group. Use it on the group's ranks only.")
    return group


def reduce_statistics(mean: Tensor, variance: Tensor, count: int, group: Any) -> tuple[Tensor, Tensor, int]:
    """Mean, biased variance and number of elements of all ranks' batches together."""
    own = torch.cat([mean.double(), variance.double(), mean.new_full((1,), count, dtype=torch.float64)])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    table = torch.stack(every)
    counts, channels = table[:, -1:], len(mean)
    means, variances = table[:, :channels], table[:, channels:-1]
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    together = (shares * means).sum(0)
    spread = (shares * (variances + (means - together) ** 2)).sum(0)
    return together.to(mean.dtype), spread.to(variance.dtype), int(total)


def reduce_sums(sums: Tensor, group: Any) -> Tensor:
    """The sums over all ranks; `sums` itself stays as it is."""
    total = sums.double()
    dist.all_reduce(total, group=group)
    return total.to(sums.dtype)
