"""What is known of ops: which have a true `out=` kernel, which only allocate or fill, and which of its operands an op
may write its result onto. Every fact about overwriting is proved by tests/ownership/test_facts.py, bit for bit.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch

from takeback.compiler.program import Buffer, BufferId, Cluster, Kernel, Op, OpOverload, Region, Special
from takeback.compiler.schema import once_for_each, schema_of

aten = torch.ops.aten

#: Results that hold whatever the bytes held before: no kernel runs.
EMPTY = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        *((aten.empty.names,) if "names" in aten.empty.overloads() else ()),  # 2.11 has it, 2.13 has not
    )
)

#: Results that are one number all over: (where the number is among the arguments, or the number itself).
FILL: Mapping[OpOverload, tuple[int | None, float]] = {
    aten.zeros.default: (None, 0),
    aten.zeros_like.default: (None, 0),
    aten.new_zeros.default: (None, 0),
    aten.ones.default: (None, 1),
    aten.ones_like.default: (None, 1),
    aten.new_ones.default: (None, 1),
    aten.full.default: (1, 0),
    aten.full_like.default: (1, 0),
    aten.new_full.default: (2, 0),
    aten.scalar_tensor.default: (0, 0),
}

#: Results that are the first argument's values in other bytes, strides or dtype: `copy_` gives the same.
COPY = frozenset((aten.clone.default, aten._to_copy.default))

#: Hand-written `out=` kernels that nevertheless allocate, compute and copy (checked on 2.13).
#: linalg_qr's asserts that Q is square, also where it is not.
_UNTRUE_OUT = frozenset(
    ("native_batch_norm", "_native_batch_norm_legit", "batch_norm_elemt", "_fused_dropout", "linalg_qr")
)

#: Ops that count from the start of an operand's storage, or clone all of the storage up to the operand's end (2.13). In
#: an arena that would be the arena.
_READS_STORAGE = frozenset(
    ("as_strided_copy", "as_strided_scatter", "slice_scatter", "select_scatter", "diagonal_scatter")
)

#: Ops beyond the pointwise ones whose first result may be written onto these operands (by position).
#: They finish reading a row before they write it, and read nothing of a row afterwards.
_ROWWISE: Mapping[OpOverload, tuple[int, ...]] = {
    aten._softmax.default: (0,),
    aten._log_softmax.default: (0,),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
}

#: Of complex numbers, the ops that treat real and imaginary part alike and round once. What multiplies or divides may
#: round in other places where the compiled loop finds that it writes onto an operand (2.13, AVX2 and AVX512): the last
#: elements of a quotient, and all of a product with an operand that lies otherwise. No op beyond these is trusted.
_PARTWISE = frozenset(("add", "sub", "neg", "conj_physical", "where", "masked_fill"))

#: In place the number is rounded to the operand's dtype, elsewhere to single precision: mul_.Scalar exchanges the
#: operands before it hands them on (2.13).
_ROUNDS_IN_PLACE = frozenset((aten.mul.Scalar,))


class Refused(enum.StrEnum):
    """Why a result was not written onto an operand."""

    BORROWED = "the operand belongs to the caller"
    READ_LATER = "the operand is read again later"
    RETURNED = "the operand is returned to the caller"
    GEOMETRY = "the operand has another shape, stride or dtype"
    PART = "the operand is only a part of its buffer"
    OVERLAP = "another operand looks at the same bytes in another order"
    OWN_RESULT = "the kernel allocates its result itself, and no place can be given to it on this device"
    COMPLEX = "complex numbers: the kernel rounds in other places where it writes onto an operand"
    ROUNDED = "in place, torch rounds the number to half precision before it multiplies"
    FILLED = "torch fills what the kernel allocates (use_deterministic_algorithms), and would ruin the operand"


@once_for_each
def out_overload(target: Kernel) -> OpOverload | None:
    """The overload of the same op that writes into given results without allocating them, if there is one."""
    if isinstance(target, Cluster):
        return None
    schema = schema_of(target)
    if schema.name in _UNTRUE_OUT or schema.is_mutable:
        return None
    packet = target.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        other = schema_of(candidate)
        writes_out = any(p.is_out for p in other.parameters)
        if writes_out and other.signature == schema.signature and torch.Tag.generated not in candidate.tags:
            return candidate
    return None


def reads_storage(target: Kernel) -> bool:
    """Whether the op looks at its operands' storages, and not only at the tensors."""
    return schema_of(target).name in _READS_STORAGE


@once_for_each
def inplace_overload(target: Kernel) -> OpOverload | None:
    """The in-place form of a pointwise op that has no true `out=` kernel (relu, masked_fill), if there is one."""
    if torch.Tag.pointwise not in target.tags or out_overload(target) is not None:
        return None
    schema = schema_of(target)
    overload = getattr(getattr(aten, schema.name + "_", None), schema.overload, None)
    if overload is None:
        return None
    inplace = schema_of(overload)
    return overload if inplace.signature == schema.signature and inplace.parameters[0].is_written else None


def overwritable_operands(op: Op) -> tuple[int, ...]:
    """The positions of the operands that the op's first result may be written onto, as far as its kernel goes."""
    return kernels_operands(op) if bits_refusal(op) is None else ()


def bits_refusal(op: Op) -> Refused | None:
    """Why the op's first result has other bits where it is written onto an operand; None if it has the same."""
    first, target = op.results[0] if op.results else None, op.target
    if isinstance(target, Special | Cluster) or not isinstance(first, Region):
        return None
    if first.dtype.is_complex:
        name = schema_of(target).name
        scales = name in ("add", "sub") and any(a != 1 for a in (*op.args[2:], *op.kwargs.values()))
        return None if name in _PARTWISE and not scales else Refused.COMPLEX
    if target in _ROUNDS_IN_PLACE and first.dtype.is_floating_point and first.dtype.itemsize < 4:
        return Refused.ROUNDED
    return None


def kernels_operands(op: Op) -> tuple[int, ...]:
    """The positions of the operands that the op's kernel could write its first result onto, with whatever bits."""
    target = op.target
    if isinstance(target, Special) or op.mutates or op.expected is not None:
        return ()
    if target in _ROWWISE:
        first = op.args[0]
        assert isinstance(first, Region)
        dim = op.args[1]
        if target in (aten._softmax.default, aten._log_softmax.default):
            last = dim in (-1, len(first.shape) - 1)
            return _ROWWISE[target] if last and first.contiguous else ()
        if target in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
            last = op.args[2] in (-1, len(first.shape) - 1)
            return _ROWWISE[target] if last and first.contiguous else ()
        return _ROWWISE[target] if first.contiguous else ()
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return ()
    if out_overload(target) is not None:
        return tuple(range(len(op.args)))
    return (0,) if inplace_overload(target) is not None else ()


def geometry_refusal(op: Op, result: Region, operand: Region, buffers: Mapping[BufferId, Buffer]) -> Refused | None:
    """Why shapes, strides or other operands forbid the overwriting; None if they allow it."""
    if not result.same_place(operand) or not result.packed:
        return Refused.GEOMETRY
    size = buffers[operand.buffer].size_bytes
    if operand.span_bytes != (0, size) or buffers[result.buffer].size_bytes != size:
        return Refused.PART
    for other in op.inputs:
        if other.buffer == operand.buffer and not other.same_place(operand):
            return Refused.OVERLAP
    return None


def may_write_onto(op: Op, result: BufferId, operand: BufferId, buffers: Mapping[BufferId, Buffer]) -> bool:
    """Whether the op's first result, in the one buffer, may be written onto its operand in the other: for who checks
    what was decided."""
    first = op.results[0] if op.results else None
    if not isinstance(first, Region) or first.buffer != result:
        return False
    onto = [op.args[i] for i in overwritable_operands(op)]
    return any(
        isinstance(r, Region) and r.buffer == operand and geometry_refusal(op, first, r, buffers) is None for r in onto
    )
