"""Lengths come in; lists of indices go out, each of items that are padded to one of few lengths.

With one process every batch has one of the `shapes`, in every epoch: `batch_size` items of one of the lengths, but for
the last batch, which has what is left, of the longest length in use. What does not fill a batch of its length is
carried to the next longer one, so there is never more than one small batch.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import Sampler

from takeback.bucket.lengths import checked_lengths, checked_to, choose_lengths, next_length, whole
from takeback.errors import OptionError


class BatchSampler(Sampler[list[int]]):
    """For `DataLoader(data, batch_sampler=...)`, with `collate_fn=tb.bucket.pad(to=sampler.to)`.

    lengths      of each item of the data
    batch_size   of each process
    count        how many lengths to pad to; they are chosen so that the least padding is added
    to           these lengths instead
    multiple_of  each chosen length is a multiple of this
    shuffle      items, and the order of batches, are drawn anew in each epoch. False: always the same batches
    seed         of the order, together with the epoch
    generator    draws a seed for each epoch instead; for one process
    drop_last    leaves out what does not fill a batch: len(data) % batch_size items, drawn anew in each epoch
    rank, world_size
                 each of `world_size` processes gets its own part of the same batches. All have the same number of
                 batches, of the same size and length. As with DistributedSampler a few items are repeated where their
                 number does not go into `world_size`, and set_epoch must be called before each epoch
    """

    def __init__(
        self,
        lengths: Iterable[int],
        batch_size: int,
        *,
        count: int = 6,
        to: int | Iterable[int] | None = None,
        multiple_of: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        whole("batch_size", batch_size, least=1)
        whole("seed", seed, least=0)
        whole("world_size", world_size, least=1)
        whole("rank", rank, least=0)
        if rank >= world_size:
            raise OptionError(f"rank must be below world_size={world_size}, got {rank}.")
        if generator is not None and world_size > 1:
            raise OptionError(
                "generator= and world_size= do not go together: each process would draw other batches. Use seed=, the "
                "same everywhere, and set_epoch()."
            )
        if to is not None and multiple_of != 1:
            raise OptionError("multiple_of= is for lengths that are chosen: round those in to= yourself.")
        known = checked_lengths(lengths)
        chosen = checked_to(to) if to is not None else choose_lengths(known, count, multiple_of=multiple_of)
        for i, length in enumerate(known):
            next_length(length, chosen, f"item {i}")
        levels = [bisect_left(chosen, length) for length in known]
        self._used = sorted(set(levels))
        self._levels = torch.tensor(levels)
        self.to = chosen
        self.batch_size, self.drop_last = batch_size, drop_last
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed, self.generator = shuffle, seed, generator
        self.epoch = 0
        self._begun: int | None = None  # the epoch that was iterated over last
        if len(self) == 0:
            raise OptionError(
                f"there is no batch: {len(known)} items do not fill one of {batch_size} for each of {world_size} "
                f"processes, and drop_last=True leaves out what does not."
            )

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is iterated over next. With one process each epoch follows the last by itself."""
        whole("epoch", epoch, least=0)
        self.epoch, self._begun = epoch, None

    def __len__(self) -> int:
        """How many batches each process gets in an epoch."""
        full, left = divmod(len(self._levels), self.batch_size * self.world_size)
        return full if self.drop_last or not left else full + 1

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(items, length) of the batches that may come: one plan for each. With several processes the last batch may
        have another of the lengths."""
        full, left = divmod(len(self._levels), self.batch_size * self.world_size)
        found = [(self.batch_size, self.to[level]) for level in self._used if full]
        if left and not self.drop_last:
            found.append((-(-left // self.world_size), self.to[self._used[-1]]))
        return tuple(dict.fromkeys(found))

    def __iter__(self) -> Iterator[list[int]]:
        draw = torch.Generator().manual_seed(self._next_seed())
        batches, last = self._batches(self._order(draw))
        if self.shuffle:
            batches = [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]
        for batch in [*batches, *last]:
            yield self._share(batch)

    def _next_seed(self) -> int:
        if self.generator is not None:
            return int(torch.randint(2**62, (), generator=self.generator))
        if self.world_size > 1:
            if self.shuffle and self._begun == self.epoch:
                warnings.warn(
                    f"epoch {self.epoch} is iterated over again, in the same order: call set_epoch(epoch) of the batch "
                    f"sampler before each epoch.",
                    stacklevel=3,
                )
            self._begun = self.epoch
            return self.seed + self.epoch
        self.epoch += 1
        return self.seed + self.epoch - 1

    def _order(self, draw: torch.Generator) -> torch.Tensor:
        """The items of this epoch."""
        items = len(self._levels)
        order = torch.randperm(items, generator=draw) if self.shuffle else torch.arange(items)
        return order[: items - items % (self.batch_size * self.world_size)] if self.drop_last else order

    def _batches(self, order: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Those of all processes together, and the last one, which is small. In a batch of length k what was carried
        comes first and leaves room for at least one item of that length."""
        size = self.batch_size * self.world_size
        levels = self._levels[order]
        found: list[list[int]] = []
        carried: list[int] = []
        for level in self._used:
            items = carried + order[levels == level].tolist()
            full = len(items) - len(items) % size
            found += [items[i : i + size] for i in range(0, full, size)]
            carried = items[full:]
        return found, [carried] if carried else []

    def _share(self, batch: list[int]) -> list[int]:
        """This process's part. Dealt in turn: the longest stand together, so each gets one if there are enough."""
        short = -len(batch) % self.world_size
        dealt = batch + [batch[-1 - i % len(batch)] for i in range(short)]
        return dealt[self.rank :: self.world_size]
