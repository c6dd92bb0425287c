"""The operators under takeback.nn, registered as `torch.ops.takeback.*`, with fake kernels and what they mutate.

torch.compile, make_fx and fake tensors see them as single operators. They know nothing of autograd: that is in the
Functions beside this file, which also decide whether the form that overwrites (`..._`) may be called. A form that ends
in `_sums` computes the parameters' gradients alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from takeback import engine
from takeback.nn.kernels import activated, row_steps
from takeback.nn.kernels.activated import Activation, Layer
from takeback.nn.kernels.row_steps import Rows
from takeback.nn.kernels.width import wide

_library = torch.library.Library("takeback", "FRAGMENT")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What the kernels compute with."""

_NORM = "Tensor? weight, Tensor? bias, float eps, int activation, float param, bool absolute"
_STATISTICS = "Tensor(b!)? running_mean, Tensor(c!)? running_var, bool training, float momentum"
_SAVED = "Tensor mean, Tensor invstd, bool training, bool from_output"
_ROWS = "Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, bool from_output"


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what is decorated as the CPU and CUDA kernel of `schema`; what it becomes is called like the operator.

    torch's dispatcher takes as long as launching a kernel or two: it is gone through only where somebody records.
    """

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        name = _library.define(schema, tags=(torch.Tag.needs_exact_strides,))  # kernels and fakes follow x's layout
        for device in ("CPU", "CUDA"):
            _library.impl(name, kernel, device)
        torch.library.register_fake(f"takeback::{name}", fake, lib=_library)
        operator = getattr(torch.ops.takeback, name).default

        @functools.wraps(kernel)
        def call(*arguments: Any) -> Any:
            given = arguments[0]
            plain = type(given) in (Tensor, torch.nn.Parameter) and (given.is_cpu or given.is_cuda)
            return kernel(*arguments) if plain and not engine.being_recorded() else operator(*arguments)

        return call

    return register


# -- activated batch norm ----------------------------------------------------------------------------------------------


def layer_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: int,
    param: float,
    absolute: bool,
    from_output: bool = True,
) -> Layer:
    """The kernels' description of an activated norm of a dense x."""
    return Layer(
        *activated.sizes(x),
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        Activation(activation),
        param,
        absolute_eps=eps if absolute else None,
        from_output=from_output,
    )


def dense(x: Tensor) -> Tensor:
    """x, or a contiguous copy where it is dense in no memory format."""
    return x.contiguous() if activated.dense_layout(x) is None else x


def laid_as(dy: Tensor, like: Tensor) -> Tensor:
    """dy in the dense layout of `like`: itself, or a copy."""
    if dy.stride() == like.stride():
        return dy
    layout = activated.dense_layout(like)
    assert layout is not None
    return dy.contiguous(memory_format=layout)


def _table(x: Tensor) -> Tensor:
    """A fake value for each channel."""
    return x.new_empty(x.shape[1], dtype=wide(x))


def _gradient(x: Tensor, parameter: Tensor | None) -> Tensor:
    return _table(x) if parameter is None else torch.empty_like(parameter)


@_operator(
    f"abn(Tensor x, {_NORM}, {_STATISTICS}) -> (Tensor, Tensor, Tensor)",
    lambda x, *_: (torch.empty_like(dense(x)), _table(x), _table(x)),
)
def abn(x: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = dense(x)
    y = torch.empty_like(x)
    return y, *_into_(x, y, *how)


@_operator(f"abn_(Tensor(a!) x, {_NORM}, {_STATISTICS}) -> (Tensor, Tensor)", lambda x, *_: (_table(x), _table(x)))
def abn_(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return _into_(x, x, *how)


def _into_(
    x: Tensor,
    out: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: int,
    param: float,
    absolute: bool,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    layer = layer_of(x, weight, bias, eps, activation, param, absolute)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        width = wide(x)
        mean, invstd = running_mean.to(width, copy=True), (running_var.to(width) + eps).rsqrt_()
    elif x.numel():
        mean, invstd = activated.batch_statistics(x, layer, eps, running_mean, running_var, momentum)
    else:
        mean, invstd = (x.new_zeros(layer.channels, dtype=wide(x)) for _ in range(2))
    if x.numel():
        activated.normalise_(x, out, layer, mean, invstd)
    return mean, invstd


@_operator(
    f"abn_backward(Tensor dy, Tensor saved, {_NORM}, {_SAVED}) -> (Tensor, Tensor, Tensor)",
    lambda dy, saved, weight, bias, *_: (
        torch.empty_like(dense(saved)),
        _gradient(saved, weight),
        _gradient(saved, bias),
    ),
)
def abn_backward(dy: Tensor, saved: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    saved = dense(saved)
    dx = torch.empty_like(saved)
    return dx, *_put_(dy, saved, dx, *how)


@_operator(
    f"abn_backward_(Tensor dy, Tensor(a!) saved, {_NORM}, {_SAVED}) -> (Tensor, Tensor)",
    lambda dy, saved, weight, bias, *_: (_gradient(saved, weight), _gradient(saved, bias)),
)
def abn_backward_(dy: Tensor, saved: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return _put_(dy, saved, saved, *how)


@_operator(
    f"abn_sums(Tensor dy, Tensor saved, {_NORM}, {_SAVED}) -> (Tensor, Tensor)",
    lambda dy, saved, weight, bias, *_: (_gradient(saved, weight), _gradient(saved, bias)),
)
def abn_sums(dy: Tensor, saved: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return _put_(dy, dense(saved), None, *how)


def _put_(
    dy: Tensor,
    saved: Tensor,
    out: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: int,
    param: float,
    absolute: bool,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    from_output: bool,
) -> tuple[Tensor, Tensor]:
    layer = layer_of(saved, weight, bias, eps, activation, param, absolute, from_output)
    dy = laid_as(dy, saved)
    sums, of_weight, of_bias = activated.gather(dy, saved, layer, mean, invstd)
    if out is not None and dy.numel():
        activated.put_(dy, saved, out, layer, mean, invstd, sums if training else None, layer.count)
    return of_weight, of_bias


# -- rows --------------------------------------------------------------------------------------------------------------


@_operator(
    "rms_norm(Tensor x, Tensor? weight, int columns, float eps) -> (Tensor, Tensor)",
    lambda x, weight, columns, eps: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.numel() // columns if columns else 0, dtype=wide(x)),
    ),
)
def rms_norm(x: Tensor, weight: Tensor | None, columns: int, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y = torch.empty_like(x)
    given = None if weight is None else weight.contiguous()
    rows = x.numel() // columns if columns else 0
    return y, row_steps.rms_norm_(x, y, Rows(rows, columns, given, None, centred=False), eps)


def _row_gradients(saved: Tensor, columns: int, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    table = saved.new_empty(columns, dtype=wide(saved))
    return (
        table if weight is None else torch.empty_like(weight),
        table.clone() if bias is None else torch.empty_like(bias),
    )


@_operator(
    f"row_norm_backward(Tensor dy, Tensor saved, int columns, bool centred, {_ROWS}) -> (Tensor, Tensor, Tensor)",
    lambda dy, saved, columns, centred, mean, rstd, weight, bias, _: (
        torch.empty_like(saved, memory_format=torch.contiguous_format),
        *_row_gradients(saved, columns, weight, bias),
    ),
)
def row_norm_backward(dy: Tensor, saved: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    saved = saved.contiguous()
    dx = torch.empty_like(saved)
    return dx, *_put_rows_(dy, saved, dx, *how)


@_operator(
    f"row_norm_backward_(Tensor dy, Tensor(a!) saved, int columns, bool centred, {_ROWS}) -> (Tensor, Tensor)",
    lambda dy, saved, columns, centred, mean, rstd, weight, bias, _: _row_gradients(saved, columns, weight, bias),
)
def row_norm_backward_(dy: Tensor, saved: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return _put_rows_(dy, saved, saved, *how)


@_operator(
    f"row_norm_sums(Tensor dy, Tensor saved, int columns, bool centred, {_ROWS}) -> (Tensor, Tensor)",
    lambda dy, saved, columns, centred, mean, rstd, weight, bias, _: _row_gradients(saved, columns, weight, bias),
)
def row_norm_sums(dy: Tensor, saved: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return _put_rows_(dy, saved.contiguous(), None, *how)


def _put_rows_(
    dy: Tensor,
    saved: Tensor,
    out: Tensor | None,
    columns: int,
    centred: bool,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    from_output: bool,
) -> tuple[Tensor, Tensor]:
    if weight is not None:
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    norm = Rows(rstd.numel(), columns, weight, bias, centred, from_output)
    of_weight, of_bias = row_steps.gradients_(dy.contiguous(), saved, out, norm, mean, rstd)
    return (
        of_weight if weight is None else of_weight.view_as(weight),
        of_bias if bias is None else of_bias.view_as(bias),
    )


# -- gated -------------------------------------------------------------------------------------------------------------


def _as_rows(x: Tensor) -> Tensor:
    """x as [rows, columns] with dense columns: a view where it can be one."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _fake_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@_operator("swiglu(Tensor gate, Tensor up) -> Tensor", _fake_swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = _fake_swiglu(gate, up)
    if out.numel():
        row_steps.swiglu_(_as_rows(gate), _as_rows(up), _as_rows(out))
    return out


@_operator(
    "swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda dy, gate, up: (_fake_swiglu(gate, up), _fake_swiglu(gate, up)),
)
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = _fake_swiglu(gate, up), _fake_swiglu(gate, up)
    if dgate.numel():
        row_steps.swiglu_backward_(*map(_as_rows, (dy, gate, up, dgate, dup)))
    return dgate, dup


@_operator("swiglu_backward_(Tensor dy, Tensor(a!) gate, Tensor(b!) up) -> ()", lambda dy, gate, up: None)
def swiglu_backward_(dy: Tensor, gate: Tensor, up: Tensor) -> None:
    """gate and up become their gradients; both must be rows already: `_as_rows` may not copy them."""
    if gate.numel():
        gate, up = _as_rows(gate), _as_rows(up)
        row_steps.swiglu_backward_(_as_rows(dy), gate, up, gate, up)
