"""How an op is run: with a true `out=` kernel, in place, as a fill or a copy, or by letting it allocate its results.

The kind is decided once, from facts.py: `overwrite` needs it (can a result be given a place at all?), the layout (who
asks the allocator for the results?) and so do the code generators.
"""

from __future__ import annotations

import enum

import torch

from takeback.compiler.ownership.facts import COPY, EMPTY, FILL, inplace_overload, out_overload
from takeback.compiler.program import Cluster, Op, Region, Special
from takeback.compiler.schema import schema_of


class Kind(enum.Enum):
    """What the generated code does for an op."""

    NOTHING = "the result is whatever the bytes held"
    FILL = "fill_ the result's place"
    COPY = "copy_ into the result's place"
    OUT = "an out= kernel writes into the result's place"
    INPLACE = "the op itself writes into given places"
    INSTEAD = "the in-place form runs on the operand whose bytes the result takes"
    ALLOCATE = "the op allocates its results, the allocator puts them into their place"
    HOLD = "reads a value into Python and compares it with the recorded one"
    RANDOM = "saves or restores a generator"
    REDUCE = "hands a bucket of gradients to the group"
    WAIT = "whoever runs the step waits for the group here"


_SPECIAL = {Special.REDUCE: Kind.REDUCE, Special.WAIT: Kind.WAIT}


def kind_of(op: Op, *, overwrites: bool = False) -> Kind:
    """`overwrites`: the op's first result takes the bytes of a dying operand."""
    target = op.target
    if isinstance(target, Special):
        return _SPECIAL.get(target, Kind.RANDOM)
    if op.expected is not None:
        return Kind.HOLD
    fresh = [r for r in op.outputs if r.buffer not in op.mutates]
    if op.mutates:
        return Kind.INPLACE if not fresh else Kind.ALLOCATE
    if op.has_data_in_shape:
        return Kind.ALLOCATE  # an out= kernel would give its place another size
    if target in EMPTY:
        return Kind.NOTHING
    if target in FILL:
        return Kind.FILL
    if target in COPY:
        return Kind.COPY
    if torch.Tag.nondeterministic_seeded not in target.tags and out_overload(target) is not None and not _reduces(op):
        return Kind.OUT
    if overwrites and inplace_overload(target) is not None:
        return Kind.INSTEAD
    return Kind.ALLOCATE


def may_vary(op: Op) -> bool:
    """Whether the shape of a result could follow from values, so that a replay must look at it. torch tags ops of which
    it knows this, but not `_pack_padded_sequence`, nor operators of others."""
    target = op.target
    if op.has_data_in_shape:
        return True
    if isinstance(target, Special | Cluster) or torch.Tag.pointwise in target.tags:
        return False
    return target.namespace != "aten" or any(not r.dtype.is_floating_point for r in op.inputs)


def _reduces(op: Op) -> bool:
    """A loss with a reduction: all but nll's `out=` kernels first resize the result to the operands' shape (2.13)."""
    result = op.results[0]
    assert not isinstance(op.target, Special | Cluster)
    schema = schema_of(op.target)
    named = any(p.name == "reduction" for p in schema.parameters) and not schema.name.startswith("nll_loss")
    return named and isinstance(result, Region) and not result.shape
