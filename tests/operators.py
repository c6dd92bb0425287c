"""Calls of torch's operators for tests that try all of them: operands of each dtype, of sizes that leave something over
after a kernel's vectors, in several layouts, with each optional argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
#: Of the first operand, and of the others: in a row, a tensor of one number (also of double precision), a number of
#: Python's, rows, one row or column, turned, with gaps.
LAYOUTS = (
    *(("line", "line"), ("line", "number"), ("line", "double"), ("line", "plain")),
    *(("rows", "rows"), ("rows", "row"), ("rows", "column"), ("rows", "turned"), ("rows", "gaps")),
    *(("turned", "rows"), ("turned", "turned")),
)
#: Numbers of elements: what is left over after vectors of 4, 8, 16 and 32.
TAILS, TAILS_OF_ROWS = (1, 3, 4, 5, 7, 8, 12, 13, 21, 31, 40), (1, 4, 5, 12)
SELECTED = ("mask", "condition")


def operators() -> Iterator[torch._ops.OpOverload]:
    """All of torch's own, in a fixed order."""
    for name in dir(aten):
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _numbers(size: int, dtype: torch.dtype, layout: str, draw: torch.Generator) -> torch.Tensor | complex:
    if layout == "plain":
        return _number(dtype)
    if layout == "double":
        return torch.tensor(0.7, dtype=torch.float64)
    shapes = {"line": (size,), "number": (), "rows": (3, size), "row": (1, size), "column": (3, 1)}
    shape = shapes.get(layout, (size, 3) if layout == "turned" else (3, 2 * size))
    if dtype.is_complex:
        made = torch.randn(shape, generator=draw, dtype=torch.complex128).to(dtype)
    elif dtype.is_floating_point:
        made = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    else:
        made = torch.randint(1, 9, shape, generator=draw).to(dtype)
    return made.t() if layout == "turned" else made[:, ::2] if layout == "gaps" else made


def _number(dtype: torch.dtype) -> complex:
    return 0.7 + 0.3j if dtype.is_complex else 0.7 if dtype.is_floating_point else 2


def _variants(op: torch._ops.OpOverload, dtype: torch.dtype) -> Iterator[dict[str, object]]:
    """What may be said by name: nothing, and each optional argument by itself."""
    yield {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.name == "rounding_mode":
            yield from ({"rounding_mode": mode} for mode in (None, "floor", "trunc"))
        elif argument.name == "decimals":
            yield {"decimals": 1}
        elif not argument.has_default_value():
            continue
        elif kind in ("number", "Optional[number]"):
            yield {argument.name: _number(dtype)}
        elif kind == "Optional[Tensor]":
            yield {argument.name: torch.full((), 2).to(dtype)}
        elif kind in ("float", "Optional[float]"):
            yield {argument.name: 0.3}
        elif kind == "bool":
            yield {argument.name: not argument.default_value}
        elif argument.name == "approximate":
            yield {argument.name: "tanh"}


def calls(
    op: torch._ops.OpOverload,
    dtype: torch.dtype,
    *,
    tails: Sequence[int] = TAILS,
    tails_of_rows: Sequence[int] = TAILS_OF_ROWS,
) -> Iterator[tuple[list[object], dict[str, object]]]:
    """Positional and named arguments. That the op takes them is not sure."""
    kinds = [(a.name, str(a.type)) for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]
    tensors = [i for i, (_, kind) in enumerate(kinds) if kind == "Tensor"]
    others = {"number": _number(dtype), "float": 0.7, "int": 2, "bool": True}
    for named in _variants(op, dtype):
        for layouts in LAYOUTS:
            for size in tails if layouts[0] == "line" else tails_of_rows:
                draw = torch.Generator().manual_seed(size)
                args: list[object] = []
                for i, (name, kind) in enumerate(kinds):
                    of = torch.bool if name in SELECTED else dtype
                    layout = layouts[i != tensors[0]] if tensors else ""
                    args.append(_numbers(size, of, layout, draw) if kind == "Tensor" else others.get(kind))
                yield args, named
                if tensors == [0, 1] and layouts[0] != layouts[1]:
                    yield [args[1], args[0], *args[2:]], named
                if len(tensors) >= 2 and layouts == ("line", "line") and kinds[tensors[0]][0] not in SELECTED:
                    yield [args[tensors[0]] if i in tensors else a for i, a in enumerate(args)], named  # all the same


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, but any NaN equals any other."""
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    flat_a, flat_b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.contiguous(), b.contiguous()))
    lost = flat_a.isnan()
    bits = (t.masked_fill(lost, 0.0).reshape(-1).view(torch.uint8) for t in (flat_a, flat_b))
    return torch.equal(lost, flat_b.isnan()) and torch.equal(*bits)
