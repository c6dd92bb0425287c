"""What the recorder must know of an op before it runs: what it writes, whether it draws, whether it reads a value.

From torch's schema and tags, and a short table of the writes that schemas keep quiet about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from takeback.compiler.program import OpOverload
from takeback.compiler.schema import once_for_each, schema_of

aten = torch.ops.aten

#: Arguments that a kernel writes although its schema does not say so (by position), when training.
_HIDDEN_WRITES: Mapping[OpOverload, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
_TRAINING = 5  #: where these say whether they train


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the schema says of an op, read once."""

    written: tuple[int, ...]
    written_names: tuple[str, ...]
    random: bool
    dynamic: bool
    reads_value: bool
    is_view: bool
    moves_no_bytes: bool  #: transpose_() and its like, and what a profiler notes
    writes_nothing: bool


@once_for_each
def facts_of(target: OpOverload) -> OpFacts:
    written = [(i, p) for i, p in enumerate(schema_of(target).parameters) if p.is_written]
    return OpFacts(
        tuple(i for i, p in written if not p.is_keyword),
        tuple(p.name for _, p in written),
        torch.Tag.nondeterministic_seeded in target.tags,
        torch.Tag.dynamic_output_shape in target.tags,
        torch.Tag.data_dependent_output in target.tags,
        target.is_view,
        target.namespace == "profiler" or torch.Tag.inplace_view in target.tags,
        not written and target not in _HIDDEN_WRITES,
    )


def written_tensors(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The operands that a call writes in place."""
    facts = facts_of(target)
    if facts.writes_nothing:
        return []
    written = [args[i] for i in facts.written if i < len(args)]
    written += [kwargs[n] for n in facts.written_names if n in kwargs]
    hidden = _HIDDEN_WRITES.get(target)
    if hidden and args[_TRAINING]:
        written += [args[i] for i in hidden]
    found: list[torch.Tensor] = []
    for value in written:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                found.append(item)
    return found
