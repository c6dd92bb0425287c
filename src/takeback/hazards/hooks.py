"""Hooks that keep, replace or hand in gradients around the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Skip, Trial

kind = HazardKind("hooks")
hazard = kind.hazard


@hazard("tensor hook keeps the output's gradient")
def hook_on_output(t: Trial) -> None:
    y = t.op(*t.inputs())
    y.register_hook(t.keeper("gradient of y"))
    loss = t.loss(y)
    del y
    loss.backward()


@hazard("tensor hook keeps the input's gradient")
def hook_on_input(t: Trial) -> None:
    x = t.inputs()
    for i, each in enumerate(x):
        each.register_hook(t.keeper(f"gradient of input {i}"))
    loss = t.loss(t.op(*x))
    del x, each
    loss.backward()
    t.loss(t.op(*t.inputs("b"))).backward()


@hazard("tensor hook keeps the gradient between two ops")
def hook_between(t: Trial) -> None:
    t.same_shape()
    middle = t.op(*t.inputs(), i=0)
    middle.register_hook(t.keeper("gradient between"))
    loss = t.loss(t.op(middle, *t.inputs("b")[1:], i=1))
    del middle
    loss.backward()


@hazard("tensor hook replaces the output's gradient")
def hook_replaces(t: Trial) -> None:
    y = t.op(*t.inputs())
    y.register_hook(lambda gradient: gradient * 2)
    loss = t.loss(y)
    del y
    loss.backward()


@hazard("tensor hook hands in the user's tensor")
def hook_hands_in(t: Trial) -> None:
    users = t.constant("g")
    y = t.op(*t.inputs())
    y.register_hook(lambda _: users)
    loss = t.loss(y)
    del y
    loss.backward()


@hazard("node prehook keeps the gradient")
def node_prehook(t: Trial) -> None:
    keep = t.keeper("gradient of y")
    y = t.op(*t.inputs())
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda gradients: keep(gradients[0]))
    loss = t.loss(y)
    del y
    loss.backward()


@hazard("node hook keeps what came in")
def node_hook(t: Trial) -> None:
    keep = t.keeper("gradient that came in")
    y = t.op(*t.inputs()) * 1.0  # the hook is on the consumer: what it hands out is what the op is given
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda outgoing, _: keep(outgoing[0]))
    loss = t.loss(y)
    del y
    loss.backward()


@hazard("multi-grad hook keeps gradients")
def multi_grad_hook(t: Trial) -> None:
    keep, keep_other = t.keeper("gradient of y"), t.keeper("gradient of other")
    other = t.leaf("v") * t.leaf("w")
    y = t.op(*t.inputs())

    def hook(gradients: Any) -> None:
        keep(gradients[0])
        keep_other(gradients[1])

    torch.autograd.graph.register_multi_grad_hook((y, other), hook)
    loss = t.loss(other + y)
    del y
    loss.backward()


@hazard("module full backward hook")
def full_backward_hook(t: Trial) -> None:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        t.keeper("grad_input")(inputs[0])
        t.keeper("grad_output")(outputs[0])

    t.module().register_full_backward_hook(hook)
    t.loss(t.op(*t.inputs())).backward()


@hazard("module full backward pre-hook")
def full_backward_pre_hook(t: Trial) -> None:
    t.module().register_full_backward_pre_hook(lambda module, outputs: t.keeper("grad_output")(outputs[0]))
    t.loss(t.op(*t.inputs())).backward()


@hazard("post-accumulate hooks")
def post_accumulate_hooks(t: Trial) -> None:
    other = t.leaf("v")
    loss = t.loss(t.op(*t.inputs()) + other)
    for i, each in enumerate([*t.leaves.values(), *t.module().parameters()]):
        each.register_post_accumulate_grad_hook(lambda p, i=i: t.see(f"gradient {i} when accumulated", p.grad))
    loss.backward()


@hazard("retain_grad of the output")
def retain_grad_output(t: Trial) -> None:
    y = t.op(*t.inputs())
    y.retain_grad()
    t.loss(y).backward()
    t.see("y.grad", y.grad)


@hazard("retain_grad of the input")
def retain_grad_input(t: Trial) -> None:
    if t.in_place:
        raise Skip("after the op, the input is the output")
    x = t.inputs()
    for each in x:
        each.retain_grad()
    t.loss(t.op(*x)).backward()
    for i, each in enumerate(x):
        t.see(f"x{i}.grad", each.grad)


@hazard("anomaly detection")
def anomaly(t: Trial) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        other = t.leaf("v") * t.leaf("w")
        t.loss(other + t.op(*t.inputs())).backward()
