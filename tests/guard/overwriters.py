"""Functions that overwrite what they are given, by every way of writing bytes, and a way to see what the guard says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

import takeback as tb

Write = Callable[[torch.Tensor], None]


def by_numpy(t: torch.Tensor) -> None:
    t.detach().numpy()[...] = 7


def by_pointer(t: torch.Tensor) -> None:
    """What a raw kernel does; for dense tensors."""
    array = (ctypes.c_ubyte * t.nbytes).from_address(t.data_ptr())
    np.frombuffer(array, np.uint8)[...] = 7


def by_memset(t: torch.Tensor) -> None:
    ctypes.memset(t.data_ptr(), 1, t.nbytes)


def by_data(t: torch.Tensor) -> None:
    t.data.mul_(3)


def by_no_grad(t: torch.Tensor) -> None:
    with torch.no_grad():
        t.mul_(3)


def by_out(t: torch.Tensor) -> None:
    with torch.no_grad():
        torch.mul(t.detach(), 3, out=t.detach())


def by_one_bit(t: torch.Tensor) -> None:
    """The lowest bit of the last element."""
    address = t.data_ptr() + t.nbytes - t.element_size()
    ctypes.c_ubyte.from_address(address).value ^= 1


def by_swap(t: torch.Tensor) -> None:
    """The same values in another order."""
    flat = t.detach().view(-1)
    flat.copy_(flat.flip(0))


def by_sign(t: torch.Tensor) -> None:
    t.detach().numpy()[...] *= -1


def by_resetting_the_version(t: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(t):
        t.mul_(3)


WRITES = [
    by_numpy,
    by_pointer,
    by_memset,
    by_data,
    by_no_grad,
    by_out,
    by_one_bit,
    by_swap,
    by_sign,
    by_resetting_the_version,
]


def nothing(t: torch.Tensor) -> None:
    return


class Double(torch.autograd.Function):
    """y = 2 x. Its backward computes the right gradient, then calls `write_gradient`, `write_input` and `write_output`
    on what it was given. What it does to others, not what it returns, is what the tests are about."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        write_gradient: Write = nothing,
        write_input: Write = nothing,
        write_output: Write = nothing,
    ) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        ctx.writes = (write_gradient, write_input, write_output)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = ctx.saved_tensors
        dx = dy * 2
        for write, tensor in zip(ctx.writes, (dy, x, y), strict=True):
            write(tensor)
        return dx, None, None, None


class Anything(torch.autograd.Function):
    """y = 2 x, and in the backward `act(dy)`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, act: Write) -> torch.Tensor:
        ctx.act = act
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx = dy * 2
        ctx.act(dy)
        return dx, None


def errors_of(step: Callable[[], object], **options: bool) -> list[tb.OverwriteError]:
    """What the guard finds in a step. A write that torch's version check sees makes torch raise after the guard."""
    with tb.guard(on_error="collect", **options) as g:
        try:
            step()
        except RuntimeError as error:
            if not g.errors or "modified by an inplace operation" not in str(error):
                raise
    return g.errors


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape or (3, 4), requires_grad=True)
