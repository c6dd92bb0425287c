"""Forms in which ops of a cluster are traced for Inductor, where its own would move more memory than the cluster needs.

The gradient of a cross-entropy with respect to its logits is a softmax, less one in the target's place. Inductor writes
the ones into zeros as large as the logits in single precision, and adds each row up again; here both are computed where
they are used.
"""

from __future__ import annotations

from typing import Any

import torch

from takeback.compiler.program import BufferId, Cluster, Op, Region
from takeback.compiler.run.cluster_ops import Call, plainly
from takeback.compiler.schema import schema_of

_MEAN = 1  #: torch's number for reduction="mean"


def forms(cluster: Cluster) -> Call:
    """What gives the results of an op under the tracer, for one run over the cluster's ops."""
    sums: dict[BufferId, torch.Tensor] = {}  # of each row, where they are known
    whole = {r.buffer: r for op in cluster.ops for r in op.outputs}

    def call(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert not isinstance(op.target, Cluster)
        name = schema_of(op.target).name
        if name == "nll_loss_backward" and args[1].dim() == 2:
            made, row = _ones_less(*args)
            sums[op.outputs[0].buffer] = row
            return made
        if name == "_log_softmax_backward_data" and args[1].dim() == 2 and args[2] in (1, -1):
            given = op.args[0]
            if isinstance(given, Region) and given.buffer in sums and whole[given.buffer].same_place(given):
                return (args[0] - torch.exp(args[1]) * sums[given.buffer]).to(args[3])
        return plainly(op, args, kwargs)

    return call


def _ones_less(
    grad: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """nll_loss_backward as a choice in each place, and the sum of each row, which is its one number."""
    target = target.unsqueeze(1)
    there = target != ignored
    row = -(grad / total if reduction == _MEAN else grad)
    row = row.unsqueeze(1) if row.dim() else row
    if weight is not None:
        row = row * weight[torch.where(there, target, 0)]
    row = torch.where(there, row, 0).to(log_probabilities.dtype)
    places = torch.arange(log_probabilities.shape[1], device=target.device)
    return torch.where(places == target, row, 0), row
