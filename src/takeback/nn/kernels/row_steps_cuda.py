"""What works along rows on a GPU: tiles and grids for row_steps_triton.py. The contract is row_steps.py's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from takeback.nn.kernels import row_steps_triton as kernels
from takeback.nn.kernels.activated_cuda import WIDTHS, combine_launch
from takeback.nn.kernels.launch import Launch, given, on, parts_of, power, processors
from takeback.nn.kernels.width import wide

if TYPE_CHECKING:
    from takeback.nn.kernels.row_steps import Rows

_LONGEST_ROW_BYTES = 1 << 16  #: a row of the arithmetic's width that one program holds in registers
_TILE = 4096


def rms_norm_(x: Tensor, out: Tensor, norm: Rows, eps: float) -> Tensor:
    """out = x * rstd * weight; [rows]: rstd."""
    rstd = x.new_empty(norm.rows, dtype=wide(x.dtype))
    if norm.rows:
        launch = _rms_norm(
            x.device, x.dtype, norm.rows, norm.columns, norm.weight is not None and norm.weight.dtype, eps
        )
        with on(x):
            launch(x, out, x if norm.weight is None else norm.weight, rstd)
    return rstd


def backward_(dy: Tensor, saved: Tensor, out: Tensor | None, norm: Rows, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """out = dx; [2, columns]: sums of dy and of dy * xhat."""
    return gradients_(dy, saved, out, norm, mean, rstd)[0]


def gradients_(
    dy: Tensor, saved: Tensor, out: Tensor | None, norm: Rows, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out = dx; the sums, and the gradients of weight and bias that they are."""
    acc = wide(dy.dtype)
    sums = dy.new_empty((2, norm.columns), dtype=acc)
    of_weight, of_bias = (
        dy.new_empty(norm.columns, dtype=acc if parameter is None else parameter.dtype)
        for parameter in (norm.weight, norm.bias)
    )
    if not norm.rows or not norm.columns:
        return sums.zero_(), of_weight.zero_(), of_bias.zero_()
    partial = partial_sums_(dy, saved, out, norm, mean, rstd)
    assert partial is not None
    dtypes = (None if parameter is None else parameter.dtype for parameter in (norm.weight, norm.bias))
    with on(dy):
        _combine(dy.device, acc, *dtypes, partial.shape[1], norm.columns)(
            partial, sums, given(norm.weight, dy), of_weight, of_bias
        )
    return sums, of_weight, of_bias


def partial_sums_(
    dy: Tensor,
    saved: Tensor,
    out: Tensor | None,
    norm: Rows,
    mean: Tensor | None,
    rstd: Tensor | None,
    *,
    eps: float = 0.0,
    sums: bool = True,
) -> Tensor | None:
    """out = dx; [2, parts, columns]: sums of dy and of dy * xhat, to be added in order; None where they are not wanted.

    rstd None: that of rms_norm, computed from x with `eps`; only with `out`, and for rows that `is_short`.
    """
    acc = wide(dy.dtype)
    dtypes = (None if parameter is None else parameter.dtype for parameter in (norm.weight, norm.bias))
    form = norm.rows, norm.columns, norm.centred, norm.from_output
    plan = _backward(dy.device, dy.dtype, *dtypes, *form, None if rstd is not None else eps, out is not None, sums)
    scale = given(rstd, dy)
    tables = given(norm.weight, dy), given(norm.bias, dy), given(mean, scale), scale
    with on(dy):
        partial = dy.new_empty((2, plan.parts, norm.columns), dtype=acc) if sums else None
        if plan.walk is not None:
            assert out is not None
            plan.walk(dy, saved, out, *tables, given(partial, dy))
        if plan.sum is not None:
            assert partial is not None
            plan.sum(dy, saved, *tables, partial)
        if plan.put is not None:
            assert out is not None
            plan.put(dy, saved, out, *tables)
    return partial


def is_short(columns: int, dtype: torch.dtype) -> bool:
    """Whether one program holds a row in registers."""
    return bool(columns * wide(dtype).itemsize <= _LONGEST_ROW_BYTES)


def swiglu_(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up."""
    tensors = gate, up, out
    with on(gate):
        _elementwise(kernels.swiglu, gate.device, gate.dtype, *gate.shape, *(tensor.stride(0) for tensor in tensors))(
            *tensors
        )


def swiglu_backward_(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """dgate = dy * up * silu'(gate), dup = dy * silu(gate)."""
    tensors = dy, gate, up, dgate, dup
    steps = (tensor.stride(0) for tensor in tensors)
    with on(gate):
        _elementwise(kernels.swiglu_backward, gate.device, gate.dtype, *gate.shape, *steps)(*tensors)


# -- launches, kept for the sizes they are for -------------------------------------------------------------------------


@dataclass(frozen=True)
class RowBackward:
    """What a row norm's backward launches: `walk` for dx and sums at once, or `sum` and `put` for one each."""

    walk: Launch | None
    sum: Launch | None
    put: Launch | None
    parts: int


@functools.lru_cache(maxsize=1024)
def _rms_norm(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, weight: torch.dtype | bool, eps: float
) -> Launch:
    block = min(_TILE, power(columns))
    form = {"EPS": eps, "HAS_WEIGHT": weight is not False, "ACC": WIDTHS[wide(dtype)], "BLOCK": block}
    return Launch(kernels.rms_norm, (rows,), (columns,), form, num_warps=_warps(block))


@functools.lru_cache(maxsize=1024)
def _backward(
    device: torch.device,
    dtype: torch.dtype,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    rows: int,
    columns: int,
    centred: bool,
    from_output: bool,
    own_eps: float | None,
    puts: bool,
    sums: bool,
) -> RowBackward:
    from takeback.nn.kernels.activated import reach  # its backends are imported from there

    limits, acc = reach(dtype), wide(dtype)
    form = {
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CENTRED": centred,
        "FROM_OUTPUT": from_output,
        "RATIO": limits.ratio,
        "LEAST": limits.least,
        "ACC": WIDTHS[acc],
    }
    if puts and is_short(columns, dtype):
        block = power(columns)
        warps = _warps(block)
        parts = max(1, min(rows, processors(device) * max(1, 16 // warps)))
        own = {"OWN_SCALE": own_eps is not None, "EPS": own_eps or 0.0, "SUMS": sums, "BLOCK": block}
        walk = Launch(kernels.walk_rows, (parts,), (rows, columns), form | own, num_warps=warps)
        return RowBackward(walk, None, None, parts)
    assert own_eps is None, "these kernels read rstd"
    tiles = parts_of(columns, 64)
    rows_each = parts_of(parts_of(rows, max(1, 4 * processors(device) // tiles)), 32) * 32
    parts = parts_of(rows, rows_each)
    tile = {"BLOCK_M": 32, "BLOCK_N": 64}
    one = Launch(kernels.sum_rows, (tiles, parts), (rows, columns, rows_each), form | tile)
    put = Launch(kernels.put_long_rows, (rows,), (columns,), form | {"BLOCK": _TILE}, num_warps=8)
    return RowBackward(None, one if sums else None, put if puts else None, parts)


@functools.lru_cache(maxsize=1024)
def _combine(
    device: torch.device,
    acc: torch.dtype,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    parts: int,
    columns: int,
) -> Launch:
    return combine_launch(acc, (parts, columns, 1))


@functools.lru_cache(maxsize=1024)
def _elementwise(kernel: Any, device: torch.device, dtype: torch.dtype, rows: int, columns: int, *steps: int) -> Launch:
    block_n = min(1024, power(columns))
    block_m = max(1, _TILE // 2 // block_n)
    grid = parts_of(rows, block_m), parts_of(columns, block_n)
    form = {"ACC": WIDTHS[wide(dtype)], "BLOCK_M": block_m, "BLOCK_N": block_n}
    return Launch(kernel, grid, (rows, columns, *steps), form)


def _warps(block: int) -> int:
    return min(32, max(4, block // 512))
