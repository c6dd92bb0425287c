"""The activated norm as a function under autograd, and the two decisions it takes: what is kept, what is overwritten.

Forward writes y onto x where x is a dense intermediate that its producer did not save; backward writes dx onto the kept
buffer where that is its alone (owner.py). Everything else makes a new buffer, counted with its reason in `copies`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from takeback import engine
from takeback.errors import ReduceError
from takeback.nn import ops, owner
from takeback.nn.invert import Weights, limits_of, without_inverse
from takeback.nn.kernels import activated
from takeback.nn.kernels.activated import Activation
from takeback.nn.kernels.width import wide
from takeback.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from takeback.nn.owner import Copies
from takeback.nn.sync import group_of, reduce_statistics, reduce_sums

COMPILED = "in a compiled graph nobody can look at the weights"


class Scale(enum.Enum):
    """What the normalised input is multiplied by."""

    WEIGHT = "weight"
    ABSOLUTE = "absolute"  #: |weight| + eps

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"unknown scale {value!r}; the scales are {', '.join(each.value for each in cls)}")


@dataclass(frozen=True)
class ABNSettings:
    """One call's settings, as its Function sees them."""

    training: bool
    momentum: float
    eps: float
    activation: Activation
    param: float
    absolute: bool
    from_output: bool
    overwrite: bool
    group: Any
    copies: Copies

    @property
    def norm(self) -> tuple[float, int, float, bool]:
        return self.eps, int(self.activation), self.param, self.absolute


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    scale: str = "weight",
) -> Tensor:
    """act(batch_norm(x)) with one kept buffer; x is given up. See `InPlaceABN`."""
    return activated_norm(
        *(x, weight, bias, running_mean, running_var),
        training=training,
        momentum=momentum,
        eps=eps,
        activation=activation,
        activation_param=activation_param,
        scale=Scale(scale),
    )


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    group: Any = None,
    *,
    scale: str = "weight",
) -> Tensor:
    """`inplace_abn` with the statistics of all ranks' batches together; group None is all processes."""
    return activated_norm(
        *(x, weight, bias, running_mean, running_var),
        training=training,
        momentum=momentum,
        eps=eps,
        activation=activation,
        activation_param=activation_param,
        scale=Scale(scale),
        group=group_of(group) if training else None,
    )


def activation_of(name: str) -> Activation:
    """The activation of that name; raises `ValueError` with the names there are."""
    try:
        return Activation[name.upper()]
    except (KeyError, AttributeError):
        names = ", ".join(each.name.lower() for each in Activation)
        raise ValueError(f"unknown activation {name!r}; the activations are {names}") from None


def inverse_of(activation: str, param: float, dtype: torch.dtype) -> str | None:
    """Why backward cannot start from the output, whatever the weights are; None where it can."""
    return without_inverse(activation_of(activation), param, dtype)


def activated_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    training: bool,
    momentum: float,
    eps: float,
    activation: str,
    activation_param: float,
    scale: Scale = Scale.WEIGHT,
    group: Any = None,
    weights: Weights | None = None,
    copies: Copies | None = None,
) -> Tensor:
    """What the modules and the functions above have in common. `weights` and `copies` belong to the module."""
    act = activation_of(activation)
    if group is not None and torch.compiler.is_compiling():
        keywords = {"training": training, "momentum": momentum, "eps": eps, "activation": activation}
        more = {"activation_param": activation_param, "scale": scale, "weights": weights, "copies": copies}
        if _outside_of_graphs is None:
            raise ReduceError("torch.compile takes InPlaceABNSync, not inplace_abn_sync: no module was made before.")
        return _outside_of_graphs(x, weight, bias, running_mean, running_var, group=group, **keywords, **more)
    if group is not None and (engine.transformed() or engine.being_recorded()):
        raise ReduceError(
            "InPlaceABNSync asks other processes in the middle of a step: it works in eager code and beside "
            "torch.compile, not in compile_step, make_fx or torch.func. Use InPlaceABN there."
        )
    if not torch.compiler.is_compiling() and engine.transformed():
        # torch.func and forward mode have no rule for a Function of ours; torch's operators have.
        gamma = weight.abs() + eps if weight is not None and scale is Scale.ABSOLUTE else weight
        z = F.batch_norm(x, running_mean, running_var, gamma, bias, training, momentum, eps)
        return plain_activation(z, act, activation_param)
    _check(x, running_mean, running_var, training, group)
    _check_tables(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    copies = owner.ELSEWHERE if copies is None else copies
    absolute = scale is Scale.ABSOLUTE
    why = without_inverse(act, activation_param, x.dtype)
    if why is None:
        if torch.compiler.is_compiling():
            why = None if weight is None else COMPILED
        else:
            limits = limits_of(act, activation_param, x.dtype)
            why = (weights or Weights()).reason(weight, bias, limits, eps if absolute else None)
        copies.note(why, "backward from the input")
    from_output = why is None
    not_ours = _not_ours(x) if from_output else None
    if x.requires_grad:
        copies.note(not_ours, "the input is not overwritten")
    how = ABNSettings(
        training,
        momentum,
        eps,
        act,
        activation_param,
        absolute,
        from_output=from_output,
        overwrite=from_output and not_ours is None,
        group=group,
        copies=copies,
    )
    function = TracedNorm if torch.compiler.is_compiling() else ActivatedNorm
    return function.apply(x, weight, bias, running_mean, running_var, how)


_outside_of_graphs: Callable[..., Tensor] | None = None
"""`activated_norm`, before which a graph of torch.compile ends and after which another begins: the ranks meet."""


def prepare_for_graphs() -> None:
    """Make that. Not when this file is imported: it loads all of torch's compiler."""
    global _outside_of_graphs
    if _outside_of_graphs is None:
        _outside_of_graphs = torch.compiler.disable(activated_norm)


def plain_activation(z: Tensor, activation: Activation, param: float, *, inplace: bool = False) -> Tensor:
    """The activation by torch's operators; `inplace`: onto z, where its backward allows that."""
    inplace = inplace and param >= 0
    if activation == Activation.RELU:
        return F.relu(z, inplace)
    if activation == Activation.LEAKY_RELU:
        return F.leaky_relu(z, param, inplace)
    if activation == Activation.ELU:
        return F.elu(z, param, inplace)
    return F.silu(z) if activation == Activation.SILU else z


class ActivatedNorm(torch.autograd.Function):
    """y = act(gamma * xhat + beta)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        how: ABNSettings,
    ) -> Tensor:
        arguments = (weight, bias, *how.norm, running_mean, running_var, how.training, how.momentum)
        ctx.how, ctx.count = how, None
        if how.group is not None and how.training:
            y, mean, invstd, ctx.count = _synchronised(x, weight, bias, running_mean, running_var, how)
        elif how.overwrite:
            y = x
            mean, invstd = ops.abn_(x, *arguments)
        else:
            y, mean, invstd = ops.abn(x, *arguments)
        for statistic in (running_mean, running_var) if how.training else ():
            if statistic is not None:
                torch.autograd.graph.increment_version(statistic)
        if y is x:
            torch.autograd.graph.increment_version(x)
            ctx.mark_dirty(x)
        owner.keep(ctx, y if how.from_output else x, weight, bias, mean, invstd)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        how: ABNSettings = ctx.how
        (saved, weight, bias, mean, invstd), why = owner.take(ctx)
        arguments = (weight, bias, *how.norm, mean, invstd, how.training, how.from_output)
        if why is None and activated.dense_layout(saved) is None:
            why = "the kept input is not dense"
        if ctx.needs_input_grad[0]:
            how.copies.note(why)
        if ctx.count is not None:
            out = saved if why is None else torch.empty_like(ops.dense(saved))
            dweight, dbias = _synchronised_backward_(dy, saved, out, weight, bias, mean, invstd, ctx.count, how)
            dx = out if why is not None else owner.overwritten(saved)
        elif not ctx.needs_input_grad[0]:
            dx, (dweight, dbias) = None, ops.abn_sums(dy, saved, *arguments)
        elif why is None:
            dweight, dbias = ops.abn_backward_(dy, saved, *arguments)
            dx = owner.overwritten(saved)
        else:
            dx, dweight, dbias = ops.abn_backward(dy, saved, *arguments)
        wanted = zip((dx, dweight, dbias), ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None, None, None


class TracedNorm(torch.autograd.Function):
    """The same for torch.compile, which plans memory itself: nothing is overwritten."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        how: ABNSettings,
    ) -> Tensor:
        y, mean, invstd = torch.ops.takeback.abn(
            x, weight, bias, *how.norm, running_mean, running_var, how.training, how.momentum
        )
        ctx.how = how
        ctx.save_for_backward(y if how.from_output else x, weight, bias, mean, invstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, weight, bias, mean, invstd = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.takeback.abn_backward(
            dy, saved, weight, bias, *ctx.how.norm, mean, invstd, ctx.how.training, ctx.how.from_output
        )
        return dx, None if weight is None else dweight, None if bias is None else dbias, None, None, None


# -- decisions ---------------------------------------------------------------------------------------------------------


def _not_ours(x: Tensor) -> str | None:
    """Why x must not be overwritten by the forward; None where nobody but its producer can know it."""
    producer = x.grad_fn
    if torch.compiler.is_compiling():
        return COMPILED
    if producer is None:
        return "it is a leaf, or nothing is being recorded for backward: it may be the caller's own"
    if not torch.is_grad_enabled() or engine.saved_through_hooks():
        return "gradients are off, or what is saved goes through hooks (checkpointing): it may be read again"
    if engine.is_view(x):
        return "it is a view of another tensor"
    if activated.dense_layout(x) is None:
        return "it is not dense"
    if _may_have_saved_its_result(producer.__class__):
        return f"{producer.name()}, which made it, may have saved it for its backward"
    return None


@functools.cache
def _may_have_saved_its_result(node: Any) -> bool:
    """A Function written in Python may have saved anything; torch's own nodes say what they saved."""
    if issubclass(node, torch.autograd.function.BackwardCFunction):
        return True
    return any(hasattr(node, f"_raw_saved_{name}") for name in ("result", "result0", "self_or_result", "output"))


# -- over a process group ----------------------------------------------------------------------------------------------


def _synchronised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    how: ABNSettings,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """y, mean, invstd, and the number of elements a channel has on all ranks together."""
    dense = ops.dense(x)
    layer = ops.layer_of(dense, weight, bias, *how.norm)
    if layer.count:
        mean, variance = activated.statistics(dense, layer)
    else:
        mean, variance = x.new_zeros((2, layer.channels), dtype=wide(x))
    mean, variance, count = reduce_statistics(mean, variance, layer.count, how.group)
    if count == 1:
        raise ValueError("an activated norm needs more than one sample per channel, on all ranks together")
    if count:
        activated.track_(running_mean, running_var, mean, variance, count, how.momentum)
    invstd = (variance + how.eps).rsqrt_()
    y = x if how.overwrite else torch.empty_like(dense)
    if layer.count:
        activated.normalise_(dense, y, layer, mean, invstd)
    return y, mean, invstd, count


def _synchronised_backward_(
    dy: Tensor,
    saved: Tensor,
    out: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    count: int,
    how: ABNSettings,
) -> tuple[Tensor, Tensor]:
    """out = dx, of sums over all ranks; the parameters' gradients are this rank's own, as DDP expects."""
    saved = ops.dense(saved)
    layer = ops.layer_of(saved, weight, bias, *how.norm, from_output=how.from_output)
    dy = ops.laid_as(dy, saved)
    sums, *gradients = activated.gather(dy, saved, layer, mean, invstd)
    total = reduce_sums(sums, how.group)
    if layer.count:
        activated.put_(dy, saved, out, layer, mean, invstd, total, count)
    return gradients[0], gradients[1]


def _check_tables(x: Tensor, **tables: Tensor | None) -> None:
    """The kernels read and write as many elements as x has channels, wherever they lie."""
    channels = x.shape[1]
    for name, table in tables.items():
        if table is None:
            continue
        if table.dim() != 1 or table.shape[0] != channels:
            raise ValueError(f"{name} has shape {tuple(table.shape)}; the input has {channels} channels")
        if table.device != x.device or not table.is_floating_point():
            raise ValueError(f"{name} is {table.dtype} on {table.device}; a floating dtype on {x.device} is needed")


def _check(x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, training: bool, group: Any) -> None:
    if x.dim() < 2:
        raise ValueError(f"an activated norm's input is N × C or N × C × S1 × ... × Sn, got shape {tuple(x.shape)}")
    if x.dtype not in ops.DTYPES:
        raise TypeError(f"an activated norm's input is float32, float64, bfloat16 or float16, got {x.dtype}")
    if not training and (running_mean is None or running_var is None):
        raise ValueError("without training=True, an activated norm needs running_mean and running_var")
    if training and group is None and x.numel() == x.shape[1] > 0:
        raise ValueError(
            "an activated norm is trying to compute batch statistics, but the input tensor only contains a single "
            f"sample per channel: shape {tuple(x.shape)}"
        )
