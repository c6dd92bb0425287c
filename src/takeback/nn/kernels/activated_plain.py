"""The activated norm's kernels the obvious way, in torch operators: right everywhere, and slow.

What activated_cpu falls back on where there is no compiler. It takes whole activations of scratch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.nn.kernels.width import wide

if TYPE_CHECKING:
    from takeback.nn.kernels.activated import Layer

_IDENTITY, _LEAKY_RELU, _ELU, _RELU = range(4)  # the rest of Activation is SILU


def statistics(x: Tensor, layer: Layer) -> Tensor:
    rows = _by_channel(x, layer).to(wide(x))
    return torch.stack([rows.mean((0, 2)), rows.var((0, 2), correction=0)])


def normalise_(x: Tensor, out: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> None:
    xhat = (_by_channel(x, layer).to(wide(x)) - mean[:, None]) * invstd[:, None]
    _write_(out, layer, _forward(_z(xhat, layer), layer))


def gather_sums(dy: Tensor, saved: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> Tensor:
    dz, xhat = _back(dy, saved, layer, mean, invstd)
    return torch.stack([dz.sum((0, 2)), (dz * xhat).sum((0, 2))])


def put_(
    dy: Tensor, saved: Tensor, out: Tensor, layer: Layer, mean: Tensor, invstd: Tensor, means: Tensor | None
) -> None:
    dz, xhat = _back(dy, saved, layer, mean, invstd)
    if means is not None:
        dz = dz - means[0][:, None] - xhat * means[1][:, None]
    gamma, _ = _parameters(layer, dz)
    _write_(out, layer, (gamma * invstd)[:, None] * dz)


def _back(dy: Tensor, saved: Tensor, layer: Layer, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """dz and xhat as [batch, channels, spots]."""
    g, s = (_by_channel(each, layer).to(wide(dy)) for each in (dy, saved))
    if not layer.from_output:
        xhat = (s - mean[:, None]) * invstd[:, None]
        return g * _derivative(_z(xhat, layer), layer), xhat
    z, derivative = s, torch.ones_like(s)
    if layer.activation == _LEAKY_RELU:
        z, derivative = torch.where(s > 0, s, s / layer.param), torch.where(s > 0, derivative, layer.param)
    elif layer.activation == _ELU:
        ratio = (s / layer.param).clamp(min=torch.finfo(s.dtype).eps - 1, max=0)
        z, derivative = torch.where(s > 0, s, ratio.log1p()), torch.where(s > 0, derivative, s + layer.param)
    gamma, beta = _parameters(layer, s)
    xhat = torch.where(gamma[:, None] == 0, 0.0, (z - beta[:, None]) / gamma[:, None])
    return g * derivative, xhat


def _z(xhat: Tensor, layer: Layer) -> Tensor:
    gamma, beta = _parameters(layer, xhat)
    return xhat * gamma[:, None] + beta[:, None]


def _forward(z: Tensor, layer: Layer) -> Tensor:
    if layer.activation == _IDENTITY:
        return z
    if layer.activation == _LEAKY_RELU:
        return F.leaky_relu(z, layer.param)
    if layer.activation == _ELU:
        return F.elu(z, layer.param)
    return F.relu(z) if layer.activation == _RELU else F.silu(z)


def _derivative(z: Tensor, layer: Layer) -> Tensor:
    ones = torch.ones_like(z)
    if layer.activation == _IDENTITY:
        return ones
    if layer.activation == _LEAKY_RELU:
        return torch.where(z > 0, ones, layer.param)
    if layer.activation == _ELU:
        return torch.where(z > 0, ones, layer.param * z.clamp(max=0).exp())
    if layer.activation == _RELU:
        return torch.where(z > 0, ones, 0.0)
    sigmoid = z.sigmoid()
    return sigmoid * (1 + z * (1 - sigmoid))


def _parameters(layer: Layer, like: Tensor) -> tuple[Tensor, Tensor]:
    """gamma and beta, as wide as `like`."""
    gamma, beta = like.new_ones(layer.channels), like.new_zeros(layer.channels)
    if layer.weight is not None:
        gamma = layer.weight.detach().to(like.dtype)
    if layer.absolute_eps is not None:
        gamma = gamma.abs() + layer.absolute_eps
    if layer.bias is not None:
        beta = layer.bias.detach().to(like.dtype)
    return gamma, beta


def _by_channel(x: Tensor, layer: Layer) -> Tensor:
    """A view as [batch, channels, spots] of the memory that the layer describes."""
    flat = x.detach().as_strided((x.numel(),), (1,))
    if layer.last:
        return flat.view(layer.batch, layer.spots, layer.channels).transpose(1, 2)
    return flat.view(layer.batch, layer.channels, layer.spots)


def _write_(out: Tensor, layer: Layer, value: Tensor) -> None:
    _by_channel(out, layer).copy_(value)
