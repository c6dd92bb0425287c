"""An excerpt of a batch: a few of its rows, on which a step is recorded whose whole batch does not fit into memory.

In: a batch. Out: ways to take an excerpt, the likeliest first, and the excerpt itself, in bytes of its own. Which
dimension counts rows is not known: it is tried, and what comes of it is compared with the whole batch's program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.capture.batch import map_tensors, tensors_of

_ROWS = 2  #: of one row some strides are arbitrary, and a batch norm has nothing to normalize
_ALONG = 16  #: of a dimension that is not the first: of a text, two words would be too few for most losses
_MOST = 5


@dataclass(frozen=True)
class Excerpt:
    """`rows` from `start` on of each tensor's first dimension that is `extent` long; a tensor without one is taken as
    it is."""

    extent: int
    rows: int
    start: int = 0

    def of(self, batch: Any) -> Any:
        """A tensor that a batch holds twice is one tensor here, too."""
        made: dict[int, torch.Tensor] = {}

        def part(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                dim = tensor.shape.index(self.extent) if self.extent in tensor.shape else None
                short = tensor if dim is None else tensor.narrow(dim, self.start, self.rows)
                made[id(tensor)] = short.detach().clone()
            return made[id(tensor)]

        return map_tensors(batch, part)

    def describe(self) -> str:
        which = "the first" if self.start == 0 else "the last"
        return f"{which} {self.rows} of {self.extent} rows"


def excerpts(batch: Any, accumulate: int) -> tuple[Excerpt, ...]:
    """Ways to try. `accumulate`: into how many microbatches the step cuts a batch, along dimension 0."""
    return tuple(dict.fromkeys(_ways(batch, accumulate)))[:_MOST]


def _ways(batch: Any, accumulate: int) -> Iterator[Excerpt]:
    tensors = [t for t in tensors_of(batch) if t.dim()]
    firsts = [t.shape[0] for t in tensors]
    for extent in sorted(dict.fromkeys(firsts), key=firsts.count, reverse=True):
        each = _ROWS * accumulate if extent % accumulate == 0 else (_ROWS + 1) * accumulate - 1  # the last part is less
        rows = each if extent >= 2 * each else accumulate
        if rows < extent:
            yield Excerpt(extent, rows)
            yield Excerpt(extent, rows, start=extent - rows)  # the values that it reads may be others
            if accumulate < rows:
                yield Excerpt(extent, accumulate)
    if accumulate == 1:
        for extent in dict.fromkeys(n for t in tensors for n in t.shape[1:]):
            if extent >= 4 and extent not in firsts:
                yield Excerpt(extent, max(2, min(_ALONG, extent // 4)))
