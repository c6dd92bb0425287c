"""What a compiled step does with its group: every call on every rank sends the same collectives, whatever its plan.

    the buffers of rank 0 to all (where there are buffers), then each bucket of gradients, in one order

Buckets depend on the trainable parameters alone. A rank that records a new plan sends them too, after the recording has
been proved; so does one whose plan is compared with eager, after the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import distributed as dist

from takeback import flat as flats
from takeback.compiler.passes.reduce import Sharing, Slice
from takeback.compiler.program import BufferId, Region
from takeback.errors import CaptureError, OptionError
from takeback.parallel import Reducer, Replicas, check_group


class Group:
    """One rank's side of a group that trains one model. Made on all ranks at once: it compares the models, and gives
    every rank the parameters and buffers of rank 0."""

    def __init__(self, model: torch.nn.Module, group: object) -> None:
        check_group(group)
        assert isinstance(group, dist.ProcessGroup)
        # Before anything else: where models differ, no rank is left waiting for one that has refused its own.
        self._replicas = Replicas(model, group)
        named = list(model.named_parameters())
        self._model, self._known = model, [id(p) for _, p in named]
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise OptionError(
                    f"{name!r} is a SyncBatchNorm, which talks to the group inside the step, and a replay would not. "
                    f"Use BatchNorm with group=."
                )
        self._parameters = {i: p for i, (_, p) in enumerate(named) if p.requires_grad and p.numel()}
        self._others = [(name, p) for i, (name, p) in enumerate(named) if i not in self._parameters and p.numel()]
        if not self._parameters:
            raise OptionError("group= averages gradients, but no parameter of the model is trainable.")
        slices = tuple(Slice(i, p.dtype, tuple(p.shape), _grad_stride(p)) for i, p in self._parameters.items())
        flags = (len(slices), slices[0].dtype)
        self._layout = flats.lay_out([flags, *((p.numel(), p.dtype) for p in self._parameters.values())])
        self._buckets = flats.cut(self._layout)
        self.sharing = Sharing(slices, self._buckets)
        self._replicas.send_()
        self.reducer = Reducer(group, len(self._buckets))
        self._undo: Callable[[], None] = lambda: None
        self._open = False  #: between the first collective of a step and its commit

    def describe(self) -> str:
        """For the report."""
        sizes = sum(b.size_bytes for b in self._buckets) / 2**20
        return (
            f"rank {self.reducer.rank} of {self.reducer.world}: gradients are averaged over the group, {sizes:,.1f} "
            f"MiB in {self.reducer.count} bucket{'s' * (self.reducer.count > 1)}, started as they become complete"
        )

    @contextlib.contextmanager
    def step(self, *, first: bool = True) -> Iterator[None]:
        """One call of the step. Whatever is raised before `commit_` leaves this rank a step behind the others: its
        buffers are put back, and nothing more is sent. `first`: of an accumulation, before which buffers are sent."""
        self.reducer.check()
        self._undo, self._open = lambda: None, True
        try:
            if first:
                self._undo = self._replicas.send_buffers_()
            yield
        except BaseException as error:
            if self._open:
                self.reducer.fail(f"{type(error).__name__}: {str(error)[:200]}")
                self._undo()
            raise
        finally:
            self._open = False

    def commit_(self) -> None:
        """The step has been made."""
        self._open = False

    def take_back_(self) -> None:
        """The step that was made is being undone on this rank."""
        self._open = True

    def mine(self, grads: Collection[int]) -> frozenset[int]:
        """Those of `grads` that are averaged: a parameter without elements is not."""
        return frozenset(grads) & self._parameters.keys()

    def finish(self, flags: torch.Tensor, mine: frozenset[int]) -> frozenset[int]:
        """Waits for all buckets. Returns the parameters that have a gradient on any rank: `flags` says so then. It is
        not read where all have one on this rank: that would make the host wait for a GPU."""
        self.reducer.finish()
        return mine if len(mine) == len(self._parameters) else self._used(flags)

    def _used(self, flags: torch.Tensor) -> frozenset[int]:
        return frozenset(i for i, used in zip(self._parameters, (flags != 0).tolist(), strict=True) if used)

    def average_grads_(self, *, in_one_piece: bool) -> None:
        """Averages what eager left in `.grad`. A parameter that no rank has a gradient for gets none."""
        if [id(p) for p in self._model.parameters()] != self._known:
            raise CaptureError(
                "the model has other parameters than when the step was compiled, and the ranks of a group must have "
                "the same ones. Call compile_step again on every rank."
            )
        late = [name for name, p in self._others if p.grad is not None]
        if late:
            raise CaptureError(
                f"{late[0]} has a gradient, but was frozen when the step was compiled, so no rank averages it. Call "
                f"compile_step again, on every rank, after parameters were thawed."
            )
        parameters = self._parameters
        device = next(iter(parameters.values())).device
        used = [float(p.grad is not None) for p in parameters.values()]
        flags = torch.tensor(used, dtype=self.sharing.flag_dtype, device=device)
        grads = [
            torch.zeros(p.numel(), dtype=s.dtype, device=device).as_strided(s.shape, s.stride)
            if p.grad is None
            else p.grad
            for s, p in zip(self.sharing.slices, parameters.values(), strict=True)
        ]
        flat = [flags, *(g.as_strided((g.numel(),), (1,), g.storage_offset()) for g in grads)]
        buckets = [[flat[m] for m in b.members] for b in self._buckets]
        if in_one_piece:  # in one piece, as the slices of a plan are
            buckets = [[torch.zeros(b.numel, dtype=b.dtype)] for b in self._buckets]
        places = [
            (flat[m], bucket[0], self._layout.slices[m].start - b.start)
            for b, bucket in zip(self._buckets, buckets, strict=True)
            for m in (b.members if in_one_piece else ())
        ]
        for part, bucket, start in places:
            bucket[start : start + part.numel()].copy_(part)
        self.reducer.begin()
        for index, tensors in enumerate(buckets):
            self.reducer.ready(index, tensors)
        self.reducer.finish()
        for part, bucket, start in places:
            part.copy_(bucket[start : start + part.numel()])
        anywhere = self._used(flags)
        for (i, p), grad in zip(parameters.items(), grads, strict=True):
            p.grad = grad if i in anywhere else None


def _grad_stride(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The strides that autograd gives a gradient: the parameter's, unless it has gaps or overlaps."""
    own = Region(BufferId(0), parameter.dtype, tuple(parameter.shape), parameter.stride(), 0)
    return own.stride if own.packed else torch.empty(parameter.shape, device="meta").stride()
