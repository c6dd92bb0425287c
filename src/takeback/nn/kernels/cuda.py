"""Runs a norm's backward on a GPU with Triton: a `Call` in, its dx and slices written, or the reason why they were not.

Partial sums are [2, parts, channels]; the number of parts depends on sizes and on the device alone.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from takeback.nn.kernels import triton_kernels as kernels
from takeback.nn.kernels.call import Call, Into, Norm
from takeback.nn.kernels.width import wide

_LONGEST_ROW_BYTES = 1 << 16  #: a row of the arithmetic's width that one program holds in registers


def run_(call: Call) -> str | None:
    """Write what `call` asks for; the reason where that cannot be, and then nothing was written."""
    if call.norm in (Norm.LAYER, Norm.RMS) and call.dx is not None:
        width = 8 if call.x.dtype == torch.float64 else 4
        if call.channels * width > _LONGEST_ROW_BYTES:
            return f"a row of {call.channels} elements does not fit into one program's registers"
    if call.channels == 0:
        return None
    with torch.cuda.device(call.x.device):
        if call.norm in (Norm.LAYER, Norm.RMS):
            _row_norm_(call)
        elif call.norm == Norm.GROUP:
            _group_norm_(call)
        elif call.norm == Norm.BATCH_LAST or call.spots == 1:
            _batch_norm_of_columns_(call)
        else:
            _batch_norm_of_channels_(call)
    return None


def _row_norm_(call: Call) -> None:
    rows, columns, centred = call.batch, call.channels, call.norm == Norm.LAYER
    wants_sums = call.weight_grad is not None or call.bias_grad is not None
    if call.dx is None:
        if not wants_sums:
            return
        rstd = call.rstd
        if rstd is None:
            rstd = torch.empty(rows, dtype=wide(call.x), device=call.x.device)
            if rows:
                kernels.scale_rows[(rows,)](
                    call.x, rstd, rows, columns, EPS=call.eps, ACC=_tl_acc(call), BLOCK=min(1024, _power(columns))
                )
        _combine_(call, _column_sums(call, rows, rstd, of_rows=True))
        return
    block = _power(columns)
    warps = min(32, max(4, block // 512))
    parts = max(1, min(rows, _processors(call.x.device) * max(1, 16 // warps)))
    partial = _partial(call, parts) if wants_sums else call.x
    kernels.walk_rows[(parts,)](
        call.dy,
        call.x,
        _given(call.weight, call.x),
        _given(call.mean, call.x),
        _given(call.rstd, call.x),
        call.dx,
        partial,
        rows,
        columns,
        EPS=call.eps,
        CENTRED=centred,
        HAS_WEIGHT=call.weight is not None,
        SUMS=wants_sums,
        ACC=_tl_acc(call),
        BLOCK=block,
        num_warps=warps,
    )
    if wants_sums:
        _combine_(call, partial)


def _group_norm_(call: Call) -> None:
    runs, each = call.batch * call.channels, call.channels // call.groups
    block = min(1024, _power(call.spots))
    partial = _partial(call, call.batch)
    if runs:
        kernels.sum_runs[(runs,)](
            call.dy,
            call.x,
            call.mean,
            call.rstd,
            partial,
            runs,
            each,
            call.spots,
            ACC=_tl_acc(call),
            BLOCK=block,
        )
    if call.dx is not None and runs:
        kernels.put_runs[(runs,)](
            call.dy,
            call.x,
            _given(call.weight, call.x),
            call.mean,
            call.rstd,
            partial,
            call.dx,
            runs,
            call.groups,
            each,
            call.spots,
            HAS_WEIGHT=call.weight is not None,
            ACC=_tl_acc(call),
            BLOCK=block,
            BLOCK_C=_power(each),
        )
    if call.weight_grad is not None or call.bias_grad is not None:
        _combine_(call, partial)


def _batch_norm_of_columns_(call: Call) -> None:
    rows, columns = call.batch * call.spots, call.channels
    sums = None
    if _needs_sums(call):
        sums = _combine_(call, _column_sums(call, rows, None, of_rows=False), scaled=True, keep=True)
    if call.dx is None or rows == 0:
        return
    block_n = min(64, max(16, _power(columns)))
    block_m = 2048 // block_n
    kernels.put_columns[(_parts_of(rows, block_m), _parts_of(columns, block_n))](
        call.dy,
        call.x,
        _given(call.weight, call.x),
        call.mean,
        call.rstd,
        _given(sums, call.x),
        call.dx,
        rows,
        columns,
        HAS_WEIGHT=call.weight is not None,
        TRAINING=call.training,
        ACC=_tl_acc(call),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )


def _batch_norm_of_channels_(call: Call) -> None:
    samples, channels, spots = call.batch, call.channels, call.spots
    block_s = min(1024, _power(spots))
    block_n = min(1024 // block_s, _power(samples))
    chunks = _parts_of(spots, block_s)
    tasks = chunks * _parts_of(samples, block_n)
    parts = max(1, min(tasks, _parts_of(8 * _processors(call.x.device), channels)))
    sizes = (samples, channels, spots, chunks, tasks)
    sums = None
    if _needs_sums(call):
        partial = _partial(call, parts)
        kernels.sum_channels[(channels, parts)](
            call.dy, call.x, call.mean, partial, *sizes, ACC=_tl_acc(call), BLOCK_N=block_n, BLOCK_S=block_s
        )
        sums = _combine_(call, partial, scaled=True, keep=True)
    if call.dx is None or tasks == 0:
        return
    kernels.put_channels[(channels, parts)](
        call.dy,
        call.x,
        _given(call.weight, call.x),
        call.mean,
        call.rstd,
        _given(sums, call.x),
        call.dx,
        *sizes,
        HAS_WEIGHT=call.weight is not None,
        TRAINING=call.training,
        ACC=_tl_acc(call),
        BLOCK_N=block_n,
        BLOCK_S=block_s,
    )


def _column_sums(call: Call, rows: int, rstd: Tensor | None, *, of_rows: bool) -> Tensor:
    columns = call.channels
    block_n = min(64, max(16, _power(columns)))
    block_m = 2048 // block_n
    tiles = _parts_of(columns, block_n)
    most = max(1, 4 * _processors(call.x.device) // tiles)
    rows_each = _parts_of(_parts_of(rows, most), block_m) * block_m
    parts = max(1, _parts_of(rows, rows_each)) if rows_each else 1
    partial = _partial(call, parts)
    kernels.sum_columns[(tiles, parts)](
        call.dy,
        call.x,
        _given(call.mean, call.x),
        _given(rstd, call.x),
        partial,
        rows,
        columns,
        rows_each,
        OF_ROWS=of_rows,
        CENTRED=call.mean is not None,
        ACC=_tl_acc(call),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
    return partial


def _combine_(call: Call, partial: Tensor, *, scaled: bool = False, keep: bool = False) -> Tensor | None:
    """Add up the parts into the slices; the sums themselves, [2, channels], where they are to be kept."""
    sums = torch.empty((2, call.channels), dtype=partial.dtype, device=partial.device) if keep else None
    kernels.combine[(_parts_of(call.channels, 16),)](
        partial,
        _given(call.rstd, partial),
        _given(sums, partial),
        partial if call.weight_grad is None else call.weight_grad.slice,
        partial if call.bias_grad is None else call.bias_grad.slice,
        partial.shape[1],
        call.channels,
        SCALED=scaled,
        KEEP=keep,
        WEIGHT=_how(call.weight_grad),
        BIAS=_how(call.bias_grad),
        ACC=_tl_acc(call),
        BLOCK_P=64,
        BLOCK_N=16,
    )
    return sums


def _needs_sums(call: Call) -> bool:
    gradients = call.weight_grad is not None or call.bias_grad is not None
    return gradients or (call.training and call.dx is not None)


def _how(into: Into | None) -> int:
    return 0 if into is None else 2 if into.accumulate else 1


def _given(tensor: Tensor | None, otherwise: Tensor) -> Tensor:
    """A kernel's argument is a pointer even where a constant says that it is not used."""
    return otherwise if tensor is None else tensor


def _partial(call: Call, parts: int) -> Tensor:
    return torch.empty((2, parts, call.channels), dtype=wide(call.x), device=call.x.device)


def _tl_acc(call: Call) -> object:
    return tl.float64 if call.x.dtype == torch.float64 else tl.float32


def _parts_of(items: int, each: int) -> int:
    return -(-items // each)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.lru_cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
