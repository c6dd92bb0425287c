"""How an op is run: with a true `out=` kernel, in place, as a fill or a copy, or by letting it allocate its results.

The kind is decided once, from ownership/facts.py; the layout needs it (who asks the allocator for the results?) and so
does the code generator.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import torch

from takeback.compiler.ownership.facts import COPY, EMPTY, FILL, inplace_overload, out_overload
from takeback.compiler.passes.draft import Overwrites, Placement
from takeback.compiler.program import Op, Region, Special


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


def kind_of(op: Op, placement: Placement | None = None) -> Kind:
    """`placement` is that of the op's first result."""
    target = op.target
    if isinstance(target, Special):
        return _SPECIAL.get(target, Kind.RANDOM)
    if op.expected is not None:
        return Kind.HOLD
    fresh = [r for r in op.outputs if r.buffer not in op.mutates]
    if op.mutates:
        return Kind.INPLACE if not fresh else Kind.ALLOCATE
    if target in EMPTY:
        return Kind.NOTHING
    if target in FILL:
        return Kind.FILL
    if target in COPY:
        return Kind.COPY
    if torch.Tag.nondeterministic_seeded not in target.tags and out_overload(target) is not None and not _reduces(op):
        return Kind.OUT
    if isinstance(placement, Overwrites) and inplace_overload(target) is not None:
        return Kind.INSTEAD
    return Kind.ALLOCATE


def _reduces(op: Op) -> bool:
    """A loss with a reduction: all but nll's `out=` kernels first resize the result to the operands' shape (2.13)."""
    result = op.results[0]
    assert not isinstance(op.target, Special)
    schema = op.target._schema
    named = any(a.name == "reduction" for a in schema.arguments) and not schema.name.startswith("aten::nll_loss")
    return named and isinstance(result, Region) and not result.shape


def fastest(target: torch._ops.OpOverload) -> Callable[..., Any]:
    """torch's own Python binding of an op where it has one: it parses arguments about twice as fast as the overload
    object does (checked on 2.11 and 2.13: 1.8 µs against 4.1 µs for mm), and takes the same arguments."""
    namespace, name = target._schema.name.split("::")
    if namespace != "aten":
        return target._op  # type: ignore[no-any-return]  # a namesake in torch is another function
    outs = [a.name for a in target._schema.arguments if a.is_out]
    if outs and outs != ["out"]:
        return target._op  # type: ignore[no-any-return]
    if name.endswith("_") and not name.startswith("_"):
        method = getattr(torch.Tensor, name, None)
        if isinstance(method, types.MethodDescriptorType):
            return method
    for home in (torch._C._VariableFunctions, torch._C._nn):
        function = getattr(home, name, None)
        if isinstance(function, types.BuiltinFunctionType):
            return function
    return target._op  # type: ignore[no-any-return]
