"""A grid has every image in its place, and the PNG file holds those very pixels."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from takeback.zoo.pictures import grid, write_png


def read_png(path: Path) -> Tensor:
    """By the standard: chunks with checksums, one filter byte (0) before each row."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    rows = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_grid_has_every_image_in_its_place() -> None:
    images = torch.stack([torch.full((3, 2, 4), value) for value in (-1.0, 0.0, 1.0, -3.0, 3.0)])
    images[1, 2] = 0.5
    picture = grid(images, columns=3, gap=1)
    assert picture.shape == (1 + 2 * 3, 1 + 3 * 5, 3)
    assert picture[1:3, 1:5].eq(0).all()
    assert picture[1, 6].tolist() == [128, 128, 191]
    assert picture[1:3, 11:15].eq(255).all()
    assert picture[4:6, 1:5].eq(0).all(), "values outside of [-1, 1] are cut off"
    assert picture[4:6, 6:10].eq(255).all()
    assert picture[0].eq(255).all()
    assert picture[:, 5].eq(255).all()


def test_png_holds_the_pixels(tmp_path: Path) -> None:
    picture = torch.randint(256, (5, 7, 3), dtype=torch.uint8)
    write_png(tmp_path / "one.png", picture)
    assert torch.equal(read_png(tmp_path / "one.png"), picture)
    write_png(tmp_path / "three.png", picture, scale=3)
    large = read_png(tmp_path / "three.png")
    assert large.shape == (15, 21, 3)
    assert torch.equal(large[1::3, 1::3], picture)
    assert torch.equal(large[::3, 2::3], picture)


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"3 channels and columns >= 1, got shape \(2, 1, 4, 4\), columns=2"):
        grid(torch.zeros(2, 1, 4, 4), 2)
    with pytest.raises(ValueError, match=r"need uint8 \[height, width, 3\], got torch.float32 \(4, 4, 3\)"):
        write_png(tmp_path / "no.png", torch.zeros(4, 4, 3))
