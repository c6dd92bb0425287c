"""SwiGLU and GELU whose backward writes the gradients onto the inputs it kept, which die there.

Where those bytes are not theirs alone, new ones are taken, and `copies` counts it by reason.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from takeback import engine
from takeback.nn import ops, owner
from takeback.nn.kernels.activated import dense_layout
from takeback.nn.owner import Copies


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up; with one argument, its last dimension is gate and up side by side."""
    return _swiglu(gate, up, owner.ELSEWHERE)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x), with torch's bits."""
    return gelu_counted(x, approximate, owner.ELSEWHERE)


class SwiGLU(nn.Module):
    """silu(gate) * up. Called with one tensor, whose last dimension holds both halves, gate first, or with two."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """silu(gate) * up."""
        return _swiglu(gate, up, self.copies)


class GELU(nn.GELU):
    """`torch.nn.GELU`, with its bits, whose backward takes no new buffer."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__(approximate)
        self.copies = Copies()

    def forward(self, x: Tensor) -> Tensor:
        """gelu(x)."""
        return gelu_counted(x, self.approximate, self.copies)


def _swiglu(gate: Tensor, up: Tensor | None, copies: Copies) -> Tensor:
    if up is None and (gate.dim() < 1 or gate.shape[-1] % 2):
        raise ValueError(f"swiglu of one tensor needs an even last dimension, got shape {tuple(gate.shape)}")
    pair = gate.chunk(2, -1) if up is None else (gate, up)
    alike = all(getattr(pair[0], name) == getattr(pair[1], name) for name in ("shape", "dtype", "device"))
    ours = alike and gate.dim() and gate.dtype in ops.DTYPES
    if not ours or torch.compiler.is_compiling() or engine.transformed():
        return F.silu(pair[0]) * pair[1]  # Inductor fuses it; shapes that broadcast are torch's to handle
    return SwiGLUFunction.apply(gate, up, copies)


def gelu_counted(x: Tensor, approximate: str, copies: Copies) -> Tensor:
    """gelu(x), whose new buffers are counted in `copies`."""
    if torch.compiler.is_compiling() or engine.being_recorded() or engine.transformed():
        return F.gelu(x, approximate=approximate)  # who records it decides about overwriting
    return GELUFunction.apply(x, approximate, copies)


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up; up None: both are halves of gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, copies: Copies) -> Tensor:
        ctx.copies, ctx.alone = copies, 1 if up is None else 2
        owner.keep(ctx, gate, up, alone=ctx.alone)
        return ops.swiglu(*(gate.chunk(2, -1) if up is None else (gate, up)))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, why = owner.take(ctx, ctx.alone)
        gate, up = saved[0], saved[1] if ctx.alone == 2 else None
        if why is None and not all(tensor is None or tensor.is_contiguous() for tensor in (gate, up)):
            why = "a kept input is not contiguous"
        ctx.copies.note(why)
        pair = gate.chunk(2, -1) if up is None else (gate, up)
        if why is None:
            ops.swiglu_backward_(dy, *pair)
            return owner.overwritten(gate), None if up is None else owner.overwritten(up), None
        dgate, dup = ops.swiglu_backward(dy, *pair)
        return (torch.cat((dgate, dup), -1), None, None) if up is None else (dgate, dup, None)


class GELUFunction(torch.autograd.Function):
    """torch's gelu, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str, copies: Copies) -> Tensor:
        ctx.approximate, ctx.copies = approximate, copies
        owner.keep(ctx, x)
        return F.gelu(x, approximate=approximate)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, *_), why = owner.take(ctx)
        if why is None and dense_layout(x) is None:
            why = "the kept input is not dense"
        if why is None:
            torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=ctx.approximate, grad_input=x)
            return x.detach(), None, None  # torch moved the version itself
        ctx.copies.note(why)
        return torch.ops.aten.gelu_backward(dy, x, approximate=ctx.approximate), None, None
