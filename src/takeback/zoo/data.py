"""Data that needs no download: text from Python's own standard library as bytes, and drawn shapes as images.

Both are endless streams of (inputs, targets), the same for the same seed, without the global random state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import find_spec

import torch
from torch import Tensor

# Pure Python modules with long sources. takeback's own files stay out: an edit to one would change the text.
CORPUS_MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "dataclasses",
    "difflib",
    "doctest",
    "fractions",
    "inspect",
    "optparse",
    "pickle",
    "random",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "typing",
    "zipfile",
)

SHAPES = (
    "disc",
    "ring",
    "square",
    "frame",
    "diamond",
    "cross",
    "saltire",
    "horizontal stripes",
    "vertical stripes",
    "checkerboard",
)


@cache
def corpus() -> bytes:
    """The sources of `CORPUS_MODULES`, in that order: about 1 MiB, the same for one Python version."""
    sources: list[bytes] = []
    for name in CORPUS_MODULES:
        spec = find_spec(name)
        source = spec.loader.get_source(name) if spec and isinstance(spec.loader, InspectLoader) else None
        if source is None:
            raise FileNotFoundError(
                f"this Python has no source text for its module {name!r}, and byte_batches reads it as data; "
                "use a Python that ships its standard library as .py files"
            )
        sources.append(source.encode())
    return b"".join(sources)


def byte_batches(batch: int, context: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows at random places of `corpus()`: (bytes, the byte after each), both int64[batch, context]."""
    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
    if batch < 1 or not 1 <= context < len(text):
        raise ValueError(f"need batch >= 1 and 1 <= context < {len(text)}, got {batch=}, {context=}")

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(context)
        while True:
            places = torch.randint(len(text) - context, (batch, 1), generator=generator) + window
            yield text[places].long(), text[places + 1].long()

    return stream()


def shape_batches(batch: int, size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """One of `SHAPES` per image, at a random place and scale, in random colours with noise: (images, labels).

    Images are float32[batch, 3, size, size], labels int64[batch] are indices into `SHAPES`.
    """
    if batch < 1 or size < 8:
        raise ValueError(f"need batch >= 1 and size >= 8 (for a shape to show), got {batch=}, {size=}")

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            labels = torch.randint(len(SHAPES), (batch,), generator=generator)
            masks = _masks(batch, size, generator)[torch.arange(batch), labels]
            # Dark on light or light on dark at random, so that brightness alone tells nothing.
            sign = torch.randint(2, (batch, 1, 1, 1), generator=generator) * 2.0 - 1.0
            foreground = sign * (0.2 + 0.8 * torch.rand(batch, 3, 1, 1, generator=generator))
            background = -sign * (0.2 + 0.8 * torch.rand(batch, 3, 1, 1, generator=generator))
            noise = 0.1 * torch.randn(batch, 3, size, size, generator=generator)
            yield torch.where(masks[:, None], foreground, background) + noise, labels

    return stream()


def _masks(batch: int, size: int, generator: torch.Generator) -> Tensor:
    """All of `SHAPES` at each image's random centre and radius: bool[batch, shape, size, size]."""
    radius = size * (0.2 + 0.2 * torch.rand(batch, 1, 1, generator=generator))
    centre = radius + (size - 2 * radius) * torch.rand(2, batch, 1, 1, generator=generator)
    pixels = torch.arange(size) + 0.5
    # In units of the radius, from the centre: a shape is a region of [-1, 1] x [-1, 1].
    down = (pixels[:, None] - centre[0]) / radius
    right = (pixels[None, :] - centre[1]) / radius
    down, right = torch.broadcast_tensors(down, right)
    near, far = torch.minimum(down.abs(), right.abs()), torch.maximum(down.abs(), right.abs())
    round_, box = down.square() + right.square(), far <= 1
    band_down, band_right = (down * 2.5).floor() % 2 == 0, (right * 2.5).floor() % 2 == 0
    shapes = {
        "disc": round_ <= 1,
        "ring": (round_ <= 1) & (round_ >= 0.4),
        "square": far <= 0.9,
        "frame": (far <= 0.9) & (far >= 0.55),
        "diamond": near + far <= 1.1,
        "cross": box & (near <= 0.25),
        "saltire": box & (far - near <= 0.3),
        "horizontal stripes": box & band_down,
        "vertical stripes": box & band_right,
        "checkerboard": box & (band_down == band_right),
    }
    return torch.stack([shapes[name] for name in SHAPES], dim=1)
