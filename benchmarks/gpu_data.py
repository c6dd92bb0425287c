"""What the models of benchmarks/gpu.py are fed: batches drawn at random, and lessons, which can be learnt.

A batch is drawn by a generator, on whose device it is. Lessons are endless streams of batches on the CPU, the same for
the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from takeback import zoo

Batch = tuple[Tensor, ...]
Draw = Callable[[int, torch.Generator], Batch]  #: rows and a generator
Lessons = Callable[[int, int], Iterator[Batch]]  #: rows and a seed


def pictures(rows: int, generator: torch.Generator, *, side: int, classes: int, channels: int = 3) -> Batch:
    device = generator.device
    images = torch.randn(rows, channels, side, side, generator=generator, device=device)
    return images, torch.randint(classes, (rows,), generator=generator, device=device)


def ids(rows: int, generator: torch.Generator, *, length: int, vocabulary: int) -> Batch:
    return (torch.randint(vocabulary, (rows, length), generator=generator, device=generator.device),)


def masked_ids(rows: int, generator: torch.Generator, *, length: int, vocabulary: int) -> Batch:
    """Ids and labels: 15 % of the tokens are to be told."""
    [tokens] = ids(rows, generator, length=length, vocabulary=vocabulary)
    hidden = torch.rand(tokens.shape, generator=generator, device=tokens.device) < 0.15
    return tokens.masked_fill(hidden, 1), tokens.masked_fill(~hidden, -100)


def next_ids(rows: int, generator: torch.Generator, *, length: int, vocabulary: int) -> Batch:
    [tokens] = ids(rows, generator, length=length + 1, vocabulary=vocabulary)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def texts(rows: int, seed: int, *, length: int) -> Iterator[Batch]:
    """Bytes of Python's own sources."""
    return ((tokens,) for tokens, _ in zoo.byte_batches(rows, length, seed))


def shapes(rows: int, seed: int, *, side: int) -> Iterator[Batch]:
    """Drawn small and enlarged: at full size the drawing would take longer than the step."""
    for images, labels in zoo.shape_batches(rows, 32, seed):
        yield F.interpolate(images, size=(side, side), mode="bilinear"), labels
