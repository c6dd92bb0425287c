"""In-place ops broken on purpose, each as a real one was or could be: right in an ordinary test, wrong on hazards.

In: nothing. Out: SABOTEURS, `OpUnderTest`s for takeback.hazards. Their writes go past autograd's version counters, as
those of a CUDA, Triton or C++ kernel do. Their arithmetic, leaky_relu(x) * weight + bias or silu(a) * b, is right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from takeback.hazards import OpUnderTest

WIDTH, SLOPE = 8, 0.1


def raw_(written: Tensor, value: Tensor) -> None:
    """Element by element, as a kernel writes: expanded or overlapping memory is no obstacle, autograd is not told."""
    with torch.no_grad():
        places = torch.full(written.shape, written.storage_offset(), device=written.device)
        for dim, (size, stride) in enumerate(zip(written.shape, written.stride(), strict=True)):
            shape = [size if d == dim else 1 for d in range(written.dim())]
            places += (torch.arange(size, device=written.device) * stride).view(shape)
        memory = torch.empty(0, dtype=written.dtype, device=written.device).set_(written.untyped_storage())
        memory[places.flatten()] = value.detach().to(written.dtype).flatten()


def over_rows(value: Tensor) -> Tensor:
    return value.sum(tuple(range(value.dim() - 1)))


class Plain(nn.Module):
    """leaky_relu(x) * weight + bias, in plain torch: what all of these compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return of(x, self.weight, self.bias)


def of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.leaky_relu(x, SLOPE) * weight + bias


def activated(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """leaky_relu(x), from the output."""
    return (y - bias) / weight


def gradients(dy: Tensor, active: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, weight and bias, from leaky_relu(x)."""
    return dy * weight * torch.where(active > 0, 1.0, SLOPE), over_rows(dy * active), over_rows(dy)


class _OverwritesGradient(torch.autograd.Function):
    """dx onto dy, whoever else has dy; or onto a contiguous copy where dy is not contiguous (inplace_abn 218)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, copies: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.copies = copies
        return of(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous() if ctx.copies else dy
        dx, *others = gradients(dy, F.leaky_relu(x, SLOPE), weight)
        raw_(dy, dx)
        return dy, *others, None


class OverwritesGradient(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _OverwritesGradient.apply(x, self.weight, self.bias, False)


class OverwritesDenseGradient(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _OverwritesGradient.apply(x, self.weight, self.bias, True)


class _OverwritesOutput(torch.autograd.Function):
    """xhat onto the saved output, whoever else has it (inplace_abn 218)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = of(x, weight, bias)
        ctx.save_for_backward(y, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        y, weight, bias = ctx.saved_tensors
        raw_(y, activated(y, weight, bias))
        return gradients(dy, y, weight)


class OverwritesOutput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _OverwritesOutput.apply(x, self.weight, self.bias)


class _WritesInput(torch.autograd.Function):
    """The forward's result onto the input, without mark_dirty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().clone(), weight)
        raw_(x, of(x, weight, bias))
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients(dy, F.leaky_relu(x, SLOPE), weight)


class WritesInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _WritesInput.apply(x, self.weight, self.bias)


class _PastSaving(torch.autograd.Function):
    """Tensors on the context, past save_for_backward and its checks; gradients that autograd takes for constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = of(x, weight, bias)
        ctx.kept = y.detach(), weight.detach(), bias.detach()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        y, weight, bias = ctx.kept
        raw_(y, activated(y, weight, bias))
        return gradients(dy.detach(), y, weight)


class PastSaving(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _PastSaving.apply(x, self.weight, self.bias)


class _SharesWorkspace(torch.autograd.Function):
    """One buffer for what all layers of one shape save, and one for the gradients that they hand out."""

    buffers: dict[Any, Tensor] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        raw_(_SharesWorkspace.buffer("saved", x), x)
        return of(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        saved, out = _SharesWorkspace.buffer("saved", dy), _SharesWorkspace.buffer("gradient", dy)
        dx, *others = gradients(dy, F.leaky_relu(saved, SLOPE), weight)
        raw_(out, dx)
        return out.detach(), *others

    @staticmethod
    def buffer(use: str, like: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return _SharesWorkspace.buffers.setdefault(
                (use, like.shape, like.dtype, like.device),
                torch.empty(like.shape, dtype=like.dtype, device=like.device),
            )


class SharesWorkspace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _SharesWorkspace.apply(x, self.weight, self.bias)


class _PopsState(torch.autograd.Function):
    """A queue on the module, which the forward fills and the backward empties: one for one, it assumes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, queue: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.queue = queue
        queue.append(x.detach())
        return of(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return *gradients(dy, F.leaky_relu(ctx.queue.pop(0), SLOPE), weight), None


class PopsState(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return _PopsState.apply(x, self.weight, self.bias, self.queue)


class _IgnoresStrides(torch.autograd.Function):
    """A kernel that reads its input and its gradient as if they were contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = in_memory_order(x)
        ctx.save_for_backward(x, weight)
        return of(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients(in_memory_order(dy), F.leaky_relu(x, SLOPE), weight)


def in_memory_order(x: Tensor) -> Tensor:
    """The first elements of the storage, in the shape of x; past the end it starts again."""
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())
    return memory[torch.arange(x.numel(), device=x.device) % max(len(memory), 1)].view(x.shape)


class IgnoresStrides(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _IgnoresStrides.apply(x, self.weight, self.bias)


class _ForgetsEdges(torch.autograd.Function):
    """NaN is taken for 0; the sums over an empty batch are those of one row of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x.nan_to_num()
        ctx.save_for_backward(x, weight)
        return of(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx, *others = gradients(dy, F.leaky_relu(x, SLOPE), weight)
        return dx, *(others if len(x) else (torch.ones_like(weight), torch.ones_like(weight)))


class ForgetsEdges(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return _ForgetsEdges.apply(x, self.weight, self.bias)


class SwiGLU(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class _OverwritesInputs(torch.autograd.Function):
    """The gradients onto the saved inputs, whoever else has them (Liger's SwiGLU)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        of_gate, of_up = dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid
        raw_(gate, of_gate)
        raw_(up, of_up)
        return gate, up


class OverwritesInputs(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return _OverwritesInputs.apply(gate, up)


SABOTEURS = [
    *(
        OpUnderTest(make.__name__, make, Plain)
        for make in (
            OverwritesGradient,
            OverwritesDenseGradient,
            OverwritesOutput,
            WritesInput,
            PastSaving,
            SharesWorkspace,
            PopsState,
            IgnoresStrides,
            ForgetsEdges,
        )
    ),
    OpUnderTest("OverwritesInputs", OverwritesInputs, SwiGLU, shapes=((6, WIDTH), (6, WIDTH))),
]
