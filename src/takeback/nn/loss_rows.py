"""Cross-entropy of hidden @ weight.T + bias by chunks of rows: the sum of the losses, and its gradients on the way.

In: rows of hidden states, the weight, targets, and what is done to the logits before the loss (`LogitStep`). Out: the
sum over the rows that count, and the gradients of that sum that were asked for. Guaranteed: no more than `rows` rows of
logits exist at one time, and their gradient takes their bytes; the gradient of the weight is accumulated inside the
product, in float32 where the logits are half precision; rows whose target is ignored have no influence, whatever they
hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from takeback.nn.kernels.width import wide

LEAST_ROWS = 256  #: of a chunk: below this the products no longer fill the machine


@dataclass(frozen=True)
class LogitStep:
    """One thing that is done to every logit."""

    kind: Literal["mul", "div", "tanh", "cast"]
    number: float = 1.0  #: of mul and div
    dtype: torch.dtype | None = None  #: of cast


@dataclass(frozen=True)
class LossSettings:
    """What the loss is, besides its tensors."""

    steps: tuple[LogitStep, ...] = ()
    ignore_index: int = -100
    label_smoothing: float = 0.0
    product_dtype: torch.dtype | None = None  #: what autocast computes products in; None: what the tensors are
    rows: int | None = None  #: of a chunk; None: `chunk_rows` says


@dataclass(frozen=True)
class Wanted:
    """Which gradients to compute."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass(frozen=True)
class LossSums:
    """The loss summed over rows, and its gradients. Those of weight and bias are as wide as the arithmetic."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def chunk_rows(count: int, columns: int, dtype: torch.dtype) -> int:
    """How many rows a chunk has: equal chunks whose logits, in `dtype` and again in the width of the arithmetic, take
    no more than the gradient of the weight does while it is accumulated, which is there anyway. So the number of
    classes cancels out: about as many rows as the weight has columns, enough that the products outweigh reading and
    writing that gradient once for each chunk.
    """
    wide_bytes = int(wide(dtype).itemsize)
    most = max(LEAST_ROWS, columns * wide_bytes // (wide_bytes + (0 if wide(dtype) == dtype else dtype.itemsize)))
    chunks = max(1, -(-count // most))
    each = max(1, -(-count // chunks))
    return each if chunks == 1 else -(-each // 8) * 8  # products like aligned rows


def walk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: LossSettings, wanted: Wanted
) -> LossSums:
    """The loss of all rows. hidden is [rows, columns], targets [rows]; autograd and autocast must be off."""
    dtype = how.product_dtype or hidden.dtype
    acc = wide(dtype)
    count, (classes, columns) = hidden.shape[0], weight.shape
    rows = how.rows or chunk_rows(count, columns, dtype)
    given, added = weight.to(dtype), None if bias is None else bias.to(dtype)
    total = torch.zeros((), dtype=acc, device=hidden.device)
    made = torch.empty((min(rows, count), classes), dtype=dtype, device=hidden.device)
    of_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted.hidden else None
    of_weight = torch.zeros((classes, columns), dtype=acc, device=hidden.device) if wanted.weight else None
    of_bias = torch.zeros(classes, dtype=acc, device=hidden.device) if wanted.bias else None
    for start in range(0, count, rows):
        part, target = hidden[start : start + rows], targets[start : start + rows]
        counts = (target != how.ignore_index).unsqueeze(1)
        part = torch.where(counts, part, 0).to(dtype)  # whatever an ignored row holds is gone from here on
        logits = made[: part.shape[0]]
        if added is None:
            torch.mm(part, given.t(), out=logits)
        else:
            torch.addmm(added, part, given.t(), out=logits)
        loss, gradient = _of_chunk(logits, counts, target, how, acc, gradient=wanted.any)
        total += loss
        if gradient is None:
            continue
        if of_bias is not None:  # otherwise a pass over the classes is spared: the rows of `part` are 0 there
            of_bias += gradient.mul_(counts).sum(0, dtype=acc)
        narrow = gradient if gradient.dtype == dtype else logits.copy_(gradient)
        if of_weight is not None:
            _add_product_(of_weight, gradient, narrow, part)
        if of_hidden is not None:
            place = of_hidden[start : start + rows]
            if place.dtype == dtype:
                torch.mm(narrow, given, out=place)
            else:
                place.copy_(torch.mm(narrow, given))
            place.masked_fill_(~counts, 0)
    return LossSums(total, of_hidden, of_weight, of_bias)


def _of_chunk(
    logits: Tensor, counts: Tensor, target: Tensor, how: LossSettings, acc: torch.dtype, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of one chunk, and the gradient of its logits, wide or as they are; `logits` is used up."""
    values, kept = _stepped(logits, how.steps)
    before = values.dtype
    values = values.to(acc)
    logs = torch.ops.aten._log_softmax.out(values, 1, False, out=values)
    chosen = torch.where(counts, target.unsqueeze(1), 0)
    smoothing = how.label_smoothing
    loss = logs.gather(1, chosen).mul_(smoothing - 1)
    if smoothing:
        loss.sub_(logs.mean(1, keepdim=True), alpha=smoothing)
    loss = torch.where(counts, loss, 0).sum()
    if not gradient:
        return loss, None
    of_values = logs.exp_()
    if smoothing:
        of_values.sub_(smoothing / logs.shape[1])
    of_values.scatter_add_(1, chosen, of_values.new_full((), smoothing - 1).expand_as(chosen))
    return loss, _stepped_back(of_values, before, how.steps, kept)


def _stepped(logits: Tensor, steps: tuple[LogitStep, ...]) -> tuple[Tensor, list[Tensor | torch.dtype]]:
    """The logits after all steps, in bytes that may be overwritten; and what the way back needs, in order."""
    values = logits
    kept: list[Tensor | torch.dtype] = []
    for step in steps:
        if step.kind == "cast":
            assert step.dtype is not None
            kept.append(values.dtype)
            values = values.to(step.dtype)
            continue
        if any(values is each for each in kept):
            values = values.clone()
        if step.kind == "mul":
            values.mul_(step.number)
        elif step.kind == "div":
            values.div_(step.number)
        else:
            kept.append(values.tanh_())
    return (values.clone() if any(values is each for each in kept) else values), kept


def _stepped_back(
    gradient: Tensor, dtype: torch.dtype, steps: tuple[LogitStep, ...], kept: list[Tensor | torch.dtype]
) -> Tensor:
    """The gradient of the product's result, from that of the values after the last step, which were of `dtype`."""
    if steps:
        gradient = gradient.to(dtype)
    for index in reversed(range(len(steps))):
        step = steps[index]
        if step.kind == "mul":
            gradient.mul_(step.number)
        elif step.kind == "div":
            gradient.div_(step.number)
        elif step.kind == "tanh":
            result = kept.pop()
            assert isinstance(result, Tensor)
            gradient = torch.ops.aten.tanh_backward.grad_input(gradient, result, grad_input=gradient)
        else:
            before = kept.pop()
            assert isinstance(before, torch.dtype)
            gradient = gradient.to(before) if index else gradient  # after the last one, who multiplies it casts
    return gradient


def _add_product_(total: Tensor, gradient: Tensor, narrow: Tensor, part: Tensor) -> None:
    """total += gradient.T @ part, with the accumulator of the product where that is wider than its factors."""
    if part.dtype == total.dtype:
        total.addmm_(narrow.t(), part)
    elif total.is_cuda:
        torch.addmm(total, narrow.t(), part, out_dtype=total.dtype, out=total)
    else:  # the CPU has no such product
        total.addmm_(gradient.t().to(total.dtype), part.to(total.dtype))
