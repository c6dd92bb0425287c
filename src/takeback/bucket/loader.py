"""Data come in, and a DataLoader whose batches have few lengths goes out: sampler and padding in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from takeback.bucket.lengths import checked_lengths, lengths_of, whole
from takeback.bucket.padding import Value, pad
from takeback.bucket.sampler import BatchSampler
from takeback.errors import OptionError


def loader(
    data: Any,
    batch_size: int,
    *,
    lengths: Iterable[int] | None = None,
    count: int = 6,
    to: int | Iterable[int] | None = None,
    multiple_of: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    values: Mapping[Any, Value | None] | Value | None = None,
    side: str | None = None,
    mask: str | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    generator: torch.Generator | None = None,
    **more: Any,
) -> DataLoader[Any]:
    """A DataLoader over `data` with a `BatchSampler` and `pad`, which say what the arguments mean. `lengths` are
    measured if they are not given (`lengths_of`); `more` goes to the DataLoader (num_workers, pin_memory ...)."""
    taken = sorted({"batch_sampler", "sampler"} & more.keys())
    if taken:
        raise OptionError(f"{taken[0]}= is what loader() makes: for another one use tb.bucket.pad with a DataLoader.")
    whole("batch_size", batch_size, least=1)
    known = lengths_of(data) if lengths is None else checked_lengths(lengths)
    if len(known) != len(data):
        raise OptionError(f"there are {len(known)} lengths for {len(data)} items.")
    batches = BatchSampler(
        known,
        batch_size,
        count=count,
        to=to,
        multiple_of=multiple_of,
        shuffle=shuffle,
        seed=seed,
        generator=generator,
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
    )
    collate = pad(batches.to, collate_fn=collate_fn, values=values, side=side, mask=mask)
    return DataLoader(data, batch_sampler=batches, collate_fn=collate, **more)
