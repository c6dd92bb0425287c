"""Which bytes a tensor covers: of which storage, from where, in which strides. The storage is held weakly.

Two tensors that cover the same bytes (a view, a transpose, an expanded one) have regions with equal keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from takeback.engine import WeakStorage

Key = tuple[int, int, int, tuple[tuple[int, int], ...]]
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, eq=False)
class StorageRegion:
    """The bytes at `start_bytes + sum(i * stride)` for all i below their counts, each `run_bytes` long."""

    storage: WeakStorage
    device: torch.device
    start_bytes: int
    run_bytes: int
    outer: tuple[tuple[int, int], ...]  #: (count, stride in bytes), the narrowest first
    shared: bool  #: several elements of the tensor are the same bytes
    text: str  #: dtype and shape
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.storage.key, self.start_bytes, self.run_bytes, self.outer))

    def moved(self, storage: WeakStorage, distance_bytes: int) -> StorageRegion:
        """The same bytes, as seen from another storage that begins so many bytes before this one's."""
        return replace(self, storage=storage, start_bytes=self.start_bytes + distance_bytes)

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.run_bytes + sum((count - 1) * stride for count, stride in self.outer)

    @property
    def size_bytes(self) -> int:
        return self.run_bytes * math.prod(count for count, _ in self.outer)

    def overlaps(self, other: StorageRegion) -> bool:
        """Whether some byte is in both. Exact for whole tensors, slices, and pieces that are interleaved with one
        stride; else it may say yes where the bytes only interleave."""
        if self.storage.key != other.storage.key:
            return False
        if self.end_bytes <= other.start_bytes or other.end_bytes <= self.start_bytes:
            return False
        if len(self.outer) == len(other.outer) == 1 and self.outer[0][1] == other.outer[0][1]:
            stride = self.outer[0][1]
            a, b = self.start_bytes % stride, other.start_bytes % stride
            apart = (b - a) % stride
            return apart < self.run_bytes or stride - apart < other.run_bytes
        return True


class Unwatchable(Exception):
    """A tensor whose bytes cannot be named; says why."""


def region_of(tensor: torch.Tensor) -> StorageRegion | None:
    """The tensor's bytes; None where it has none."""
    if type(tensor) not in _PLAIN:
        raise Unwatchable(f"a {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Unwatchable("a quantized tensor" if tensor.is_quantized else f"a {tensor.layout} tensor")
    try:
        if tensor.numel() == 0 or tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        item, shape, strides = tensor.element_size(), tensor.shape, tensor.stride()
        start = tensor.storage_offset() * item
    except (RuntimeError, NotImplementedError) as error:
        raise Unwatchable("a tensor without a storage of its own") from error
    run, outer, shared = _canonical(item, zip(shape, (stride * item for stride in strides), strict=True))
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)}"
    return StorageRegion(WeakStorage(storage), tensor.device, start, run, outer, shared, text)


def region_of_array(array: Any, storage: WeakStorage, address: int) -> StorageRegion | None:
    """The bytes of a numpy array, as seen from a storage on the CPU that begins at `address`."""
    if array.size == 0 or array.itemsize == 0:
        return None
    start = array.__array_interface__["data"][0] - address
    start += sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True) if stride < 0)
    run, outer, shared = _canonical(array.itemsize, zip(array.shape, map(abs, array.strides), strict=True))
    return StorageRegion(storage, torch.device("cpu"), start, run, outer, shared, f"{array.dtype} {list(array.shape)}")


def _canonical(item: int, dims: Iterable[tuple[int, int]]) -> tuple[int, tuple[tuple[int, int], ...], bool]:
    """(bytes in a row, the dimensions around them, whether elements share bytes), with strides in bytes."""
    wide = [(n, stride) for n, stride in dims if n > 1]
    shared = any(stride == 0 for _, stride in wide)
    run, outer = item, list[tuple[int, int]]()
    for n, stride in sorted((d for d in wide if d[1] != 0), key=lambda d: d[1]):
        extent = run + sum((count - 1) * s for count, s in outer)
        if stride < extent:  # windows that overlap: all that lies between is taken
            run, outer, shared = extent + (n - 1) * stride, [], True
        elif not outer and stride == run:
            run *= n
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * n, outer[-1][1])
        else:
            outer.append((n, stride))
    return run, tuple(outer), shared
