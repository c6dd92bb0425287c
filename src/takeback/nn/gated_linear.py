"""act(gate) * up, and the linear layer after it, that keep gate and up alone; their gradients are written onto them.

torch keeps act(gate) and the product too. Here both are made again in backward, from what is kept: reading two buffers
costs less than keeping two more. silu has kernels of its own; gelu, relu and any other function of single elements
are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from takeback import engine
from takeback.nn import ops, owner
from takeback.nn.owner import Copies

Activate = Callable[[Tensor], Tensor]

NAMED: dict[str, Activate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Gating:
    """What a call computes besides its tensors."""

    activation: str | Activate
    copies: Copies
    gate_first: bool = True  #: where one tensor holds both halves

    def pair(self, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
        """gate and up; up None: they are halves of one tensor."""
        if up is not None:
            return gate, up
        first, second = gate.chunk(2, -1)
        return (first, second) if self.gate_first else (second, first)


def gated(
    gate: Tensor,
    up: Tensor | None = None,
    activation: str | Activate = "silu",
    *,
    gate_first: bool = True,
    copies: Copies | None = None,
) -> Tensor:
    """act(gate) * up; without `up`, the last dimension of gate is both, side by side.

    `activation` is "silu", "gelu", "gelu_tanh", "relu", "sigmoid", or a function that needs nothing but its argument.
    """
    return _apply(gate, up, None, None, Gating(activation, owner.ELSEWHERE if copies is None else copies, gate_first))


def gated_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | Activate = "silu",
    *,
    gate_first: bool = True,
    copies: Copies | None = None,
) -> Tensor:
    """F.linear(act(gate) * up, weight, bias), of which the product is not kept either."""
    how = Gating(activation, owner.ELSEWHERE if copies is None else copies, gate_first)
    return _apply(gate, up, weight, bias, how)


def _apply(gate: Tensor, up: Tensor | None, weight: Tensor | None, bias: Tensor | None, how: Gating) -> Tensor:
    if isinstance(how.activation, str) and how.activation not in NAMED:
        raise ValueError(f"unknown activation {how.activation!r}; there are {', '.join(NAMED)}, or give a function")
    if up is None and (gate.dim() < 1 or gate.shape[-1] % 2):
        raise ValueError(f"gate and up in one tensor need an even last dimension, got shape {tuple(gate.shape)}")
    alike = up is None or all(getattr(gate, name) == getattr(up, name) for name in ("shape", "dtype", "device"))
    ours = alike and gate.dim() and gate.dtype in ops.DTYPES
    if not ours or torch.compiler.is_compiling() or engine.transformed():
        first, second = how.pair(gate, up)
        product = _activated(first, how.activation) * second  # shapes that broadcast are torch's to handle
        return product if weight is None else F.linear(product, weight, bias)
    return GatedLinear.apply(gate, up, weight, bias, how)


class GatedLinear(torch.autograd.Function):
    """act(gate) * up, and a linear layer of it where there is a weight."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, weight: Tensor | None, bias: Tensor | None, how: Gating
    ) -> Tensor:
        ctx.how, ctx.alone = how, 1 if up is None else 2
        ctx.bias_dtype = None if bias is None else bias.dtype
        owner.keep(ctx, gate, up, weight, alone=2)
        product = _product(*how.pair(gate, up), how.activation)
        if weight is None:
            return product
        ctx.dtype = product.dtype
        if torch.is_autocast_enabled(gate.device.type) and gate.dtype != torch.float64:
            ctx.dtype = torch.get_autocast_dtype(gate.device.type)
        with torch.autocast(gate.device.type, enabled=False):
            return F.linear(product.to(ctx.dtype), weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (*kept, weight), why = owner.take(ctx, ctx.alone)
        how: Gating = ctx.how
        gate, up = how.pair(kept[0], kept[1] if ctx.alone == 2 else None)
        if why is None and not all(each.is_contiguous() for each in kept):
            why = "a kept input is not contiguous"
        wants_pair = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        of_weight = of_bias = None
        with torch.autocast(gate.device.type, enabled=False):
            if weight is not None:
                rows = dy.reshape(-1, dy.shape[-1]).to(ctx.dtype)
                product = None
                if ctx.needs_input_grad[2]:
                    product = _product(gate, up, how.activation).to(ctx.dtype).view(-1, gate.shape[-1])
                    of_weight = torch.mm(rows.t(), product).to(weight.dtype)
                if ctx.needs_input_grad[3]:
                    of_bias = rows.sum(0).to(ctx.bias_dtype)
                if wants_pair:  # the product has served: its gradient takes its bytes
                    factor = weight.to(ctx.dtype)
                    made = torch.mm(rows, factor) if product is None else torch.mm(rows, factor, out=product)
                    dy = made.view(gate.shape).to(gate.dtype)
            if not wants_pair:
                return None, None, of_weight, of_bias, None
            how.copies.note(why)
            pair = _backward(dy, gate, up, how.activation, overwrite=why is None)
        if ctx.alone == 2:
            return *pair, of_weight, of_bias, None
        if why is None:
            return owner.overwritten(kept[0]), None, of_weight, of_bias, None
        return torch.cat(pair if how.gate_first else pair[::-1], -1), None, of_weight, of_bias, None


def _product(gate: Tensor, up: Tensor, activation: str | Activate) -> Tensor:
    if activation == "silu":
        result: Tensor = ops.swiglu(gate, up)
        return result
    made = _activated(gate, activation)
    # A function that is not ours may return its argument, or something it holds.
    return made.mul_(up) if isinstance(activation, str) else made * up


def _activated(gate: Tensor, activation: str | Activate) -> Tensor:
    return (NAMED[activation] if isinstance(activation, str) else activation)(gate)


def _backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str | Activate, *, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up: onto them where they may be overwritten."""
    if activation == "silu":
        if not overwrite:
            return ops.swiglu_backward(dy, gate, up)  # type: ignore[no-any-return]
        ops.swiglu_backward_(dy, gate, up)
        return owner.overwritten(gate), owner.overwritten(up)
    made = _activated(gate, activation)
    of_made = torch.mul(dy, up, out=up) if overwrite else dy * up
    of_gate = _activation_backward(of_made, gate, activation, gate if overwrite else None)
    of_up = torch.mul(dy, made, out=up) if overwrite else dy * made
    return of_gate.detach(), of_up.detach()


def _activation_backward(dy: Tensor, gate: Tensor, activation: str | Activate, out: Tensor | None) -> Tensor:
    if activation in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        if out is None:
            return torch.ops.aten.gelu_backward(dy, gate, approximate=approximate)
        return torch.ops.aten.gelu_backward.grad_input(dy, gate, approximate=approximate, grad_input=out)
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        made = _activated(leaf, activation)
        (result,) = torch.autograd.grad(made, leaf, dy)
    return result if out is None else out.copy_(result)
