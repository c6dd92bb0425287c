"""What torch's schema says of an operator, as plain data: the one place outside of capture/ and run/ that reads it.

An overload's schema has no public name; the attributes used here were checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from takeback.compiler.program import Cluster, Kernel, OpOverload

Fact = TypeVar("Fact")


def once_for_each(function: Callable[[Any], Fact]) -> Callable[[Any], Fact]:
    """Remembers what a function says of an operator, by its id: an overload's own hash is computed in Python, and is
    asked for in every op of every pass. The operator is kept, so that the id stays its own."""
    known: dict[int, tuple[object, Fact]] = {}

    @functools.wraps(function)
    def remembered(target: Any) -> Fact:
        if isinstance(target, Cluster):
            return function(target)  # they come and go with their plans
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = (target, function(target))
        return found[1]

    return remembered


CLUSTER = "cluster"  #: the name of every cluster


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument as the schema declares it."""

    name: str
    type: str
    is_out: bool
    is_written: bool
    is_keyword: bool  #: given by name only


@dataclass(frozen=True, slots=True)
class Schema:
    """An overload's declaration. `name` is without namespace: `add` of `aten::add.Tensor`."""

    name: str
    overload: str
    parameters: tuple[Parameter, ...]
    is_mutable: bool

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """Names and types of what is not an `out=` argument."""
        return tuple((p.name, p.type) for p in self.parameters if not p.is_out)


@once_for_each
def schema_of(target: Kernel) -> Schema:
    if isinstance(target, Cluster):
        given = tuple(
            Parameter(f"in{i}", "Tensor", False, i in target.writes, False) for i in range(len(target.inputs))
        )
        return Schema(CLUSTER, "", given, bool(target.writes))
    declared = target._schema
    parameters = tuple(
        Parameter(a.name, str(a.type), a.is_out, a.alias_info is not None and a.alias_info.is_write, a.kwarg_only)
        for a in declared.arguments
    )
    return Schema(declared.name.split("::")[1], target._overloadname, parameters, declared.is_mutable)


@functools.cache
def max_pool_ops() -> tuple[OpOverload, OpOverload] | None:
    """Inductor's max pool, which says of each result which place of its window it is, and what makes places of the
    image of that; None where this torch has none."""
    try:
        from torch._inductor import inductor_prims  # noqa: F401  # registers them; checked on 2.11 and 2.13

        prims = torch.ops.prims
        return prims._low_memory_max_pool_with_offsets.default, prims._low_memory_max_pool_offsets_to_indices.default
    except (ImportError, AttributeError):
        return None
