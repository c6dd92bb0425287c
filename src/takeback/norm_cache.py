"""NormCache: norms of parameters, computed anew only when a parameter has changed, as its version counter tells.

In: parameters. Out: their norms, without a gradient. Guaranteed: a norm is that of the parameter as it is after the
last write that moved its version, in any thread. The counter is read before the norm is computed and moves after a
write, so a norm that raced with a write is not found again. A flag, set by writers and cleared by readers, loses it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from takeback.engine import WeakStorage, cuda_stream, storage_key, version_of
from takeback.workspace.internals import traced


class NormCache:
    """Norms of parameters.

        cache = takeback.NormCache()
        cache.norm(layer.weight)              # computed
        cache.norm(layer.weight)              # the same tensor, until an optimizer or anything else writes the weight
        cache.total(model.parameters())       # the norm of all of them together

    norm_type   as of torch.linalg.vector_norm
    dtype       to compute in, if it should not be the parameter's
    through     tensors through which parameters are written, such as one flat tensor whose slices are the `.data` of
                all parameters: a write to one of them makes every norm old

    `p.data.add_(1)`, writes through numpy, and kernels of one's own that write memory directly move no version: call
    `clear()` after them. Optimizers are seen, those that write directly (torch's fused ones do) as well.
    """

    def __init__(
        self, norm_type: float = 2.0, *, dtype: torch.dtype | None = None, through: Iterable[torch.Tensor] = ()
    ) -> None:
        self.norm_type, self.dtype = float(norm_type), dtype
        self.hits = self.misses = 0  #: may lose a count where threads ask at the same time
        self._through = tuple(through)
        self._entries: dict[int, _KnownNorm] = {}
        _watch_optimizers()

    def norm(self, p: torch.Tensor) -> torch.Tensor:
        """The norm of one parameter, without a gradient."""
        if traced():
            return self._compute(p)
        entry = self._entries.get(id(p))
        if entry is None or entry.param() is not p:  # a parameter that is gone may have had this id
            if not _has_version(p):
                return self._compute(p)
            entry = None
        seen = self._state(p)
        if entry is not None and entry.seen == seen and version_of(entry.norm) == 0:
            self.hits += 1
            return entry.norm
        self.misses += 1
        return self._renew(p, entry, seen)

    def _renew(self, p: torch.Tensor, old: _KnownNorm | None, seen: tuple[object, ...]) -> torch.Tensor:
        """Computes, and keeps what the parameter was before."""
        param = old.param if old is not None else weakref.ref(p, functools.partial(_forget, self._entries, id(p)))
        same = old is not None and old.storage.key == seen[1]
        storage = old.storage if old is not None and same else WeakStorage(p.untyped_storage())
        # A norm that was made in inference mode could not be used outside.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            norm = self._compute(p)
        if storage.key == seen[1]:  # else another thread has just put other memory there
            self._entries[id(p)] = _KnownNorm(param, seen, norm, storage)
        return norm

    def total(self, params: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of all of them together, as of one long vector."""
        norms = [self.norm(p) for p in params]
        if not norms:
            return torch.zeros(())
        dtype = functools.reduce(torch.promote_types, (n.dtype for n in norms))
        return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, dtype) for n in norms]), self.norm_type)

    def clear(self) -> None:
        """Forgets every norm."""
        self._entries.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return _without_norms, (self.norm_type, self.dtype, self._through)

    def __len__(self) -> int:
        return len(self._entries)

    def _compute(self, p: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(p.detach(), self.norm_type, dtype=self.dtype)

    def _state(self, p: torch.Tensor) -> tuple[object, ...]:
        """What is different once the parameter has other values, or is asked for on another CUDA stream."""
        return (
            version_of(p),
            storage_key(p.untyped_storage()),  # the entry's weak reference keeps this number from being used again
            p.data_ptr(),
            p.shape,
            p.stride(),
            p.dtype,
            cuda_stream(p.device.index) if p.is_cuda else None,
            *map(version_of, self._through),
        )


class _KnownNorm(NamedTuple):
    """A norm, and the state of the parameter that was read before it was computed."""

    param: weakref.ref[torch.Tensor]
    seen: tuple[object, ...]
    norm: torch.Tensor
    storage: WeakStorage


def _without_norms(norm_type: float, dtype: torch.dtype | None, through: tuple[torch.Tensor, ...]) -> NormCache:
    return NormCache(norm_type, dtype=dtype, through=through)


def _has_version(p: torch.Tensor) -> bool:
    """Not for inference tensors, sparse ones, and subclasses whose memory is elsewhere."""
    return type(p) in (torch.Tensor, torch.nn.Parameter) and p.layout is torch.strided and not p.is_inference()


def _forget(entries: dict[int, _KnownNorm], key: int, param: weakref.ref[torch.Tensor]) -> None:
    entry = entries.get(key)
    if entry is not None and entry.param is param:
        entries.pop(key, None)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(move_versions_)


def move_versions_(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Fused kernels write parameters and leave their versions as they were (seen on torch 2.13)."""
    written = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch.autograd.graph.increment_version([p for p in written if not p.is_inference()])
