"""GradBuffer: after `loss.backward()` every `.grad` is a slice of one flat tensor, and most were computed there.

In: a model, or parameters. Guaranteed while attached: a gradient is right whatever way it came; where the framework had
to copy or add it into its slice, that is counted in `copies` and explained in `reasons`. The model's own code, its
state_dict, its parameters and what autograd records about everything else stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from takeback.errors import GradBufferError, OptionError
from takeback.grads import modules
from takeback.grads.exchange import Exchange
from takeback.grads.slots import ROW_BYTES, Slot, lay_out, padding_of, register, slot_of, unregister
from takeback.parallel import Replicas, check_group


class GradBuffer:
    """One flat gradient buffer for each (device, dtype) of the given parameters that require a gradient.

        buf = takeback.GradBuffer(model)
        loss.backward()                    # every .grad is a slice of buf.flat
        buf.clip_(1.0)                     # one pass over the buffer, not one over each parameter
        optimizer.step()
        optimizer.zero_grad()

    model   an nn.Module, or parameters (optionally with names). Only a module's gradients can be computed straight into
            the buffer: of bare parameters nobody knows who computes with them, so theirs are copied.
    dtype   of the gradients, if it should not be the parameters': torch.float32 for bf16 weights
    group   a torch.distributed process group: every rank gets the parameters of rank 0, and gradients are averaged over
            the group while the backward runs; `all_reduce()` waits for the rest

    Keep the buffer as long as you train: when it goes, or at `detach()`, the model is as it was before.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        named = _parameters(model)
        _check(model, named, dtype, group)
        if group is not None:
            check_group(group)
            Replicas(model if isinstance(model, nn.Module) else nn.ParameterList(p for _, p in named), group).send_()
        self._layout, self.flats, self.slots = lay_out(named, dtype)
        self._exchange = self._exchange_with(group) if group is not None else None
        self._exchanges: dict[dist.ProcessGroup, Exchange] = {}  #: of the groups that all_reduce() was called with
        self._alone = False  #: inside no_sync()
        whole = isinstance(model, nn.Module)
        attached, reasons = modules.attach_(model) if isinstance(model, nn.Module) else ([], {})
        handles = []
        for slot in self.slots:
            slot.standing = reasons.get(id(slot.param), "" if whole else _BARE)
            if slot.view.dtype != slot.param.dtype:
                slot.param.grad_dtype = slot.view.dtype
            hook = functools.partial(_accumulated, weakref.ref(slot), weakref.ref(self))
            handles.append(slot.accumulate.register_hook(hook))
            if slot.param.grad is not None:
                slot.take_(slot.param.grad)
        # Where the model keeps its parameters: a slice must not miss what is thawed or put there later.
        self._homes = [m._parameters for m in model.modules()] if isinstance(model, nn.Module) else []
        self._padding = [padding_of(f, (s for s in self.slots if s.flat == i)) for i, f in enumerate(self.flats)]
        self._finalize = weakref.finalize(self, _detach, attached, register(self.slots), handles)

    # -- what is where -----------------------------------------------------------------------------------------------

    @property
    def flat(self) -> torch.Tensor:
        """The flat buffer, where there is only one."""
        if len(self.flats) != 1:
            kinds = ", ".join(f"{f.dtype} on {f.device}" for f in self.flats)
            raise GradBufferError(f"there are {len(self.flats)} flat buffers ({kinds}): use .flats.")
        return self.flats[0]

    @property
    def copies(self) -> int:
        """How often the framework copied or added a gradient into its slice, for the gradients that are there now."""
        return sum(slot.copies for slot in self.slots if slot.has_gradient_in_place())

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why, for each parameter whose gradient was copied or added by the framework."""
        return {slot.name: slot.reason for slot in self.slots if slot.copies and slot.has_gradient_in_place()}

    def __repr__(self) -> str:
        size = sum(f.numel() * f.itemsize for f in self.flats)
        return f"GradBuffer({len(self.slots)} parameters, {size:,} bytes, {self.copies} copies)"

    # -- one pass over the buffer ------------------------------------------------------------------------------------

    def zero_(self) -> GradBuffer:
        """All gradients are zero, and every `.grad` is its slice. To skip the next zeros as well, use
        `model.zero_grad()`: what is None is overwritten, not added to."""
        self.check_averaged()
        for slot in self.slots:
            slot.check_unmoved()
        for flat in self.flats:
            flat.zero_()
        for slot in self.slots:
            slot.copies = 0
            slot.give()
        return self

    def gather_(self) -> GradBuffer:
        """Makes the flat buffer the whole truth: slices of parameters without a gradient are zero, and a `.grad` that
        was assigned from outside is copied into its slice. Every method that reads the buffer begins with this."""
        self.check_averaged()
        self._check_complete()
        for slot in self.slots:
            slot.refresh_()
        return self

    def _check_complete(self) -> None:
        """Raises for a gradient of the model's that no buffer has."""
        for home in self._homes:
            for name, p in home.items():
                if p is not None and p.grad is not None and slot_of(p) is None:
                    raise GradBufferError(
                        f"a parameter {name!r} of shape {tuple(p.shape)} has a gradient but no slice: it was frozen, "
                        f"or not in the model, when the GradBuffer was made. Make a new one (detach() this one first)."
                    )

    def norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients together."""
        kind = float(norm_type)
        if not kind > 0:
            raise OptionError(f"norm_type must be a positive number or infinity, got {norm_type!r}")
        self.gather_()
        return self._norm(kind)

    def _norm(self, kind: float) -> torch.Tensor:
        parts = [_flat_norm(flat, kind) for flat in self.flats]
        if len(parts) == 1:
            return parts[0]
        device, dtype = parts[0].device, functools.reduce(torch.promote_types, (p.dtype for p in parts))
        return torch.linalg.vector_norm(torch.stack([p.to(device, dtype) for p in parts]), kind)

    def clip_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_: scales the gradients so that their norm is at most `max_norm`; returns the
        norm they had."""
        total = self.norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To disable "
                f"this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        self.scale_(clip_factor(max_norm, total))
        return total

    def scale_(self, factor: torch.Tensor) -> GradBuffer:
        """Multiplies all gradients by a scalar tensor."""
        self.check_averaged()
        # On the CPU the factor is known, and one of 1 costs no pass. On a GPU to ask would cost a wait.
        known = float(factor) if factor.device.type == "cpu" else None
        if known != 1.0:
            for flat, padding in zip(self.flats, self._padding, strict=True):
                flat.mul_(factor.to(flat.device))
                if known is None or not math.isfinite(known):  # NaN times the zeros between the slices
                    flat.index_fill_(0, padding, 0)
            for slot in self.slots:
                slot.dirty = True
        return self

    def isfinite(self) -> torch.Tensor:
        """One boolean: whether no gradient is infinite or NaN."""
        return torch.isfinite(self.norm(math.inf))

    # -- many processes ----------------------------------------------------------------------------------------------

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> GradBuffer:
        """Gives every rank of the group the mean of the gradients, as DistributedDataParallel does; call it on every
        rank, once after the backward. With `GradBuffer(model, group=...)` most of it has happened by then.

        A parameter that had a gradient on some ranks only has one on all of them afterwards."""
        self._check_complete()
        if self._exchange is not None:
            if group is not None and group is not self._exchange.group:
                raise GradBufferError("this buffer was made for another group. Call all_reduce() without one.")
            self._exchange.finish()
            return self
        if group is None:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        check_group(group)
        assert group is not None
        for exchange in self._exchanges.values():
            exchange.check_finished()
        if group not in self._exchanges:
            self._exchanges[group] = self._exchange_with(group)
        self._exchanges[group].finish()
        return self

    def _exchange_with(self, group: dist.ProcessGroup) -> Exchange:
        return Exchange(self.flats, self.slots, self._layout, group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this context only add up on this rank, as under DistributedDataParallel's no_sync()."""
        self.check_averaged()
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def _complete(self, slot: Slot) -> None:
        if self._exchange is not None and not self._alone:
            self._exchange.complete(slot)

    def check_averaged(self) -> None:
        """Raises while the flat buffer is on its way to a group."""
        for exchange in (self._exchange, *self._exchanges.values()):
            if exchange is not None:
                exchange.check_finished()

    # -- the end -----------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Gives the model back as it was. Gradients stay where they are."""
        self._finalize()

    @property
    def attached(self) -> bool:
        return self._finalize.alive

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a GradBuffer cannot be copied or pickled: make a new one for the copied or loaded model.")


def clip_factor(max_norm: float, total: torch.Tensor) -> torch.Tensor:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients of norm `total` by."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


_BARE = "given as a bare parameter: pass the model, so that its modules can compute the gradient in place"


def _flat_norm(flat: torch.Tensor, kind: float) -> torch.Tensor:
    """In one pass. Row by row on the CPU, where one long sum of float32 squares would lose digits."""
    if flat.device.type != "cpu" or kind == math.inf:
        return torch.linalg.vector_norm(flat, kind)
    rows = torch.linalg.vector_norm(flat.view(-1, ROW_BYTES // flat.itemsize), kind, dim=1)
    return torch.linalg.vector_norm(rows, kind)


def _parameters(model: Any) -> list[tuple[str, nn.Parameter]]:
    if isinstance(model, nn.Module):
        return [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if isinstance(model, torch.Tensor):
        raise OptionError("GradBuffer takes a model or an iterable of parameters; this is one tensor. Pass [tensor].")
    try:
        given = list(model)
    except TypeError:
        raise OptionError(f"GradBuffer takes a model or parameters, got a {type(model).__name__}.") from None
    named = [item if isinstance(item, tuple) else (f"parameter {i}", item) for i, item in enumerate(given)]
    for name, p in named:
        if not isinstance(p, torch.Tensor) or not p.is_leaf:
            raise OptionError(
                f"{name} is a {type(p).__name__} and no parameter: only leaves have a .grad of their own."
            )
    once = {id(p): (name, p) for name, p in reversed(named) if p.requires_grad}
    return list(reversed(once.values()))


def _check(
    model: Any, named: list[tuple[str, nn.Parameter]], dtype: torch.dtype | None, group: dist.ProcessGroup | None
) -> None:
    if not named:
        raise OptionError(
            "there is no parameter that requires a gradient, so there is nothing to keep in a GradBuffer."
        )
    if isinstance(model, nn.Module):
        wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if wrappers and group is not None:
            raise GradBufferError(
                "the model is wrapped in DistributedDataParallel, which averages gradients itself: pass the plain "
                "model with group=, or leave group= out."
            )
        if group is not None and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise GradBufferError(
                "the model has a SyncBatchNorm, which talks to the group during the backward, as the buckets do: they "
                "could meet on different ranks. Leave group= out, and call buf.all_reduce(group) after the backward."
            )
        for module in wrappers:
            if module.gradient_as_bucket_view:
                raise GradBufferError(
                    "DistributedDataParallel(gradient_as_bucket_view=True) keeps .grad in buckets of its own, so they "
                    "cannot be slices of this buffer. Use gradient_as_bucket_view=False, or leave DDP out and call "
                    "buf.all_reduce()."
                )
    for name, p in named:
        if type(p) not in (nn.Parameter, torch.Tensor) and hasattr(p, "device_mesh"):
            raise GradBufferError(
                f"{name} is a DTensor (FSDP2's fully_shard): its gradient is sharded and reduced by FSDP itself. "
                f"A GradBuffer is for whole gradients; use it without fully_shard."
            )
        if slot_of(p) is not None:
            raise GradBufferError(f"{name} is in another GradBuffer already. detach() that one first.")
        if p.layout is not torch.strided or not _dense(p):
            raise GradBufferError(f"{name} is sparse, or its elements overlap: it has no dense gradient to keep.")
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise GradBufferError(
                f"the gradient of {name} is sparse, and a flat buffer is dense. Set it to None first."
            )
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise OptionError(f"dtype must be a floating-point dtype or None, got {dtype!r}")
        if any(p.dtype != dtype for _, p in named) and not hasattr(torch.Tensor, "grad_dtype"):
            raise OptionError(
                f"dtype={dtype} differs from a parameter's, and torch {torch.__version__} keeps .grad in the "
                f"parameter's dtype. It takes a torch with Tensor.grad_dtype."
            )


def _dense(p: torch.Tensor) -> bool:
    """Whether the strides are those of some order of the dimensions without gaps."""
    if not p.numel():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(p.stride(), p.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _accumulated(
    slot: weakref.ref[Slot],
    buffer: weakref.ref[GradBuffer],
    _: object,
    gradients: tuple[torch.Tensor | None, ...],
) -> None:
    """AccumulateGrad has run: with nothing where our Functions wrote the slice, with a gradient where they did not."""
    found, owner = slot(), buffer()
    if found is None or owner is None:
        return
    found.complete()
    if gradients[0] is not None:
        found.arrived()
    owner._complete(found)


def _detach(
    attached: list[weakref.ref[nn.Module]],
    entries: list[tuple[int, weakref.ref[Slot]]],
    handles: list[RemovableHandle],
) -> None:
    modules.detach_(attached)
    for handle in handles:
        handle.remove()
    for _, reference in entries:
        slot = reference()
        if slot is not None and slot.view.dtype != slot.param.dtype:
            grad, slot.param.grad = slot.param.grad, None
            slot.param.grad_dtype = slot.param.dtype
            slot.param.grad = None if grad is None else grad.to(slot.param.dtype)
    unregister(entries)
