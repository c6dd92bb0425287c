"""Writes new ops one after another, and gives their results buffers: for passes that put ops in the place of others."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from takeback.compiler.program import Argument, Buffer, BufferId, Op, OpOverload, Program, Region, Role


class OpWriter:
    """The ops so far, and all buffers: the program's, and new ones."""

    def __init__(self, program: Program) -> None:
        self.program, self.buffers = program, dict(program.buffers)
        self.ops: list[Op] = []

    def new(self, size_bytes: int) -> BufferId:
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, size_bytes, Role.INTERNAL)
        return ident

    def dense(self, shape: tuple[int, ...], dtype: torch.dtype) -> Region:
        """A new value."""
        stride = [1] * len(shape)
        for dim in range(len(stride) - 2, -1, -1):
            stride[dim] = stride[dim + 1] * shape[dim + 1]
        region = Region(BufferId(-1), dtype, shape, tuple(stride), 0)
        return Region(self.new(region.numel * dtype.itemsize), dtype, shape, tuple(stride), 0)

    def write(
        self,
        of: Op,
        target: OpOverload,
        args: tuple[Argument, ...],
        kwargs: Mapping[str, Argument],
        result: Region,
        *,
        in_place: bool = False,
    ) -> None:
        """An op that does a part of what `of` did. `in_place`: the result is one of its operands."""
        mutates = (result.buffer,) if in_place else ()
        self.ops.append(Op(target, args, kwargs, (result,), mutates, of.phase, of.grad_mode, of.site))
