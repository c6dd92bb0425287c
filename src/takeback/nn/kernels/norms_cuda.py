"""Runs a norm's backward on a GPU: a `NormCall` in, its dx and slices written, or the reason why they were not.

Row norms are row_steps_cuda.py's, batch norms those of activated_cuda.py without an activation; group norms are here.
Partial sums are [2, parts, channels]; the number of parts depends on sizes and on the device alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from takeback.nn.kernels import activated_cuda, row_steps_cuda
from takeback.nn.kernels import norms_triton as kernels
from takeback.nn.kernels.activated import Activation, Layer
from takeback.nn.kernels.activated_cuda import WIDTHS, combine_into_
from takeback.nn.kernels.launch import Launch, given, on, power
from takeback.nn.kernels.norm_call import Norm, NormCall
from takeback.nn.kernels.row_steps import Rows
from takeback.nn.kernels.width import wide


def run_(call: NormCall) -> str | None:
    """Write what `call` asks for; the reason where that cannot be, and then nothing was written."""
    of_rows = call.norm in (Norm.LAYER, Norm.RMS)
    if of_rows and call.dx is not None and not row_steps_cuda.is_short(call.channels, call.x.dtype):
        return f"a row of {call.channels} elements does not fit into one program's registers"
    if call.channels == 0:
        return None
    if of_rows:
        _row_norm_(call)
    elif call.norm == Norm.GROUP:
        _group_norm_(call)
    else:
        _batch_norm_(call)
    return None


def _row_norm_(call: NormCall) -> None:
    sums = _wants_sums(call)
    if not call.batch:
        partial: Tensor | None = call.x.new_zeros((2, 1, call.channels), dtype=wide(call.x)) if sums else None
    elif sums or call.dx is not None:
        rstd = _scales(call) if call.rstd is None and call.dx is None else call.rstd
        norm = Rows(call.batch, call.channels, call.weight, None, call.norm == Norm.LAYER, from_output=False)
        partial = row_steps_cuda.partial_sums_(call.dy, call.x, call.dx, norm, call.mean, rstd, eps=call.eps, sums=sums)
    else:
        return
    if partial is not None:
        combine_into_(partial, 1, call.weight_grad, call.bias_grad)


def _scales(call: NormCall) -> Tensor:
    """rms_norm's rstd of every row."""
    rstd = call.x.new_empty(call.batch, dtype=wide(call.x))
    with on(call.x):
        _scale_rows(call.x.device, call.x.dtype, call.batch, call.channels, call.eps)(call.x, rstd)
    return rstd


def _batch_norm_(call: NormCall) -> None:
    layer = Layer(
        batch=call.batch,
        channels=call.channels,
        spots=call.spots,
        last=call.norm == Norm.BATCH_LAST or call.spots == 1,
        weight=call.weight,
        bias=None,
        activation=Activation.IDENTITY,
        param=0.0,
        from_output=False,
    )
    assert call.mean is not None
    assert call.rstd is not None
    statistics = call.mean, call.rstd
    sums = None
    if _wants_sums(call) or (call.training and call.dx is not None):
        sums = activated_cuda.gather_into_(call.dy, call.x, layer, *statistics, call.weight_grad, call.bias_grad)
    if call.dx is not None and layer.count:
        activated_cuda.put_(call.dy, call.x, call.dx, layer, *statistics, sums if call.training else None, layer.count)


def _group_norm_(call: NormCall) -> None:
    runs, each = call.batch * call.channels, call.channels // call.groups
    device, dtype = call.x.device, call.x.dtype
    assert call.mean is not None
    assert call.rstd is not None
    with on(call.x):
        partial = call.x.new_empty((2, call.batch, call.channels), dtype=wide(call.x))
        if runs:
            _sum_runs(device, dtype, runs, each, call.spots)(call.dy, call.x, call.mean, call.rstd, partial)
        if call.dx is not None and runs:
            weight = None if call.weight is None else call.weight.dtype
            put = _put_runs(device, dtype, weight, runs, call.groups, each, call.spots)
            put(call.dy, call.x, given(call.weight, call.x), call.mean, call.rstd, partial, call.dx)
    if _wants_sums(call):
        combine_into_(partial, 1, call.weight_grad, call.bias_grad)


def _wants_sums(call: NormCall) -> bool:
    return call.weight_grad is not None or call.bias_grad is not None


# -- launches, kept for the sizes they are for -------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _scale_rows(device: torch.device, dtype: torch.dtype, rows: int, columns: int, eps: float) -> Launch:
    form = {"EPS": eps, "ACC": WIDTHS[wide(dtype)], "BLOCK": min(1024, power(columns))}
    return Launch(kernels.scale_rows, (rows,), (rows, columns), form)


@functools.lru_cache(maxsize=1024)
def _sum_runs(device: torch.device, dtype: torch.dtype, runs: int, each: int, spots: int) -> Launch:
    form = {"ACC": WIDTHS[wide(dtype)], "BLOCK": min(1024, power(spots))}
    return Launch(kernels.sum_runs, (runs,), (runs, each, spots), form)


@functools.lru_cache(maxsize=1024)
def _put_runs(
    device: torch.device, dtype: torch.dtype, weight: torch.dtype | None, runs: int, groups: int, each: int, spots: int
) -> Launch:
    form = {
        "HAS_WEIGHT": weight is not None,
        "ACC": WIDTHS[wide(dtype)],
        "BLOCK": min(1024, power(spots)),
        "BLOCK_C": power(each),
    }
    return Launch(kernels.put_runs, (runs,), (runs, groups, each, spots), form)
