"""Modes: no_grad, inference, eval, frozen parameters, threads, autocast; and odd inputs."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Skip, Trial

kind = HazardKind("modes")
hazard = kind.hazard


def _alone_and_shared(t: Trial) -> None:
    """A graph in which the op may overwrite everything, and one in which it may overwrite nothing."""
    t.loss(t.op(*t.inputs())).backward()
    other = t.leaf("v") * t.leaf("w")
    y = t.op(*t.inputs("b"))
    t.keep("output", y)
    t.loss(other + y, "d").backward()


@hazard("no_grad around the op")
def under_no_grad(t: Trial) -> None:
    x = [t.draw(f"x{i}", s) for i, s in enumerate(t.subject.shapes)]
    if not t.in_place:
        for i, each in enumerate(x):
            t.keep(f"input {i}", each)
    with torch.no_grad():
        t.op(*x)


@hazard("no_grad inside a graph")
def no_grad_inside(t: Trial) -> None:
    x = t.inputs()
    before = [each * t.leaf(f"w{i}", each.shape) for i, each in enumerate(x)]
    with torch.no_grad():
        aside = t.op(*x)
    loss = t.loss(aside * t.leaf("v")) + sum(t.loss(each, f"d{i}") for i, each in enumerate(before))
    del x
    loss.backward()


@hazard("enable_grad inside no_grad")
def enable_grad_inside(t: Trial) -> None:
    with torch.no_grad(), torch.enable_grad():
        _alone_and_shared(t)


@hazard("inference_mode")
def inference(t: Trial) -> None:
    outside = [t.draw(f"x{i}", s) for i, s in enumerate(t.subject.shapes)]
    if not t.in_place:
        for i, each in enumerate(outside):
            t.keep(f"input {i}", each)
    t.module()
    with torch.inference_mode():
        t.op(*(each.detach() * 1.5 for each in t.inputs()))
        t.op(*outside)


@hazard("inference_mode, weights made there too")
def inference_weights(t: Trial) -> None:
    with torch.inference_mode():
        t.op(*(each.detach() * 1.5 for each in t.inputs()))


@hazard("eval()")
def evaluation(t: Trial) -> None:
    t.loss(t.op(*t.inputs("train"))).backward()  # running statistics that are not the initial ones
    t.module().eval()
    _alone_and_shared(t)


@hazard("frozen parameters")
def frozen(t: Trial) -> None:
    t.module().requires_grad_(False)
    _alone_and_shared(t)


@hazard("one frozen parameter")
def one_frozen(t: Trial) -> None:
    for parameter in list(t.module().parameters())[:1]:
        parameter.requires_grad_(False)
    _alone_and_shared(t)


@hazard("frozen parameters and no gradient for the input")
def nothing_to_do(t: Trial) -> None:
    t.module().requires_grad_(False)
    x = [each.detach() for each in t.inputs()]
    if not t.in_place:
        for i, each in enumerate(x):
            t.keep(f"input {i}", each)
    t.loss(t.op(*x) * t.leaf("w")).backward()


@hazard("one of several inputs requires a gradient")
def one_input_requires(t: Trial) -> None:
    if len(t.subject.shapes) == 1:
        raise Skip("the op has one input")
    for i in range(len(t.subject.shapes)):
        x = [t.draw(f"{i} {k}", s) for k, s in enumerate(t.subject.shapes)]
        for k, each in enumerate(x):
            if k != i:
                t.keep(f"input {k}", each)
        x[i] = t.inputs()[i]
        t.loss(t.op(*x)).backward()


@hazard("deepcopy of the module between forward and backward")
def deep_copy(t: Trial) -> None:
    loss = t.loss(t.op(*t.inputs()))
    t.modules["copy"] = copy.deepcopy(t.module())
    other = t.loss(t.modules["copy"](*t.inputs("b")))
    loss.backward()
    other.backward()


@hazard("empty batch")
def empty_batch(t: Trial) -> None:
    leaves = [t.leaf(f"x{i}", (0, *s[1:])) for i, s in enumerate(t.subject.shapes)]
    t.op(*(leaf * 1.5 for leaf in leaves)).sum().backward()


@hazard("NaN in the input")
def nan_input(t: Trial) -> None:
    t.loose = True
    for i, shape in enumerate(t.subject.shapes):
        value = t.leaf(f"x{i}", shape)
        with torch.no_grad():
            value.view(-1)[1] = float("nan")
    t.kept.clear()
    t.loss(t.op(*t.inputs())).backward()


@hazard("backward in another thread")
def other_thread(t: Trial) -> None:
    _in_threads([lambda: _alone_and_shared(t)])


@hazard("two threads, one module")
def two_threads(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    losses = [t.loss(t.op(*t.inputs("a"))), t.loss(other + t.op(*t.inputs("b")), "d")]
    meet = threading.Barrier(2, timeout=30)

    def backward(loss: Tensor) -> None:
        meet.wait()
        loss.backward()

    _in_threads([functools.partial(backward, losses.pop()) for _ in range(2)])


def _in_threads(jobs: list[Callable[[], None]]) -> None:
    errors: list[Exception] = []

    def work(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _autocast(dtype: torch.dtype, t: Trial) -> None:
    if dtype not in t.subject.autocast:
        raise Skip(f"not a dtype of the subject under autocast: {dtype}")
    t.tolerance = t.subject.tolerance[dtype]
    with torch.autocast(t.device.type, dtype):

        def product(v: Tensor) -> Tensor:
            return F.linear(v, t.leaf("weight", (v.shape[-1], v.shape[-1])))

        t.loss(t.op(*t.inputs(how=product)).float()).backward()
        other = F.linear(t.leaf("v"), t.leaf("last", (t.output_shape[-1],) * 2))
        y = t.op(*t.inputs("b", how=product))
        t.keep("output", y)
        loss = t.loss((other + y).float(), "d")
    loss.backward()


for _dtype in (torch.bfloat16, torch.float16):
    hazard(f"autocast, {str(_dtype).removeprefix('torch.')}")(functools.partial(_autocast, _dtype))
