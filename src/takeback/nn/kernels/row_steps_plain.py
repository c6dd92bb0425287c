"""The kernels along rows the obvious way, in torch operators: right everywhere, and slow.

What row_steps_cpu falls back on where there is no compiler. It takes whole activations of scratch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.nn.kernels.width import wide

if TYPE_CHECKING:
    from takeback.nn.kernels.row_steps import Rows


def rms_norm_(x: Tensor, out: Tensor, norm: Rows, eps: float) -> Tensor:
    rows = _rows(x, norm).to(wide(x))
    rstd = torch.rsqrt(rows.square().mean(1) + eps)
    _rows(out, norm).copy_(rows * rstd[:, None] * _weight(norm, rows))
    return rstd


def backward_(dy: Tensor, saved: Tensor, out: Tensor | None, norm: Rows, mean: Tensor | None, rstd: Tensor) -> Tensor:
    g, s = (_rows(each, norm).to(wide(dy)) for each in (dy, saved))
    weight = _weight(norm, s)
    if norm.from_output:
        bias = torch.zeros_like(weight) if norm.bias is None else norm.bias.detach().to(s.dtype)
        xhat = torch.where(weight == 0, 0.0, (s - bias) / weight)
    else:
        xhat = (s if mean is None or not norm.centred else s - mean.view(-1, 1)) * rstd.view(-1, 1)
    sums = torch.stack([g.sum(0), (g * xhat).sum(0)])
    if out is not None:
        inner = g * weight
        dx = inner - xhat * (inner * xhat).mean(1, keepdim=True)
        if norm.centred:
            dx = dx - inner.mean(1, keepdim=True)
        _rows(out, norm).copy_(rstd.view(-1, 1) * dx)
    return sums


def swiglu_(gate: Tensor, up: Tensor, out: Tensor) -> None:
    z, u = (each.detach().to(wide(gate)) for each in (gate, up))
    out.detach().copy_(F.silu(z) * u)


def swiglu_backward_(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    d, z, u = (each.detach().to(wide(gate)) for each in (dy, gate, up))
    sigmoid = z.sigmoid()
    gate_grad, up_grad = d * u * (sigmoid * (1 + z * (1 - sigmoid))), d * (z * sigmoid)
    dgate.detach().copy_(gate_grad)
    dup.detach().copy_(up_grad)


def _rows(x: Tensor, norm: Rows) -> Tensor:
    return x.detach().view(norm.rows, norm.columns)


def _weight(norm: Rows, like: Tensor) -> Tensor:
    return like.new_ones(norm.columns) if norm.weight is None else norm.weight.detach().to(like.dtype).view(-1)
