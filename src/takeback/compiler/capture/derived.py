"""Attributes that a forward sets to a tensor of its own: a value of the step under a name that outlives it. The old
`weight_norm` and `spectral_norm` of torch do so before each forward, its pruning does, and models that replace a buffer
(`self.ema = 0.9 * self.ema + ...`) where others write it in place.

In: modules. Out: their derived attributes, each with a tensor of its own, the holder, which stands there between steps
and takes the value that eager would have left. So a plan knows the module by the same tensor in every step, and what is
written to it is part of the program. A value that a holder cannot stand for, because it is an alias, is refused.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import inspect
import textwrap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from takeback.errors import CaptureError

_HOLDERS: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Derived:
    """One such attribute."""

    module: torch.nn.Module
    name: str

    @property
    def _table(self) -> dict[str, Any]:
        buffers: dict[str, Any] = self.module._buffers
        return buffers if self.name in buffers else self.module.__dict__

    @property
    def _holder(self) -> torch.Tensor:
        return _HOLDERS[self.module][self.name]

    @property
    def now(self) -> Any:
        """What stands there; None where the attribute is gone, or a parameter again (prune.remove)."""
        return self._table.get(self.name)

    @property
    def is_buffer(self) -> bool:
        return self.name in self.module._buffers

    def takes(self, now: object) -> bool:
        """Whether this is another tensor than the holder, which the holder can take."""
        return now is not self._holder and _have_one_form(self._holder, now)

    def put_back_(self) -> None:
        """Puts the holder back, with the value that it has."""
        self._table[self.name] = self._holder

    def put_(self, value: torch.Tensor) -> None:
        """Puts a holder there, with this value."""
        holders = _HOLDERS.setdefault(self.module, {})
        holder = holders.get(self.name)
        if holder is None or not _have_one_form(holder, value):
            holders[self.name] = value.detach().clone()
        else:
            holder.copy_(value.detach())
        self.put_back_()

    def described(self) -> str:
        """With the line that sets it, as far as the source is there."""
        return f"the buffer {self.name!r} of {type(self.module).__name__}{self._line()}"

    def _line(self) -> str:
        for kind in type(self.module).__mro__:
            try:
                lines, start = inspect.getsourcelines(kind)
                tree = ast.parse(textwrap.dedent("".join(lines)))
            except (OSError, TypeError, SyntaxError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == self.name:
                    text = lines[node.lineno - 1].strip()
                    return f", set at {inspect.getsourcefile(kind)}:{start + node.lineno - 1}: {text},"
        return ""


def derived_of(modules: Iterable[torch.nn.Module]) -> tuple[Derived, ...]:
    """The derived attributes of these modules, as far as they are known; checked on 2.11 and 2.13."""
    return tuple(dict.fromkeys(found for module in modules for found in _of(module)))


def _of(module: torch.nn.Module) -> Iterator[Derived]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm | BasePruningMethod):
            name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
            if isinstance(module.__dict__.get(name), torch.Tensor):
                yield Derived(module, name)
    for name in _HOLDERS.get(module, {}):
        if isinstance(module._buffers.get(name), torch.Tensor):
            yield Derived(module, name)


def write_(derived: Iterable[Derived]) -> None:
    """Writes to the holders what a forward has put there, and puts the holders back."""
    _put_((a, now) for a in derived if a.takes(now := a.now))


def settle_(derived: Iterable[Derived]) -> None:
    """Puts holders there, with the values that are there now."""
    _put_((a, now) for a in derived if isinstance(now := a.now, torch.Tensor) and now is not _holder_of(a))


def _put_(values: Iterable[tuple[Derived, torch.Tensor]]) -> None:
    """All are read before any is written: the value of one may lie in the holder of another, or in its own."""
    found = list(values)
    holders = {_storage(h) for a, _ in found if (h := _holder_of(a)) is not None}
    read = [(a, now.detach().clone() if _storage(now) in holders else now) for a, now in found]
    for attribute, value in read:
        attribute.put_(value)


def _holder_of(attribute: Derived) -> torch.Tensor | None:
    return _HOLDERS.get(attribute.module, {}).get(attribute.name)


def refuse_aliases(derived: Iterable[Derived], others: Iterable[torch.Tensor]) -> None:
    """Raises where a forward has put something in a buffer's place that a holder cannot stand for: bytes of another
    tensor, which whoever writes that one would write as well, or another layout. The old tensor of a buffer that has
    been given a new one is nobody's any more, so buffers may change places."""
    buffers = [(a, a.now) for a in derived if a.is_buffer and isinstance(a.now, torch.Tensor)]
    own = {id(_holder_of(a)) for a, _ in buffers}
    taken = [t for t in others if id(t) not in own and t.layout is torch.strided]
    for i, (attribute, now) in enumerate(buffers):
        if not attribute.takes(now):
            continue
        beside = (other for j, (_, other) in enumerate(buffers) if j != i)
        if any(_overlap(now, other) for other in (*beside, *taken)):
            raise CaptureError(
                f"{attribute.described()} is replaced by a tensor whose bytes are another's, too: a buffer, a "
                f"parameter, or a tensor of the batch. Eager would see each change of the one in the other, and a "
                f"replay would not. Write it in place (copy_), or replace it by a copy (.clone())."
            )
        if _strides(now) != _strides(attribute._holder):
            raise CaptureError(
                f"{attribute.described()} is replaced by a tensor of other strides ({now.stride()} in place of "
                f"{attribute._holder.stride()}), so a kernel that reads it next may round otherwise. Write it in place "
                f"(copy_), or replace it by a contiguous one (.contiguous(), .clone())."
            )


@contextlib.contextmanager
def hidden(derived: Iterable[Derived]) -> Iterator[list[tuple[Derived, torch.Tensor]]]:
    """Inside, these buffers are not in their modules. Gives what stands there else."""
    found = [(a, a.now) for a in derived if a.is_buffer and isinstance(a.now, torch.Tensor)]
    for attribute, _ in found:
        attribute.module._buffers[attribute.name] = None
    try:
        yield found
    finally:
        for attribute, now in found:
            attribute.module._buffers[attribute.name] = now


def shared(values: Sequence[tuple[Derived, torch.Tensor]], others: Iterable[torch.Tensor]) -> list[Derived]:
    """Those of these buffers whose storage is another one's as well, or that of one of the others."""
    taken = {_storage(t) for t in others if t.layout is torch.strided}
    times = collections.Counter(_storage(t) for _, t in values)
    return [a for a, t in values if _storage(t) in taken or times[_storage(t)] > 1]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # checked on 2.11 and 2.13


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the spans of two tensors have bytes in common."""
    if other.layout is not torch.strided or _storage(one) != _storage(other) or not one.numel() or not other.numel():
        return False
    (start, end), (begin, stop) = _span(one), _span(other)
    return start < stop and begin < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def put_holders_back_(derived: Iterable[Derived]) -> None:
    for attribute in derived:
        if _holder_of(attribute) is not None:  # else it was forgotten, and what was there first is there again
            attribute.put_back_()


def forget_(derived: Iterable[Derived]) -> None:
    """They have no holders any more."""
    for attribute in derived:
        _HOLDERS.get(attribute.module, {}).pop(attribute.name, None)


class Buffers:
    """The registered buffers of modules, as they are now."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._then = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]

    def replaced(self) -> tuple[Derived, ...]:
        """Those in whose place is another tensor of the same form now, which carries no graph into the next step."""
        return tuple(
            Derived(module, name)
            for module, name, then in self._then
            if (now := module._buffers.get(name)) is not then and _have_one_form(then, now) and not now.requires_grad
        )

    def put_back_(self) -> None:
        for module, name, then in self._then:
            if name in module._buffers:
                module._buffers[name] = then


def _have_one_form(one: torch.Tensor, other: object) -> bool:
    """Whether a holder of the one can take the other."""
    return isinstance(other, torch.Tensor) and (one.shape, one.dtype, one.device, one.layout) == (
        *(other.shape, other.dtype, other.device, other.layout),
    )
