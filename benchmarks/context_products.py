"""S4's attention context in two forms with the same kernels: plain, and with every product written into a Workspace.

    correlation   of at most 32 sampled rows of a layer's input and output: columns centred, their products over the
                  outer product of their norms, 0 where that vanishes
    update        context <- (1 - rate) * context + rate * tanh(correlation), without a gradient
    forward       out = x + (strength / width) * (x @ context)
    backward      grad @ context^T for x, and the sum of grad * (x @ context) for strength

In: rows, context, strength. Out: the same values from both forms; tests/workspace/test_context_products.py compares.
"""

from __future__ import annotations

from typing import Any

import torch

import takeback as tb

ROWS = 32
RATE = 0.1


def sampled(x: torch.Tensor) -> torch.Tensor:
    """At most 32 rows of all, evenly spread."""
    rows = x.flatten(0, -2)
    return rows[:: max(1, rows.shape[0] // ROWS)][:ROWS]


# -- plain -------------------------------------------------------------------------------------------------------


def update(context: torch.Tensor, x_in: torch.Tensor, x_out: torch.Tensor) -> torch.Tensor:
    a, b = sampled(x_in), sampled(x_out)
    a, b = a - a.mean(0), b - b.mean(0)
    norms = torch.outer(torch.linalg.vector_norm(a, dim=0), torch.linalg.vector_norm(b, dim=0))
    correlation = torch.where(norms > 0, (a.T @ b) / norms, 0.0)
    return (1 - RATE) * context + RATE * torch.tanh(correlation)


def apply(x: torch.Tensor, context: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    return x + (strength / x.shape[-1]) * (x @ context)


# -- in a workspace ----------------------------------------------------------------------------------------------


def update_(context: torch.Tensor, x_in: torch.Tensor, x_out: torch.Tensor, ws: tb.Workspace) -> torch.Tensor:
    """Overwrites the context."""
    a, b = sampled(x_in), sampled(x_out)
    a = torch.sub(a, a.mean(0), out=ws.take(a.shape, a.dtype, a.device))
    b = torch.sub(b, b.mean(0), out=ws.take(b.shape, b.dtype, b.device))
    square, kind = context.shape, (context.dtype, context.device)
    norms = torch.linalg.vector_norm(a, dim=0), torch.linalg.vector_norm(b, dim=0)
    denominator = torch.outer(*norms, out=ws.take(square, *kind))
    correlation = torch.mm(a.T, b, out=ws.take(square, *kind)).div_(denominator)
    positive = torch.gt(denominator, 0, out=ws.take(square, torch.bool, context.device))
    torch.where(positive, correlation, correlation.new_zeros(()), out=correlation)
    return context.mul_(1 - RATE).add_(correlation.tanh_().mul_(RATE))


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, context: torch.Tensor, strength: torch.Tensor, ws: tb.Workspace
    ) -> torch.Tensor:
        scale = strength / x.shape[-1]
        product = ws.take(x.shape, x.dtype, x.device)
        torch.mm(x.flatten(0, -2), context, out=product.flatten(0, -2))
        out = torch.mul(scale, product, out=ws.take(x.shape, x.dtype, x.device))
        ctx.save_for_backward(context, scale, product)
        ctx.ws = ws
        return torch.add(x, out, out=out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        context, scale, product = ctx.saved_tensors
        ws, width = ctx.ws, grad.shape[-1]
        scratch = torch.mul(grad, scale, out=ws.take(grad.shape, grad.dtype, grad.device))
        grad_x = ws.take(grad.shape, grad.dtype, grad.device)
        torch.mm(scratch.flatten(0, -2), context.T, out=grad_x.flatten(0, -2))
        grad_strength = torch.mul(grad, product, out=scratch).sum() / width
        return grad_x.add_(grad), None, grad_strength, None


def apply_in(x: torch.Tensor, context: torch.Tensor, strength: torch.Tensor, ws: tb.Workspace) -> torch.Tensor:
    """The result is scratch, and so is the gradient of x: both must be used within the step."""
    out = _Apply.apply(x, context, strength, ws)
    assert isinstance(out, torch.Tensor)
    return out
