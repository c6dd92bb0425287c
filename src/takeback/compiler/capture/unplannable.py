"""Refuses what no plan can hold, at the op that brings it: unusual tensors, shapes that depend on data, resizing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import HigherOrderOperator  # checked on 2.13

from takeback.compiler.capture.buffers import BufferTable
from takeback.compiler.capture.op_facts import facts_of
from takeback.compiler.capture.site import at
from takeback.compiler.program import Op, OpOverload, Role, Site
from takeback.errors import CaptureError

aten = torch.ops.aten

_KEEP_SHAPES = (
    "Keep the shape fixed: multiply by the mask, use torch.where, or pass the selection as a part of the batch. A "
    "metric is computed outside, of tensors returned as aux."
)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def refuse_unusual(tensor: torch.Tensor, where: Callable[[], str], *, real: bool) -> None:
    """A tensor that is more than strided bytes. A fake one is a subclass, and allowed where the step is not real."""
    if real and type(tensor) not in _PLAIN_TENSORS and not _is_frozen_parameter(tensor):
        raise CaptureError(
            f"a tensor subclass ({type(tensor).__module__}.{type(tensor).__qualname__}) takes part in the step"
            f"{where()}. takeback plans plain tensors only; convert it before the step."
        )
    if tensor.is_nested:
        raise CaptureError(
            f"a nested tensor, whose lengths are data, takes part in the step{where()}. takeback plans plain tensors. "
            f"nn.TransformerEncoder makes one of a padding mask where nothing needs a gradient: construct it with "
            f"enable_nested_tensor=False."
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"a tensor of layout {tensor.layout} takes part in the step{where()}. takeback plans strided "
            f"tensors only; for nn.Embedding use sparse=False."
        )
    if tensor._is_zerotensor():  # checked on 2.11 and 2.13
        raise CaptureError(
            f"a ZeroTensor, which has a shape and no bytes, takes part in the step{where()}. torch makes them in "
            f"forward-mode differentiation (torch.func.jvp, jacfwd, hessian; torch.autograd.forward_ad) for a tangent "
            f"that is zero. Differentiate in reverse mode: torch.func.grad, vjp, jacrev, or torch.autograd.grad."
        )


def _is_frozen_parameter(tensor: torch.Tensor) -> bool:
    """Whether its class says something to Python alone, such as that its bytes are packed (bitsandbytes' Params4bit),
    and to torch's dispatcher it is a parameter like others, or a view of one."""
    kind = type(tensor)
    dispatches = kind.__torch_dispatch__ is not torch.nn.Parameter.__torch_dispatch__
    return issubclass(kind, torch.nn.Parameter) and not dispatches and not tensor.requires_grad


def refuse_higher_order(target: Any, where: Callable[[], str]) -> None:
    """An operator that is given a function of the user's and runs it by itself: flex_attention, cond, scan."""
    if isinstance(target, HigherOrderOperator):
        raise CaptureError(
            f"{target.name()} takes part in the step{where()}: an operator that runs a function of its own, which no "
            f"recording sees into. For attention use scaled_dot_product_attention, with a mask "
            f"(attn_implementation='sdpa' in transformers); elsewhere compute it with plain ops."
        )


def refuse_lazy(tensors: Iterable[torch.Tensor], where: Callable[[], str]) -> None:
    """A tensor that the step writes or gives, and that is conjugated or negated by a flag only."""
    if any(t.is_conj() or t.is_neg() for t in tensors):
        raise CaptureError(
            f"the step writes or returns a lazily conjugated or negated tensor{where()}. "
            f"Call .resolve_conj() or .resolve_neg() on it."
        )


def refuse_dynamic(target: OpOverload, args: tuple[Any, ...], site: Site | None) -> None:
    """A result whose shape depends on the data, where no replay could look at it."""
    if not facts_of(target).dynamic:
        return
    if target is aten.index.Tensor and not any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    ):
        return
    raise CaptureError(
        f"{target} gives a tensor whose shape depends on the data{at(site)}, so no plan can hold it. {_KEEP_SHAPES}"
    )


def may_hold_shape(target: OpOverload) -> bool:
    """Whether a replay can look at the shape of what the op gives, and find another plan. Not where it is written into
    a tensor that is there; nor where torch, around the op, fills a tensor with numbers of its own behind the
    dispatcher's back: ctc_loss with lists of lengths."""
    return facts_of(target).writes_nothing and target is not aten._ctc_loss.default


def varying(op: Op, times: int) -> CaptureError:
    """What is raised where such a shape was another one so many times in a row."""
    return CaptureError(
        f"{op.target} gives a tensor whose shape depends on the data{at(op.site)}, and it was another one {times} "
        f"times in a row, so no plan can hold it. {_KEEP_SHAPES}"
    )


class RunsOtherwiseFirst(CaptureError):
    """The first run of the step makes something of random numbers and keeps it, computes something else than later ones
    or gives an empty tensor its size. Once it was made in eager, the step can be recorded."""


def refuse_resized(target: OpOverload, mutated: Iterable[torch.Tensor], table: BufferTable, site: Site | None) -> None:
    """An op that gave one of the tensors it wrote another size."""
    for tensor in mutated:
        buffer, now = table.of(tensor), tensor.untyped_storage().nbytes()
        if buffer.role is Role.BATCH or now == buffer.size_bytes:
            continue
        if buffer.role is not Role.INTERNAL and not buffer.size_bytes:
            whose = f"the buffer {buffer.name!r}" if buffer.role is Role.BUFFER else "a tensor of yours"
            raise RunsOtherwiseFirst(
                f"{target}{at(site)} gives {whose}, which is empty, {now} bytes the first time the step runs. A buffer "
                f"has one size in a plan: run the model once on such a batch before the first step."
            )
        raise CaptureError(
            f"{target}{at(site)} resized a tensor from {buffer.size_bytes} to {now} bytes. A buffer has one size in a "
            f"plan: give out= a tensor of the right shape, or in place of resize_() make a new one (new_empty)."
        )
