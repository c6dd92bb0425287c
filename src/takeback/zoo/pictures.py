"""Images out: a batch becomes one grid, and a grid becomes a PNG file, with nothing but zlib."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor


def grid(images: Tensor, columns: int, *, gap: int = 2) -> Tensor:
    """Images [batch, 3, height, width] in [-1, 1], row by row, with white gaps between: uint8 [height, width, 3]."""
    batch, channels, height, width = images.shape
    if channels != 3 or columns < 1:
        raise ValueError(f"need images with 3 channels and columns >= 1, got shape {tuple(images.shape)}, {columns=}")
    rows = -(-batch // columns)
    canvas = torch.full((gap + rows * (height + gap), gap + columns * (width + gap), 3), 255, dtype=torch.uint8)
    pixels = ((images.detach().cpu().float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    for index, image in enumerate(pixels):
        top = gap + index // columns * (height + gap)
        left = gap + index % columns * (width + gap)
        canvas[top : top + height, left : left + width] = image.permute(1, 2, 0)
    return canvas


def write_png(path: str | Path, picture: Tensor, *, scale: int = 1) -> None:
    """Writes uint8 [height, width, 3] as a PNG file, each pixel as a square of `scale` x `scale`."""
    if picture.dtype is not torch.uint8 or picture.dim() != 3 or picture.shape[2] != 3:
        raise ValueError(f"need uint8 [height, width, 3], got {picture.dtype} {tuple(picture.shape)}")
    picture = picture.repeat_interleave(scale, 0).repeat_interleave(scale, 1).contiguous()
    height, width, _ = picture.shape
    rows = torch.cat((torch.zeros(height, 1, dtype=torch.uint8), picture.reshape(height, -1)), dim=1)  # 0: no filter
    data = zlib.compress(bytes(rows.flatten().tolist()), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", data), _chunk(b"IEND", b""))
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
