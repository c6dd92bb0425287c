"""A gradient that is not the op's alone: expanded, a slice, the caller's, or shared with another node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Trial

kind = HazardKind("a gradient that is not the op's alone")
hazard = kind.hazard


@hazard("plain chain")
def plain_chain(t: Trial) -> None:
    t.loss(t.op(*t.inputs())).backward()


@hazard("sum().backward()")
def sum_backward(t: Trial) -> None:
    t.op(*t.inputs()).sum().backward()


@hazard("mean().backward()")
def mean_backward(t: Trial) -> None:
    t.op(*t.inputs()).mean().backward()


@hazard("gradient expanded over the first dimension")
def expanded_first(t: Trial) -> None:
    t.loss(t.op(*t.inputs()).sum(0)).backward()


@hazard("gradient expanded over the last dimension")
def expanded_last(t: Trial) -> None:
    t.loss(t.op(*t.inputs()).sum(-1)).backward()


@hazard("gradient transposed")
def transposed_gradient(t: Trial) -> None:
    t.loss(t.op(*t.inputs()).transpose(0, -1)).backward()


@hazard("gradient is a slice, by cat")
def sliced_by_cat(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    t.loss(torch.cat([other, t.op(*t.inputs()), other.sin()], -1)).backward()


@hazard("gradient is a slice, by stack")
def sliced_by_stack(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    t.loss(torch.stack([t.op(*t.inputs()), other], -1)).backward()


@hazard("gradient is a slice of the user's")
def sliced_from_user(t: Trial) -> None:
    whole = t.constant("g", (2, *t.output_shape))
    t.op(*t.inputs()).backward(whole[1])


@hazard("gradient passed to backward")
def users_gradient(t: Trial) -> None:
    t.op(*t.inputs()).backward(t.constant("g"))


@hazard("gradient passed to backward, expanded")
def users_expanded_gradient(t: Trial) -> None:
    t.op(*t.inputs()).backward(t.constant("g", ()).expand(t.output_shape))


@hazard("gradient passed to backward, strided")
def users_strided_gradient(t: Trial) -> None:
    t.op(*t.inputs()).backward(t.constant("g", (*t.output_shape, 2))[..., 0])


@hazard("gradient passed to backward, overlapping")
def users_overlapping_gradient(t: Trial) -> None:
    shape = t.output_shape
    t.op(*t.inputs()).backward(t.constant("g", (sum(shape),)).as_strided(shape, [1] * len(shape)))


@hazard("gradient passed to autograd.grad")
def users_gradient_to_grad(t: Trial) -> None:
    ys = [t.op(*t.inputs())]
    wanted = [*t.leaves.values(), *t.module().parameters()]
    for i, gradient in enumerate(torch.autograd.grad(ys.pop(), wanted, grad_outputs=[t.constant("g")])):
        t.see(f"result {i}", gradient)


@hazard("gradient passed to backward, through an add")
def users_gradient_through_add(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    (other + t.op(*t.inputs())).backward(t.constant("g"))


@hazard("x + y: the other reads the gradient after the op")
def shared_other_after(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")  # created before the op, so its backward runs after the op's
    t.loss(other + t.op(*t.inputs())).backward()


@hazard("x + y: the other reads the gradient before the op")
def shared_other_before(t: Trial) -> None:
    t.loss(t.op(*t.inputs()) + t.leaf("v") * t.leaf("w")).backward()


@hazard("x + y: the other has a view of the gradient")
def shared_through_view(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    # The views' backwards run first and leave an alias of the gradient in the buffer of the product, which runs last.
    t.loss(t.op(*t.inputs()) + other.view(-1).view(other.shape)).backward()


@hazard("x + y: a leaf's .grad is a view of the gradient")
def shared_with_stolen_view(t: Trial) -> None:
    leaf = t.leaf("v")
    t.loss(t.op(*t.inputs()) + leaf.view(-1).view(leaf.shape)).backward()


@hazard("x + y: a leaf takes the gradient")
def shared_with_leaf(t: Trial) -> None:
    t.loss(t.leaf("v") + t.op(*t.inputs())).backward()


@hazard("x + y: the op on both sides")
def shared_between_two_ops(t: Trial) -> None:
    t.loss(t.op(*t.inputs("a"), i=0) + t.op(*t.inputs("b"), i=1)).backward()


@hazard("three summands")
def three_summands(t: Trial) -> None:
    other, more = t.leaf("v") * t.leaf("w"), t.leaf("u").sin()
    t.loss(other + t.op(*t.inputs()) + more).backward()


@hazard("y + y")
def twice_the_output(t: Trial) -> None:
    def double(y: Tensor) -> Tensor:
        return y + y

    t.loss(double(t.op(*t.inputs()))).backward()


@hazard("residual around the op")
def residual(t: Trial) -> None:
    t.same_shape()
    x = t.inputs()[0]
    t.loss(x + t.op(x * 0.7, *t.inputs()[1:])).backward()


@hazard("residual around two ops in a row")
def residual_around_two(t: Trial) -> None:
    t.same_shape()
    x = t.inputs()[0]
    t.loss(x + t.op(t.op(x * 0.7, *t.inputs()[1:]), *t.inputs("b")[1:], i=1)).backward()


@hazard("diamond")
def diamond(t: Trial) -> None:
    x = t.inputs(how=lambda v: v.sin())
    left = t.op(*(each * 0.9 for each in x), i=0)
    right = t.op(*(each * 1.1 for each in x), i=1)
    loss = t.loss(left * right + left - right)
    del x, left, right
    loss.backward()


class HandsBackItsConstant(torch.autograd.Function):
    """(y * c).sum(), whose gradient for y is c itself."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(c)
        return (y * c).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0], None


@hazard("gradient is another node's saved tensor")
def gradient_is_saved(t: Trial) -> None:
    HandsBackItsConstant.apply(t.op(*t.inputs()), t.constant("c")).backward()


class Passes(torch.autograd.Function):
    """y, and keeps the gradient that it hands on."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        return y * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.keep(gradient)
        return gradient, None


@hazard("another node keeps the gradient it hands on")
def gradient_is_kept_by_node(t: Trial) -> None:
    t.loss(Passes.apply(t.op(*t.inputs()), t.keeper("gradient"))).backward()
