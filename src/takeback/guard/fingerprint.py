"""Regions in, one fingerprint of the bits of each out; None where the bytes are gone or cannot be read.

On the CPU: CRC-32 and the sum of all words. Elsewhere: sums over rows and over columns of all words, each weighted with
pseudo-random factors, computed on the device with one wait for all of them. Both see every change of a single word, and
miss another change with a chance of about 2**-64. With `exact`, the fingerprint is a copy of the bytes.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from takeback.guard.engine import unseen
from takeback.guard.region import StorageRegion

Fingerprint: TypeAlias = tuple[int, int] | bytes | torch.Tensor
_COLUMNS = 1024


def fingerprints(regions: Sequence[StorageRegion], *, exact: bool = False) -> list[Fingerprint | None]:
    """The fingerprint of each region's bytes as they are now."""
    if any(region.device.type != "cpu" for region in regions):
        with unseen():
            return _on_devices(regions, exact)
    return [_on_cpu(region, exact) for region in regions]


def same(a: Fingerprint, b: Fingerprint) -> bool:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        with unseen():
            return bool(torch.equal(a, b))
    return bool(a == b)


def _on_cpu(region: StorageRegion, exact: bool) -> Fingerprint | None:
    storage = region.storage.lock()
    if storage is None or storage.nbytes() < region.end_bytes or not (address := storage.data_ptr()):
        return None
    size = region.end_bytes - region.start_bytes
    memory = np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address + region.start_bytes)), np.uint8)
    if region.outer:
        shape = [*(count for count, _ in reversed(region.outer)), region.run_bytes]
        strides = [*(stride for _, stride in reversed(region.outer)), 1]
        memory = np.ascontiguousarray(np.lib.stride_tricks.as_strided(memory, shape, strides)).reshape(-1)
    if exact:
        return memory.tobytes()
    words = memory[: memory.size & ~7].view(np.uint64)
    return zlib.crc32(memory.data), int(np.add.reduce(words, dtype=np.uint64))


def _on_devices(regions: Sequence[StorageRegion], exact: bool) -> list[Fingerprint | None]:
    cuda = {region.device for region in regions if region.device.type == "cuda"}
    if cuda and torch.cuda.is_current_stream_capturing():
        return [None] * len(regions)
    for device in sorted(cuda, key=str):
        torch.cuda.synchronize(device)  # bytes may be on their way on another stream
    found: list[Fingerprint | None] = []
    waiting: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for i, region in enumerate(regions):
        if region.device.type == "cpu":
            found.append(_on_cpu(region, exact))
            continue
        flat = _bytes(region)
        if flat is not None and not exact:
            waiting.setdefault(region.device, []).append((i, _sums(flat)))
        found.append(flat.clone() if exact and flat is not None else None)
    for pairs in waiting.values():
        sums = torch.stack([pair for _, pair in pairs]).tolist()
        for (i, _), (rows, columns) in zip(pairs, sums, strict=True):
            found[i] = (rows, columns)
    return found


def _bytes(region: StorageRegion) -> torch.Tensor | None:
    storage = region.storage.lock()
    if storage is None or storage.nbytes() < region.end_bytes:
        return None
    shape = [*(count for count, _ in reversed(region.outer)), region.run_bytes]
    strides = [*(stride for _, stride in reversed(region.outer)), 1]
    seen = torch.empty(0, dtype=torch.uint8, device=region.device).set_(storage, region.start_bytes, shape, strides)
    return seen.contiguous().view(-1)


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Two numbers modulo 2**64."""
    if flat.data_ptr() % 4:
        flat = flat.clone()
    count = flat.numel() // 4
    words, rest = flat[: count * 4].view(torch.int32), flat[count * 4 :].to(torch.int64)
    rows = count // _COLUMNS
    table, tail = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :].to(torch.int64)
    weights = _weights(1 << max(rows, 2 * _COLUMNS).bit_length(), flat.device)
    last = torch.cat([tail, rest])
    end = (last * weights[: last.numel()]).sum()
    by_row = (table.sum(1, dtype=torch.int64) * weights[:rows]).sum()
    by_column = (table.sum(0, dtype=torch.int64) * weights[:_COLUMNS]).sum()
    return torch.stack([by_row + end, by_column - end])


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers (the finalizer of splitmix64 on 1, 2, 3, ...)."""
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1
