"""Takes a value whose shape depends on the data into the op that adds it up: a mask picks rows out of a gradient, of
which only the sum is used (`x[mask] = row`, with a gradient for `row`, as SpecAugment has it).

In: recorded ops, and the positions where autograd, and nobody's own code, has made such a value. Out: the ops with each
pair as one, `takeback::sum_of_indexed`, whose kernel makes the same two calls. Its result has one shape, whatever the
mask picks, so no plan has to hold the number of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from takeback.compiler.program import BufferId, Op, Region, Scratch, Special

aten = torch.ops.aten

_library = torch.library.Library("takeback", "FRAGMENT")
_library.define(
    "sum_of_indexed(Tensor self, Tensor?[] indices, int[]? dim, bool keepdim=False, *, ScalarType? dtype=None) "
    "-> Tensor"
)
SUM_OF_INDEXED = torch.ops.takeback.sum_of_indexed.default


def _sum_of_indexed(
    self: torch.Tensor,
    indices: list[torch.Tensor | None],
    dim: list[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    out: torch.Tensor = aten.sum.dim_IntList(aten.index.Tensor(self, indices), dim, keepdim, dtype=dtype)
    return out


_library.impl("sum_of_indexed", _sum_of_indexed, "CompositeExplicitAutograd")


@dataclass(frozen=True)
class Enclosed:
    """The ops, the buffers that are no more, and where the ops that are left have been."""

    ops: list[Op]
    gone: frozenset[BufferId]
    removed: tuple[int, ...]

    def position(self, before: int) -> int:
        """Where the op is now that was at this position, or the one that follows it."""
        return before - sum(each < before for each in self.removed)


def enclosed(ops: Sequence[Op], made_at: Collection[int], *, spent: Collection[int] = ()) -> Enclosed:
    """`made_at`: where a value was made whose shape depends on the data. `spent`: ops that go, too, unless another one
    reads what they give."""
    kept: dict[int, Op] = dict(enumerate(ops))
    gone: set[BufferId] = set()
    for position in made_at:
        made = ops[position]
        (result,) = made.outputs
        readers = [i for i, op in enumerate(ops) if any(r.buffer == result.buffer for r in (*op.inputs, *op.outputs))]
        sums = [i for i in readers if i != position]
        if len(sums) != 1 or not _adds_up(ops[sums[0]], result, made):
            continue
        added = ops[sums[0]]
        kept[position] = replace(
            made,
            target=SUM_OF_INDEXED,
            args=(*made.args, *added.args[1:]),
            kwargs=added.kwargs,
            results=added.results,
            scratch=_one_after_the_other(made, added, result.buffer),
        )
        del kept[sums[0]]
        gone.add(result.buffer)
    _leave_out_(kept, gone, spent)
    removed = tuple(i for i in range(len(ops)) if i not in kept)
    return Enclosed([kept[i] for i in sorted(kept)], frozenset(gone), removed)


def _leave_out_(kept: dict[int, Op], gone: set[BufferId], spent: Collection[int]) -> None:
    """Takes out what nobody reads, from the last op to the first."""
    for position in sorted(spent, reverse=True):
        given = {r.buffer for r in kept[position].outputs}
        read = {r.buffer for i, op in kept.items() if i != position for r in op.inputs}
        if not given & read:
            gone |= given
            del kept[position]


def _adds_up(op: Op, value: Region, made: Op) -> bool:
    """Whether an op gives the sum of a value over all dimensions that the masks have made into one."""
    if isinstance(op.target, Special) or op.target is not aten.sum.dim_IntList or op.args[0] != value:
        return False
    dims, indices = op.args[1], made.args[1]
    assert isinstance(indices, tuple)
    first = next(i for i, index in enumerate(indices) if index is not None)
    together = all(index is not None for index in indices[first:])  # else the new dimension comes first
    summed = {d % len(value.shape) for d in dims if isinstance(d, int)} if isinstance(dims, tuple) else set()
    return (first if together else 0) in summed


def _one_after_the_other(made: Op, added: Op, between: BufferId) -> tuple[Scratch, ...]:
    """What both take, where what is `between` them is given back at the end."""
    count = sum(1 + (s.end is not None) for s in made.scratch)
    total = count + sum(1 + (s.end is not None) for s in added.scratch)
    later = [replace(s, start=s.start + count, end=None if s.end is None else s.end + count) for s in added.scratch]
    return (*(replace(s, end=total, result=None) if s.result == between else s for s in made.scratch), *later)
