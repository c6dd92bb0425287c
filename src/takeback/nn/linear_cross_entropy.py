"""Linear + cross-entropy whose logits never exist as a whole; its gradients are computed along with the loss.

In: hidden states, the weight (and bias) of the layer that makes logits, targets. Out: the loss. The chunks are those of
loss_rows.py: for each, the product, the loss, and, where gradients are wanted, two more products. So backward only
multiplies by the gradient that arrives, and no product is computed twice: to keep nothing and compute the logits again
in backward took a third more time and no less memory. Nothing is computed for what needs no gradient.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from takeback import engine
from takeback.nn.loss_rows import LogitStep, LossSettings, Wanted, walk

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: Tensor | float | None = None,
    rows: int | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` without the logits.

    Args:
        hidden: [..., columns]. weight: [classes, columns]. targets: [...], class indices.
        softcap: the logits become softcap * tanh(logits / softcap), in float32.
        reduction: "mean" over the targets that are not `ignore_index`, or "sum".
        num_items: divide the sum by this number instead, as with accumulation over several batches.
        rows: of a chunk, of which logits and their gradient exist at one time; None: as many as take the bytes of the
            weight's gradient (at least 256).

    Returns:
        The loss, in float32, or float64 for float64.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean' or 'sum', got {reduction!r}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is a number above 0, got {softcap!r}")
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    steps = [LogitStep("cast", dtype=wide)]
    if softcap is not None:
        steps += [LogitStep("div", softcap), LogitStep("tanh"), LogitStep("mul", softcap)]
    how = LossSettings(tuple(steps), ignore_index, label_smoothing, rows=rows)
    total = summed_loss(hidden, weight, bias, targets, how)
    if num_items is not None:
        return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class LinearCrossEntropy(nn.Linear):
    """The last layer of a classifier together with its loss: called with hidden states and targets.

    Its parameters and their names are `nn.Linear`'s. `logits(hidden)` is the layer alone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        rows: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.ignore_index, self.label_smoothing, self.softcap = ignore_index, label_smoothing, softcap
        self.reduction: Literal["mean", "sum"] = reduction
        self.rows = rows

    def forward(self, hidden: Tensor, targets: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """The loss."""
        return linear_cross_entropy(
            hidden,
            self.weight,
            targets,
            self.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            reduction=self.reduction,
            num_items=num_items,
            rows=self.rows,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits, whole."""
        logits = F.linear(hidden, self.weight, self.bias)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def summed_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: LossSettings, after: Any = None
) -> Tensor:
    """The loss summed over the rows that count. `after`, if given, is called when its backward runs."""
    _check(hidden, weight, bias, targets, how)
    device = hidden.device.type
    if how.product_dtype is None and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        how = LossSettings(how.steps, how.ignore_index, how.label_smoothing, torch.get_autocast_dtype(device), how.rows)
    if how.product_dtype is None and {weight.dtype} | ({bias.dtype} if bias is not None else set()) != {hidden.dtype}:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: they must be one dtype, or under autocast")
    if torch.compiler.is_compiling() or engine.transformed():
        return whole_loss(hidden, weight, bias, targets, how)  # neither has a rule for a Function of ours
    flat, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    recorded = torch.is_grad_enabled()
    wants = (recorded and each is not None and each.requires_grad for each in (flat, weight, bias))
    return SummedLoss.apply(flat, weight, bias, labels, how, Wanted(*wants), after)


def whole_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: LossSettings) -> Tensor:
    """The same by torch's operators, with all logits at once."""
    logits = stepped(F.linear(hidden, weight, bias), how.steps)
    logits = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits,
        targets.reshape(-1),
        ignore_index=how.ignore_index,
        label_smoothing=how.label_smoothing,
        reduction="sum",
    )


def stepped(logits: Tensor, steps: tuple[LogitStep, ...]) -> Tensor:
    """The logits after the steps, by torch's operators, for autograd."""
    for step in steps:
        if step.kind == "mul":
            logits = logits * step.number
        elif step.kind == "div":
            logits = logits / step.number
        elif step.kind == "tanh":
            logits = torch.tanh(logits)
        else:
            logits = logits.to(step.dtype)
    return logits


class SummedLoss(torch.autograd.Function):
    """The sum of the losses; what it keeps are the gradients themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: LossSettings,
        wanted: Wanted,
        after: Any,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            sums = walk(hidden, weight, bias, targets, how, wanted)
        ctx.after, ctx.hooked = after, engine.saved_through_hooks()
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(sums.hidden, sums.weight, sums.bias)
        return sums.loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        again = ctx.hooked or engine.graph_is_kept() or engine.being_recorded()
        saved = ctx.saved_tensors
        if ctx.after is not None:
            ctx.after()
        scaled = (
            None if each is None else _scaled(each, upstream, dtype, again)
            for each, dtype in zip(saved, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None


def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    """gradient * by, rounded once to `dtype`: over itself, unless it is needed `again`."""
    factor = by.view(1)  # with a dimension, its width counts: a half-precision factor would be rounded first
    if gradient.dtype == dtype:
        return torch.mul(gradient, factor).to(dtype) if again else torch.mul(gradient, factor, out=gradient)
    return (gradient * factor if again else gradient.mul_(factor)).to(dtype)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: LossSettings) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"hidden is [..., columns] and weight [classes, columns], got {shapes}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the weight has {weight.shape[0]} classes")
    if hidden.dtype not in DTYPES:
        raise TypeError(f"hidden is float32, float64, bfloat16 or float16, got {hidden.dtype}")
    if targets.is_floating_point() or targets.shape != hidden.shape[:-1]:
        found = f"{targets.dtype} of shape {tuple(targets.shape)}"
        raise ValueError(f"targets are class indices of shape {tuple(hidden.shape[:-1])}, got {found}")
    if not 0.0 <= how.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, got {how.label_smoothing}")
    if how.rows is not None and how.rows < 1:
        raise ValueError(f"rows is a positive number, got {how.rows}")
