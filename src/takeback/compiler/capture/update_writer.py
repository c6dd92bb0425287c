"""Appends ops to a program: the bookkeeping that `capture/update.py` writes an optimizer's update with.

In: a program. Out: its buffers and borrowed tensors with the new ones added, the new ops, and the formulas of their
run-time scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from takeback.compiler.program import Argument, Buffer, BufferId, HyperScalar, Op, Phase, Program, Region, Role

Group = Mapping[str, Any]
Function = Callable[[Group, float], float]


@dataclass(frozen=True)
class Formula:
    """A run-time scalar: `function(group, step)`, where step counts this update in (0 if it does not matter)."""

    text: str
    group: int
    step: torch.Tensor | None
    function: Function


class UpdateWriter:
    """Appends ops to a program; every tensor it is given is one that the program knows or borrows."""

    def __init__(self, program: Program, before: int = 0, *, one_kernel: bool = False) -> None:
        """`before`: how many formulas the program's updates have already. `one_kernel`: eager's path need not be
        taken."""
        self._before, self.one_kernel = before, one_kernel
        self._device = program.device
        self.ops: list[Op] = []
        self.buffers: dict[BufferId, Buffer] = dict(program.buffers)
        self.externals: dict[BufferId, torch.Tensor] = dict(program.externals)
        self.formulas: list[Formula] = []
        self.watched: list[tuple[torch.nn.Parameter, str, torch.Tensor]] = []
        self.group = 0  #: the parameter group being written
        self.scaled: dict[str, Region] = {}  #: what fused kernels are given by a scaler
        self.together: list[tuple[torch.Tensor, ...]] = []  #: counts of steps that one number stands for
        self.took_another_path = False  #: than eager
        self._by_storage = {t.untyped_storage()._cdata: b for b, t in self.externals.items()}

    def borrow(self, tensor: torch.Tensor, role: Role, name: str) -> Region:
        key = tensor.untyped_storage()._cdata
        ident = self._by_storage.get(key)
        if ident is None:
            ident = self._by_storage[key] = BufferId(len(self.buffers))
            self.buffers[ident] = Buffer(ident, tensor.untyped_storage().nbytes(), role, name)
            self.externals[ident] = tensor.detach()
        return Region(ident, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def like(self, region: Region) -> Region:
        """A new buffer for a result that has the shape and strides of `region`."""
        ident = BufferId(len(self.buffers))
        begin, end = region.span_bytes
        self.buffers[ident] = Buffer(ident, end - begin, Role.INTERNAL)
        return replace(region, buffer=ident, offset=0)

    def scalar(self, text: str, function: Function, step: torch.Tensor | None = None) -> HyperScalar:
        self.formulas.append(Formula(text, self.group, step, function))
        return HyperScalar(self._before + len(self.formulas) - 1, text)

    def number(self, scalar: HyperScalar) -> Region:
        """A run-time scalar as a tensor on the program's device."""
        ident = BufferId(len(self.buffers))
        self.buffers[ident] = Buffer(ident, torch.float32.itemsize, Role.INTERNAL)
        made = Region(ident, torch.float32, (), (), 0)
        like = {"dtype": torch.float32, "device": self._device, "pin_memory": False}
        self.ops.append(Op(torch.ops.aten.full.default, ((), scalar), like, (made,), (), Phase.UPDATE))
        return made

    def write(self, target: Any, onto: Region | tuple[Region, ...], *args: Argument, **kwargs: Argument) -> None:
        """An op that writes its first argument."""
        targets = onto if isinstance(onto, tuple) else (onto,)
        mutates = tuple(dict.fromkeys(r.buffer for r in targets))
        results = (onto,) if isinstance(onto, Region) else ()
        self.ops.append(Op(target, (onto, *args), kwargs, results, mutates, Phase.UPDATE))

    def make(self, target: Any, *args: Argument, **kwargs: Argument) -> Any:
        """An op with a new result like its first argument (or one result for each of a list)."""
        first = args[0]
        if isinstance(first, tuple):
            many = tuple(self.like(r) for r in first if isinstance(r, Region))
            self.ops.append(Op(target, args, kwargs, many, (), Phase.UPDATE))
            return many
        assert isinstance(first, Region)
        one = self.like(first)
        self.ops.append(Op(target, args, kwargs, (one,), (), Phase.UPDATE))
        return one
