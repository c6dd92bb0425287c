"""More than one backward: of one graph, of several, and after an error."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Expected, Skip, Trial

kind = HazardKind("more than one backward")
hazard = kind.hazard


@hazard("retain_graph, then a second backward")
def retain_graph(t: Trial) -> None:
    loss = t.loss(t.op(*t.inputs()))
    loss.backward(retain_graph=True)
    loss.backward()


@hazard("retain_graph, three times, shared gradient")
def retain_graph_shared(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    loss = t.loss(other + t.op(*t.inputs()))
    for _ in range(3):
        loss.backward(retain_graph=True)


@hazard("retain_graph, another gradient")
def retain_graph_other_gradient(t: Trial) -> None:
    y = t.op(*t.inputs())
    y.backward(t.constant("g"), retain_graph=True)
    y.backward(t.constant("h"))


@hazard("second backward without retain_graph")
def second_backward(t: Trial) -> None:
    y = t.op(*t.inputs(how=lambda v: v + 0.5))  # whose backward saves nothing, so that only the op can raise
    y.backward(t.constant("g"), retain_graph=t.plain)  # right twice, or an error
    y.backward(t.constant("g"))


@hazard("backward of some leaves, then of the others")
def some_then_others(t: Trial) -> None:
    loss = t.loss(t.op(*t.inputs()))
    x, weights = list(t.leaves.values()), list(t.module().parameters())
    loss.backward(inputs=weights or x, retain_graph=True)
    loss.backward(inputs=x)


@hazard("two losses")
def two_losses(t: Trial) -> None:
    y = t.op(*t.inputs())
    first, second = t.loss(y, "c"), t.loss(y.sin(), "d")
    del y
    first.backward(retain_graph=True)
    second.backward()


@hazard("two losses in one backward")
def two_losses_at_once(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    y = t.op(*t.inputs())
    losses = [t.loss(y + other, "c"), y.sum()]
    del y
    torch.autograd.backward(losses)


@hazard("create_graph and a double backward")
def double_backward(t: Trial) -> None:
    loss = t.loss(t.op(*t.inputs()).sin())
    wanted = [*t.leaves.values(), *t.module().parameters()]
    gradients = torch.autograd.grad(loss, wanted, create_graph=True)
    (loss + torch.stack([g.square().sum() for g in gradients]).sum()).backward()


@hazard("create_graph, without a double backward")
def create_graph_only(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    t.loss(other + t.op(*t.inputs())).backward(create_graph=True)
    for each in [*t.leaves.values(), *t.module().parameters()]:
        each.grad = None if each.grad is None else each.grad.detach()


@hazard("autograd.grad with an unused input")
def allow_unused(t: Trial) -> None:
    loss = t.loss(t.op(*t.inputs()))
    wanted = [*t.leaves.values(), t.leaf("unused"), *t.module().parameters()]
    for i, gradient in enumerate(torch.autograd.grad(loss, wanted, allow_unused=True)):
        t.see(f"result {i}", gradient)


@hazard("gradients of two steps, the first ones held")
def gradients_held(t: Trial) -> None:
    t.loss(t.op(*t.inputs(how=lambda v: v + 0.5))).backward()
    for i, each in enumerate([*t.leaves.values(), *t.module().parameters()]):
        if each.grad is not None:
            t.see(f"first gradient {i}", each.grad)
            t.keep(f"first gradient {i}", each.grad)
    t.without_gradients()
    t.loss(t.op(*t.inputs(how=lambda v: v + 0.5)), "d").backward()


@hazard("accumulation over two forward passes")
def accumulation(t: Trial) -> None:
    for name in "cd":  # what the op hands out is what the leaf's .grad becomes
        t.loss(t.op(*t.inputs(how=lambda v: v + 0.5)), name).backward()


@hazard("two forwards, then two backwards")
def forwards_then_backwards(t: Trial) -> None:
    losses = [t.loss(t.op(*t.inputs(tag))) for tag in "ab"]
    for loss in losses:
        loss.backward()


@hazard("two forwards, then two backwards in reverse")
def forwards_then_backwards_reversed(t: Trial) -> None:
    losses = [t.loss(t.op(*t.inputs(tag))) for tag in "ab"]
    for loss in reversed(losses):
        loss.backward()


@hazard("one module twice in a graph")
def module_twice(t: Trial) -> None:
    t.loss(t.op(*t.inputs("a")) * t.op(*t.inputs("b"))).backward()


@hazard("one module twice in a row")
def module_twice_in_a_row(t: Trial) -> None:
    t.same_shape()
    t.loss(t.op(t.op(*t.inputs()), *t.inputs("b")[1:])).backward()


@hazard("an error in the middle of backward, then again")
def error_then_again(t: Trial) -> None:
    broken = [True]

    def stop(_: Tensor) -> None:
        if broken:
            broken.pop()
            raise Expected

    x = t.inputs()
    x[0].register_hook(stop)
    loss = t.loss(t.op(*x))
    del x
    with contextlib.suppress(Expected):
        loss.backward(retain_graph=True)
    t.without_gradients()
    loss.backward()


@hazard("an error in the middle of backward, then another step")
def error_then_another(t: Trial) -> None:
    def stop(_: Tensor) -> None:
        raise Expected

    x = t.inputs("broken")
    x[0].register_hook(stop)
    loss = t.loss(t.op(*x))
    del x
    with contextlib.suppress(Expected):
        loss.backward()
    t.without_gradients()
    t.loss(t.op(*t.inputs())).backward()


@hazard("an error before the op's backward, then another step")
def error_before_op(t: Trial) -> None:
    def stop(_: Tensor) -> None:
        raise Expected

    y = t.op(*t.inputs("broken"))
    y.register_hook(stop)
    loss = t.loss(y)
    del y
    with contextlib.suppress(Expected):
        loss.backward()
    t.without_gradients()
    t.loss(t.op(*t.inputs())).backward()


@hazard("weights changed between forward and backward")
def weights_changed(t: Trial) -> None:
    loss = t.loss(t.op(*t.inputs()))
    weights = list(t.module().parameters())
    if not weights:
        raise Skip("the op has no parameters")
    with torch.no_grad():
        for each in [] if t.plain else weights:
            each.mul_(2)
    loss.backward()  # as of the forward, or an error
    with torch.no_grad():
        for each in [] if t.plain else weights:
            each.div_(2)
