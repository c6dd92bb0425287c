"""Graphs on which an in-place op can destroy what somebody else still reads. Needs torch only: copy it, try your op.

In: a `Subject`, which is an op and the same function in plain torch. Out: for each hazard an `Outcome`. A hazard builds
one graph twice, around the op and around the plain form with equal weights, and compares outputs, gradients of all
leaves and parameters, and buffers; what the user holds (the output, a view of it, a gradient that a hook kept or that
was passed to backward, weights, constants) must keep its bits. To raise is acceptable, to differ silently is WRONG.

    python hazards.py --subject my_module:my_subject [--device cuda] [--guard] [--quick] [--only WORDS] [--json FILE]

Who reads after whom is controlled, not hoped for: of the nodes that are ready, autograd runs the one created last.
A graph keeps no Python reference to the op's input or output unless that is the hazard, so that an op which looks at
reference counts is free to overwrite wherever it may.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import enum
import functools
import importlib
import json
import multiprocessing
import pickle
import queue
import shutil
import sys
import tempfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
}
FLOOR = 0.1  #: an error is relative to the largest value of the plain result, or to this if that is smaller


@dataclass(frozen=True)
class Subject:
    """An op under test, and the same function in plain torch with parameters of the same shapes in the same order."""

    name: str
    make: Callable[[], nn.Module]
    reference: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((6, 8),)  #: of the inputs: one for op(x), two for op(a, b)
    writes_input: bool = False  #: the forward may leave its result in its (first) input, as relu_ does
    dtype: torch.dtype = torch.float32
    autocast: tuple[torch.dtype, ...] = (torch.bfloat16,)
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)


class Verdict(enum.Enum):
    RIGHT = "right"
    RAISED = "raised"
    WRONG = "WRONG"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    detail: str = ""  #: the message, which tensor differs, or why it was skipped
    error: float = 0.0  #: of the worst tensor, relative
    guard: bool = False  #: raised by the guard, not by the op

    def __str__(self) -> str:
        return f"{self.verdict.value}{': ' * bool(self.detail)}{self.detail}"


class Skip(Exception):
    """The hazard does not apply to this subject or device."""


class Expected(Exception):
    """Raised by a hazard in the middle of a backward."""


class Trial:
    """One run of a hazard, around the op or its plain form: it draws the tensors and gathers what is compared."""

    def __init__(self, subject: Subject, device: torch.device, plain: bool) -> None:
        self.subject, self.device, self.plain, self.dtype = subject, device, plain, subject.dtype
        self.in_place = subject.writes_input
        self.seen: dict[str, Tensor | None] = {}
        self.kept: list[tuple[str, Tensor, Tensor]] = []
        self.leaves: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self.writes = False  #: this plain form leaves its result in its input, as relu_ does
        self.read_later = False  #: the graph reads the op's input after the op
        self.loose = False  #: NaN in a parameter's gradient is as good as a number: torch's own elu is not consistent
        self.tolerance = subject.tolerance[subject.dtype]

    # -- tensors ---------------------------------------------------------------------------------------------------

    def draw(self, name: str, shape: Iterable[int]) -> Tensor:
        """Standard normal values, the same wherever the name is the same."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(self.device, self.dtype)

    def leaf(self, name: str, shape: Iterable[int] | None = None) -> Tensor:
        """A parameter of the graph: its gradient is compared. Shaped as the op's output unless told."""
        if name not in self.leaves:
            self.leaves[name] = self.draw(name, self.output_shape if shape is None else shape).requires_grad_()
            self.keep(f"value of {name}", self.leaves[name])
        return self.leaves[name]

    def constant(self, name: str, shape: Iterable[int] | None = None) -> Tensor:
        """A tensor of the user's that must not change."""
        value = self.draw(name, self.output_shape if shape is None else shape)
        self.keep(name, value)
        return value

    def inputs(self, tag: str = "x", how: Callable[[Tensor], Tensor] = lambda v: v * 1.5) -> tuple[Tensor, ...]:
        """Fresh inputs of the op inside a graph, by a producer that saves nothing unless told."""
        return tuple(how(self.leaf(f"{tag}{i}", shape)) for i, shape in enumerate(self.subject.shapes))

    @functools.cached_property
    def output_shape(self) -> tuple[int, ...]:
        with torch.no_grad():
            inputs = (self.draw("shape", shape) for shape in self.subject.shapes)
            return tuple(_build(self.subject, self.device, True, 0)(*inputs).shape)

    def same_shape(self) -> None:
        if self.output_shape != self.subject.shapes[0]:
            raise Skip("input and output have different shapes")

    def needs_numpy(self) -> None:
        if self.device.type != "cpu" or self.dtype == torch.bfloat16:
            raise Skip("a numpy array lies on the CPU, and there is no bfloat16")

    # -- the op ----------------------------------------------------------------------------------------------------

    def module(self, i: int = 0) -> nn.Module:
        """The i-th instance, with the weights of the i-th plain instance."""
        name = f"op{i}" if i else "op"
        if name not in self.modules:
            self.modules[name] = _build(self.subject, self.device, self.plain, i)
            for key, parameter in self.modules[name].named_parameters():
                self.keep(f"value of {name}.{key}", parameter)
        return self.modules[name]

    def op(self, *inputs: Tensor, i: int = 0) -> Tensor:
        """The op, where nobody reads its input afterwards: a plain function of its inputs."""
        y: Tensor = self.module(i)(*inputs)
        self.seen[f"output {len(self.seen)}"] = y.detach().clone()
        return y

    def op_(self, *inputs: Tensor, i: int = 0) -> Tensor:
        """The op, where its input is read afterwards."""
        self.read_later = True
        if not self.writes:
            return self.op(*inputs, i=i)
        return inputs[0].copy_(self.op(*(each.clone() for each in inputs), i=i))

    def loss(self, y: Tensor, name: str = "c") -> Tensor:
        """A scalar whose gradient for y is a fresh dense tensor that nobody else has."""
        return (y * self.constant(name, y.shape)).sum()

    # -- what is compared ------------------------------------------------------------------------------------------

    def see(self, name: str, value: Tensor | None) -> None:
        """To be equal to the plain result."""
        self.seen[name] = None if value is None else value.detach().clone()

    def keep(self, name: str, value: Tensor) -> None:
        """To have the bits of now at the end."""
        self.kept.append((name, value.detach() if value.requires_grad else value, value.detach().clone()))

    def keeper(self, name: str) -> Callable[[Tensor | None], None]:
        """A hook that keeps the gradient it sees."""

        def hook(gradient: Tensor | None) -> None:
            if gradient is not None:
                self.see(f"{name} (when seen)", gradient)
                self.keep(f"{name} (kept)", gradient)

        return hook

    def without_gradients(self) -> None:
        for each in [*self.leaves.values(), *(p for m in self.modules.values() for p in m.parameters())]:
            each.grad = None

    def finish(self) -> None:
        for name, leaf in self.leaves.items():
            self.see(f"gradient of {name}", leaf.grad)
        for name, module in self.modules.items():
            # By position: names may differ between the op and its plain form, shapes and order do not.
            for i, parameter in enumerate(module.parameters()):
                self.see(f"gradient of {name}'s parameter {i}", parameter.grad)
            for i, buffer in enumerate(b for b in module.buffers() if b.is_floating_point()):
                self.see(f"{name}'s buffer {i}", buffer)


def _build(subject: Subject, device: torch.device, plain: bool, i: int) -> nn.Module:
    module = (subject.reference if plain else subject.make)().to(device, subject.dtype)
    generator = torch.Generator().manual_seed(i)
    with torch.no_grad():
        for parameter in module.parameters():
            size = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5
            sign = torch.rand(parameter.shape, generator=generator, dtype=torch.float64).sub_(0.3).sign_()
            parameter.copy_(size * sign)
    return module


# -- the judge ---------------------------------------------------------------------------------------------------------

Guard = Callable[[], AbstractContextManager[Any]]
Graph = Callable[[Trial], None]
Judge = Callable[[Subject, torch.device, Guard], Outcome]


@dataclass(frozen=True)
class Hazard:
    name: str
    judge: Judge
    slow: bool = False


HAZARDS: list[Hazard] = []


def hazard(name: str, *, slow: bool = False, cuda: bool = False) -> Callable[[Graph], Graph]:
    """Registers a function that builds the graph of one trial and runs its backward."""

    def register(graph: Graph) -> Graph:
        def judge(subject: Subject, device: torch.device, guard: Guard) -> Outcome:
            if cuda and device.type != "cuda":
                return Outcome(Verdict.SKIPPED, "needs a GPU")
            return compare_trials(subject, device, graph, guard)

        HAZARDS.append(Hazard(name, judge, slow))
        return graph

    return register


def compare_trials(subject: Subject, device: torch.device, graph: Graph, guard: Guard) -> Outcome:
    """The graph around the plain form, then around the op, and what differs."""
    plain, ours = Trial(subject, device, plain=True), Trial(subject, device, plain=False)
    raised: Exception | None = None
    try:
        _run(plain, graph, contextlib.nullcontext)
    except Skip as skip:
        return Outcome(Verdict.SKIPPED, str(skip))
    except Exception as error:
        raised = error
    try:
        _run(ours, graph, guard)
    except Skip as skip:
        return Outcome(Verdict.SKIPPED, str(skip))
    except Exception as error:
        if raised is None:
            return _raised(error)
    if raised is not None:
        return Outcome(Verdict.SKIPPED, f"plain torch raises {_first_line(raised)}")
    outcome = compare(plain, ours)
    if outcome.verdict is Verdict.WRONG and subject.writes_input and ours.read_later:
        # The input was given up: who reads it afterwards may find the result there instead, consistently.
        written = Trial(subject, device, plain=True)
        written.writes = True
        with contextlib.suppress(RuntimeError):  # torch refuses: then the op had to be right, or to raise
            _run(written, graph, contextlib.nullcontext)
            return compare(written, ours)
    return outcome


def compare(plain: Trial, ours: Trial) -> Outcome:
    found = []
    if missing := sorted(plain.seen.keys() ^ ours.seen.keys()):
        return Outcome(Verdict.WRONG, f"only in one of the two: {missing}", float("inf"))
    for name, expected in plain.seen.items():
        error = difference(ours.seen[name], expected, loose=plain.loose and "parameter" in name)
        if error > plain.tolerance:
            found.append((error, name))
    for name, now, then in ours.kept:
        if not _same_bits(now, then):
            found.append((difference(now, then), f"{name} was changed"))
    if not found:
        return Outcome(Verdict.RIGHT)
    found.sort(key=lambda each: -each[0])
    error, name = found[0]
    return Outcome(
        Verdict.WRONG, f"{name}, off by {error:.2g}{f', and {len(found) - 1} more' * (len(found) > 1)}", error
    )


def difference(ours: Tensor | None, expected: Tensor | None, loose: bool = False) -> float:
    """The largest difference, relative to the largest expected value; infinite for another shape, dtype or NaN."""
    if ours is None or expected is None:
        return 0.0 if ours is expected else float("inf")
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return float("inf")
    a, b = ours.detach().double().cpu(), expected.detach().double().cpu()
    if not loose and (b.isnan() != a.isnan()).any():
        return float("inf")
    known = ~(a.isnan() | b.isnan())
    if not known.any():
        return 0.0
    return float((a[known] - b[known]).abs().max() / max(float(b[known].abs().max()), FLOOR))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _run(trial: Trial, graph: Graph, guard: Guard) -> None:
    with guard():
        graph(trial)
        if trial.device.type == "cuda":
            torch.cuda.synchronize(trial.device)
    trial.finish()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def _raised(error: Exception) -> Outcome:
    if type(error).__name__ != "OverwriteError":
        return Outcome(Verdict.RAISED, _first_line(error))
    return Outcome(Verdict.RAISED, f"OverwriteError: {' '.join(str(error).split())}", guard=True)


def run(
    subject: Subject,
    device: str | torch.device = "cpu",
    *,
    guard: Guard = contextlib.nullcontext,
    quick: bool = False,
    only: str = "",
) -> dict[str, Outcome]:
    """The outcome of every hazard; without the slow ones if `quick`; of those whose name contains `only`."""
    chosen = [each for each in HAZARDS if only in each.name and not (quick and each.slow)]
    return {each.name: judge(each, subject, device, guard) for each in chosen}


def judge(each: Hazard, subject: Subject, device: str | torch.device, guard: Guard = contextlib.nullcontext) -> Outcome:
    device = torch.device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of anomaly mode, compilers, profilers: the gradients are the question here
        return each.judge(subject, device, guard)


# -- a gradient that is not the op's alone -----------------------------------------------------------------------------


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
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
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
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.keep(gradient)
        return gradient, None


@hazard("another node keeps the gradient it hands on")
def gradient_is_kept_by_node(t: Trial) -> None:
    t.loss(Passes.apply(t.op(*t.inputs()), t.keeper("gradient"))).backward()


# -- hooks -------------------------------------------------------------------------------------------------------------


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


# -- an output that somebody holds -------------------------------------------------------------------------------------

HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "the output": lambda y: y,
    "its detach()": lambda y: y.detach(),
    "its .data": lambda y: y.data,
    "a view of it": lambda y: y[1:],
    "a view of its detach()": lambda y: y.detach().view(-1)[2:],
    "its storage": lambda y: y.untyped_storage(),
    "its numpy()": lambda y: y.detach().numpy(),
    "its DLPack alias": lambda y: torch.from_dlpack(y.detach()),
}


def _tensor(held: Any, y: Tensor) -> Tensor:
    if isinstance(held, Tensor):
        return held
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0, dtype=y.dtype, device=y.device).set_(held)
    return torch.from_numpy(held)


def _user_holds(form: str, t: Trial) -> None:
    if form == "its numpy()":
        t.needs_numpy()
    y = t.op(*t.inputs())
    held = HOLDS[form](y)
    like = torch.empty(0, dtype=y.dtype, device=y.device)
    then = _tensor(held, y).detach().clone()
    loss = t.loss(y)
    del y
    loss.backward()
    t.kept.append((form, _tensor(held, like).detach(), then))


for _form in HOLDS:
    hazard(f"the user holds {_form}")(functools.partial(_user_holds, _form))


@hazard("the user holds the input")
def holds_input(t: Trial) -> None:
    x = t.inputs()
    loss = t.loss(t.op(*x))
    for i, each in enumerate(x):
        t.keep(f"input {i}", each)
    loss.backward()


@hazard("the user holds the input from before the op")
def holds_input_before(t: Trial) -> None:
    if t.in_place:
        raise Skip("the op is known to write its input")
    x = t.inputs()
    for i, each in enumerate(x):
        t.keep(f"input {i}", each)
    t.loss(t.op(*x)).backward()


@hazard("the user holds a view of the input")
def holds_input_view(t: Trial) -> None:
    x = t.inputs()
    views = [each.detach().view(-1)[1:] for each in x]
    loss = t.loss(t.op(*x))
    del x
    for i, each in enumerate(views):
        t.keep(f"view of input {i}", each)
    loss.backward()


@hazard("a later backward reads a view of the output")
def view_saved_for_later(t: Trial) -> None:
    y = t.op(*t.inputs())
    flat = y.detach().reshape(-1)[1:-1]
    later = t.loss(flat * t.leaf("w", flat.shape))
    loss = t.loss(y)
    del y, flat
    loss.backward()
    later.backward()


@hazard("a later backward reads the output")
def output_saved_for_later(t: Trial) -> None:
    y = t.op(*t.inputs())
    later = t.loss(y.detach() * t.leaf("w"))
    loss = t.loss(y)
    del y
    loss.backward()
    later.backward()


@hazard("a later backward reads the output as another dtype")
def output_saved_as_integers(t: Trial) -> None:
    y = t.op(*t.inputs())
    held = y.detach().view(torch.int16 if y.element_size() == 2 else torch.int32)
    then = held.clone()
    loss = t.loss(y)
    del y
    loss.backward()
    t.see("bits unchanged", (held == then).all().float())


@hazard("the output has several readers")
def several_readers(t: Trial) -> None:
    y = t.op(*t.inputs())
    loss = t.loss(y.sin(), "c") + t.loss(y * t.leaf("w"), "d") + t.loss(y.reshape(-1)[3:].exp() * 0.1, "e") + y.sum()
    del y
    loss.backward()


@hazard("the output's reader saved it")
def reader_saves_output(t: Trial) -> None:
    t.loss(t.op(*t.inputs()).exp() * 0.1).backward()


@hazard("y * y")
def output_squared(t: Trial) -> None:
    def square(y: Tensor) -> Tensor:
        return y * y

    t.loss(square(t.op(*t.inputs()))).backward()


@hazard("the output is never read")
def unused_output(t: Trial) -> None:
    t.op(*t.inputs())
    t.loss(t.leaf("v") * t.leaf("w")).backward()
    t.loss(t.op(*t.inputs("b"))).backward()


@hazard("detach() branch")
def detached_branch(t: Trial) -> None:
    y = t.op(*t.inputs())
    loss = t.loss(y.detach() * t.leaf("w")) + t.loss(y, "d")
    del y
    loss.backward()


@hazard("the user writes the output in place")
def user_writes_output(t: Trial) -> None:
    y = t.op(*t.inputs())
    y = y * 2 if t.plain else y.mul_(2)
    t.loss(y).backward()


@hazard("the user writes a view of the output in place")
def user_writes_output_view(t: Trial) -> None:
    y = t.op(*t.inputs())
    y = y.clone() if t.plain else y
    y[0].mul_(3)
    t.loss(y).backward()


@hazard("the user writes the output's detach() in place")
def user_writes_detached(t: Trial) -> None:
    y = t.op(*t.inputs())
    if t.plain:
        y = y.clone()
    y.detach().mul_(2)
    t.loss(y).backward()


# -- an input that somebody else reads ---------------------------------------------------------------------------------

SAVES_ITS_RESULT: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda v: (v * 0.5).exp(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": lambda v: v.mul(2).add(1).relu(),
    "softmax": lambda v: v.softmax(-1),
    "sqrt": lambda v: v.square().add(0.5).sqrt(),
}


def _saved_input(name: str, t: Trial) -> None:
    t.loss(t.op(*t.inputs(how=SAVES_ITS_RESULT[name]))).backward()


for _name in SAVES_ITS_RESULT:
    hazard(f"input from {_name}, which saved it")(functools.partial(_saved_input, _name))


@hazard("input read before by a product that saved it")
def input_read_before(t: Trial) -> None:
    x = t.inputs()
    before = [each * t.leaf(f"w{i}", each.shape) for i, each in enumerate(x)]
    loss = t.loss(t.op(*x)) + sum(t.loss(each, f"d{i}") for i, each in enumerate(before))
    del x
    loss.backward()


@hazard("input read before, through a view")
def input_read_before_view(t: Trial) -> None:
    x = t.inputs()
    before = [each.view(-1)[1:] * t.leaf(f"w{i}", (each.numel() - 1,)) for i, each in enumerate(x)]
    loss = t.loss(t.op(*x)) + sum(t.loss(each, f"d{i}") for i, each in enumerate(before))
    del x
    loss.backward()


@hazard("input read before, through detach()")
def input_read_before_detached(t: Trial) -> None:
    x = t.inputs()
    before = [each.detach() * t.leaf(f"w{i}", each.shape) for i, each in enumerate(x)]
    loss = t.loss(t.op(*x)) + sum(t.loss(each, f"d{i}") for i, each in enumerate(before))
    del x
    loss.backward()


@hazard("input read again later")
def input_read_later(t: Trial) -> None:
    x = t.inputs()
    loss = t.loss(t.op_(*x))
    for i, each in enumerate(x):
        loss = loss + t.loss(each * t.leaf(f"w{i}", each.shape), f"d{i}")
    del x, each
    loss.backward()


@hazard("input added to the output")
def input_added_later(t: Trial) -> None:
    t.same_shape()
    x = t.inputs()
    y = t.op_(*x)
    loss = t.loss(x[0] + y)
    del x, y
    loss.backward()


@hazard("one input, two ops")
def input_of_two_ops(t: Trial) -> None:
    t.same_shape()
    x = t.inputs()
    loss = t.loss(t.op_(*x, i=0)) + t.loss(t.op_(*x, i=1), "d")
    del x
    loss.backward()


@hazard("two ops in a row")
def two_in_a_row(t: Trial) -> None:
    t.same_shape()
    t.loss(t.op(t.op(*t.inputs(), i=0), *t.inputs("b")[1:], i=1)).backward()


@hazard("two ops in a row, sum().backward()")
def two_in_a_row_sum(t: Trial) -> None:
    t.same_shape()
    t.op(t.op(*t.inputs(), i=0), *t.inputs("b")[1:], i=1).sum().backward()


def _bigger(shape: tuple[int, ...], dim: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] *= 2
    return sizes


@hazard("input is a view")
def input_is_view(t: Trial) -> None:
    shapes = t.subject.shapes
    wholes = [t.leaf(f"x{i}", (torch.Size(s).numel(),)) * 1.5 for i, s in enumerate(shapes)]
    loss = t.loss(t.op(*(whole.view(s) for whole, s in zip(wholes, shapes, strict=True))))
    del wholes
    loss.backward()


@hazard("input is a slice of rows, the rest is read")
def input_is_rows(t: Trial) -> None:
    wholes = [t.leaf(f"x{i}", _bigger(s, 0)) * 1.5 for i, s in enumerate(t.subject.shapes)]
    loss = t.loss(t.op(*(whole[len(whole) // 2 :] for whole in wholes)))
    loss = loss + sum(t.loss(whole[: len(whole) // 2].sin(), f"d{i}") for i, whole in enumerate(wholes))
    del wholes
    loss.backward()


@hazard("input is every other column, the whole is read later")
def input_is_columns(t: Trial) -> None:
    wholes = [t.leaf(f"x{i}", _bigger(s, -1)) * 1.5 for i, s in enumerate(t.subject.shapes)]
    loss = t.loss(t.op_(*(whole[..., ::2] for whole in wholes)))
    loss = loss + sum(t.loss(whole.sin(), f"d{i}") for i, whole in enumerate(wholes))
    del wholes
    loss.backward()


@hazard("input is a chunk, the other chunk is a summand")
def input_is_chunk(t: Trial) -> None:
    t.same_shape()
    wholes = [t.leaf(f"x{i}", _bigger(s, -1)) * 1.5 for i, s in enumerate(t.subject.shapes)]
    chunks = [whole.chunk(2, -1) for whole in wholes]
    loss = t.loss(t.op(*(first for first, _ in chunks)) + chunks[0][1])
    del wholes, chunks
    loss.backward()


def _chunks_of_one(dim: int, t: Trial) -> None:
    shapes = t.subject.shapes
    if len(set(shapes)) != 1 or len(shapes) == 1:
        raise Skip("the op has one input")
    sizes = list(shapes[0])
    sizes[dim] *= len(shapes)
    whole = t.leaf("x", sizes) * 1.5
    before = whole.sin()
    loss = t.loss(t.op(*whole.chunk(len(shapes), dim))) + t.loss(before, "d") + t.loss(whole.cos(), "e")
    del whole
    loss.backward()


for _dim in (0, -1):
    hazard(f"inputs are the chunks of one tensor, dimension {_dim}")(functools.partial(_chunks_of_one, _dim))


@hazard("one tensor as all inputs")
def one_tensor_as_all(t: Trial) -> None:
    shapes = t.subject.shapes
    if len(set(shapes)) != 1 or len(shapes) == 1:
        raise Skip("the op has one input")
    t.loss(t.op(*[t.leaf("x", shapes[0]) * 1.5] * len(shapes))).backward()


@hazard("input is transposed")
def input_transposed(t: Trial) -> None:
    shapes = t.subject.shapes
    leaves = [t.leaf(f"x{i}", (s[-1], *s[1:-1], s[0])) for i, s in enumerate(shapes)]
    t.loss(t.op(*((leaf * 1.5).transpose(0, -1) for leaf in leaves))).backward()


@hazard("input overlaps itself")
def input_overlapping(t: Trial) -> None:
    def windows(i: int, shape: tuple[int, ...]) -> Tensor:
        base = t.leaf(f"x{i}", (sum(shape),)) * 1.5
        return base.as_strided(shape, [1] * len(shape))

    t.loss(t.op(*(windows(i, s) for i, s in enumerate(t.subject.shapes)))).backward()


@hazard("input is the caller's batch")
def input_is_batch(t: Trial) -> None:
    batch = [t.draw(f"x{i}", s) for i, s in enumerate(t.subject.shapes)]
    if not t.in_place:
        for i, each in enumerate(batch):
            t.keep(f"batch {i}", each)
    if list(t.module().parameters()):
        t.loss(t.op(*batch)).backward()
    else:
        t.op(*batch)


@hazard("an input borrows the bytes of a numpy array")
def input_from_numpy(t: Trial) -> None:
    shapes = t.subject.shapes
    t.needs_numpy()
    if len(shapes) == 1:
        raise Skip("the op has one input")
    for i, shape in enumerate(shapes):
        array = t.draw(f"array {i}", shape).numpy()
        then = torch.from_numpy(array.copy())
        x = [torch.from_numpy(array) if k == i else each for k, each in enumerate(t.inputs())]
        loss = t.loss(t.op(*x))
        del x  # from here on torch knows of no other owner of the array's bytes
        loss.backward()
        t.kept.append((f"array {i}", torch.from_numpy(array), then))


@hazard("an intermediate lies in a numpy array")
def intermediate_in_numpy(t: Trial) -> None:
    t.needs_numpy()
    arrays = [t.draw("array", s).numpy() for s in t.subject.shapes]
    x = [torch.from_numpy(a).copy_(each) for a, each in zip(arrays, t.inputs(), strict=True)]
    loss = t.loss(t.op(*x))
    del x
    then = [torch.from_numpy(a.copy()) for a in arrays]
    loss.backward()
    t.kept += [(f"array {i}", torch.from_numpy(a), b) for i, (a, b) in enumerate(zip(arrays, then, strict=True))]


@hazard("the user writes the input in place after the op")
def user_writes_input(t: Trial) -> None:
    if t.in_place:
        raise Skip("after the op, the input is the output")
    x = t.inputs()
    loss = t.loss(t.op(*(each.clone() for each in x) if t.plain else x))
    for each in x:
        each.mul_(2)
    del x, each
    loss.backward()


@hazard("input is a leaf that requires a gradient")
def input_is_leaf(t: Trial) -> None:
    t.loss(t.op(*t.inputs(how=lambda v: v))).backward()


@hazard("input is a leaf, shared gradient")
def input_is_leaf_shared(t: Trial) -> None:
    other = t.leaf("v") * t.leaf("w")
    t.loss(other + t.op(*t.inputs(how=lambda v: v))).backward()


# -- more than one backward --------------------------------------------------------------------------------------------


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


# -- modes -------------------------------------------------------------------------------------------------------------


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


# -- checkpointing and saved-tensor hooks ------------------------------------------------------------------------------


def _checkpointed(reentrant: bool, where: str, t: Trial) -> None:
    module, v, w = t.module(), t.leaf("v"), t.leaf("w")

    def block(*x: Tensor) -> Tensor:
        if where == "inside":
            other = v * w
            return (other + module(*(each * 0.9 for each in x))).sin()
        if where == "first":  # its input is what the checkpoint kept to run again
            return module(*x).sin()
        return module(*(each.tanh() for each in x))  # last: its output leaves the checkpoint

    other = v * w
    y = checkpoint(block, *t.inputs(), use_reentrant=reentrant)
    t.see("output", y)
    loss = t.loss(other + y)
    del y
    loss.backward()
    loss = t.loss(checkpoint(block, *t.inputs("b"), use_reentrant=reentrant))
    loss.backward()


for _reentrant in (False, True):
    for _where in ("inside", "first", "last"):
        hazard(f"checkpoint, use_reentrant={_reentrant}, the op {_where}")(
            functools.partial(_checkpointed, _reentrant, _where)
        )


@hazard("checkpoint of two ops in a row, retain_graph")
def checkpoint_twice(t: Trial) -> None:
    t.same_shape()
    first, second = t.module(0), t.module(1)

    def block(*x: Tensor) -> Tensor:
        return second(first(*(each * 0.9 for each in x)), *x[1:]) * 1.1

    loss = t.loss(checkpoint(block, *t.inputs(), use_reentrant=False))
    loss.backward(retain_graph=True)
    loss.backward()


@hazard("save_on_cpu")
def saved_on_cpu(t: Trial) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = t.loss(t.op(*t.inputs()))
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        other = t.leaf("v") * t.leaf("w")
        loss = t.loss(other + t.op(*t.inputs("b")), "d")
    loss.backward(retain_graph=True)
    loss.backward()


@hazard("saved-tensor hooks that keep what was packed")
def hooks_keep_packed(t: Trial) -> None:
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = t.loss(t.op(*t.inputs()))
    for i, saved in enumerate(packed):  # after the forward, which may update running statistics
        t.keep(f"packed tensor {i}", saved)
    loss.backward()


@hazard("saved-tensor hooks that pack a copy, twice unpacked")
def hooks_pack_copies(t: Trial) -> None:
    copies: list[tuple[Tensor, Tensor]] = []

    def pack(saved: Tensor) -> int:
        copies.append((saved.detach().clone(), saved.detach().clone()))
        return len(copies) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: copies[i][0]):
        loss = t.loss(t.op(*t.inputs()))
    loss.backward(retain_graph=True)
    loss.backward()
    t.kept += [(f"packed copy {i}", now, then) for i, (now, then) in enumerate(copies)]


# -- compilers, streams, processes -------------------------------------------------------------------------------------


@hazard("forward-mode differentiation")
def forward_mode(t: Trial) -> None:
    module = t.module().eval()
    with forward_ad.dual_level():
        x = [t.draw(f"x{i}", s) for i, s in enumerate(t.subject.shapes)]
        duals = [forward_ad.make_dual(each * 1.5, t.draw(f"t{i}", each.shape)) for i, each in enumerate(x)]
        y = forward_ad.unpack_dual(module(*duals))
        t.see("output", y.primal)
        t.see("tangent", y.tangent)


@hazard("torch.func.grad")
def functional_grad(t: Trial) -> None:
    module, c = t.module().eval(), t.constant("c")  # training would update running statistics, which it refuses

    def loss(*x: Tensor) -> Tensor:
        return (module(*(each * 1.5 for each in x)) * c).sum()

    x = [t.draw(f"x{i}", s) for i, s in enumerate(t.subject.shapes)]
    for i, gradient in enumerate(torch.func.grad(loss, argnums=tuple(range(len(x))))(*x)):
        t.see(f"gradient of x{i}", gradient)


def _compiled(backend: str, t: Trial) -> None:
    if backend == "inductor" and t.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise Skip("no C++ compiler")
    alone, shared = t.module(0), t.module(1)
    c = t.constant("c")

    def both(first: list[Tensor], second: list[Tensor], v: Tensor, w: Tensor) -> Tensor:
        other = v * w
        y = alone(*(each * 1.5 for each in first))
        z = shared(*((each * 1.5).tanh() for each in second))
        return (y * c).sum() + ((other + z) * c).sum() + (z.detach() * w).sum()

    if not t.plain:
        torch.compiler.reset()
        both = torch.compile(both, backend=backend)
    for _ in range(2):
        x = [t.inputs(tag, how=lambda v: v) for tag in "ab"]
        both([*x[0]], [*x[1]], t.leaf("v"), t.leaf("w")).backward()


for _backend in ("aot_eager", "inductor"):
    hazard(f"torch.compile, {_backend}", slow=True)(functools.partial(_compiled, _backend))


@dataclass(frozen=True)
class _Streams:
    """Two streams, and work that keeps the other reader's stream busy while the op's kernel starts on its own."""

    t: Trial
    main: Any
    side: Any
    busy: Tensor

    @classmethod
    def of(cls, t: Trial) -> _Streams:
        return cls(t, torch.cuda.current_stream(), torch.cuda.Stream(), torch.ones(2048, 2048, device=t.device))

    def delay(self, tensor: Tensor) -> Tensor:
        """In backward, the node that made the tensor is queued at once, and reads its gradient much later."""

        def work(_: Tensor) -> None:
            for _ in range(40):
                self.busy.mm(self.busy)

        tensor.register_hook(work)
        return tensor

    def on_side(self, make: Callable[..., Tensor], *reads: Tensor) -> Tensor:
        self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            made = make(*reads)
        self.main.wait_stream(self.side)
        for each in (*reads, made):
            each.record_stream(self.side)
            each.record_stream(self.main)
        return made


def _in_rounds(t: Trial, graph: Callable[[_Streams], Tensor]) -> None:
    """The first round compiles kernels, which takes longer than any delay."""
    for _ in range(3):
        t.without_gradients()
        graph(_Streams.of(t)).backward()
        torch.cuda.synchronize()


@hazard("two streams: the op on the side stream", cuda=True)
def op_on_side_stream(t: Trial) -> None:
    def graph(streams: _Streams) -> Tensor:
        y = streams.on_side(t.op, *t.inputs())
        return t.loss(y + streams.delay(t.leaf("v") * t.leaf("w")))

    _in_rounds(t, graph)


@hazard("two streams: the gradient's other reader on the side stream", cuda=True)
def reader_on_side_stream(t: Trial) -> None:
    def graph(streams: _Streams) -> Tensor:
        y = t.op(*t.inputs())
        return t.loss(y + streams.delay(streams.on_side(torch.mul, t.leaf("v"), t.leaf("w"))))

    _in_rounds(t, graph)


@hazard("two streams: the output's detached reader on the side stream", cuda=True)
def detached_on_side_stream(t: Trial) -> None:
    def graph(streams: _Streams) -> Tensor:
        y = t.op(*t.inputs())
        read = streams.delay(streams.on_side(lambda w, v: v * w, t.leaf("w"), y.detach()))
        return t.loss(read) + t.loss(y, "d")

    _in_rounds(t, graph)


@hazard("two streams: the input's other reader on the side stream", cuda=True)
def input_on_side_stream(t: Trial) -> None:
    if t.in_place:
        raise Skip("the op is known to write its input")

    def graph(streams: _Streams) -> Tensor:
        x = t.inputs()
        loss = t.loss(t.op(*x))
        for i, each in enumerate(x):
            weight = t.leaf(f"w{i}", each.shape)
            loss = loss + t.loss(streams.delay(streams.on_side(torch.mul, weight, each.detach())), f"d{i}")
        return loss

    _in_rounds(t, graph)


@hazard("CUDA graph, replayed", cuda=True)
def cuda_graph(t: Trial) -> None:
    module, c = t.module(), t.constant("c")
    v, w = t.leaf("v"), t.leaf("w")
    t.inputs()

    def step() -> None:
        other = v * w
        ((other + module(*t.inputs())) * c).sum().backward()
        (module(*t.inputs()) * c).sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            t.without_gradients()
            step()
    torch.cuda.current_stream().wait_stream(side)
    t.without_gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()


class _Net(nn.Module):
    """The op between parameters of its own, with a shared gradient."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.op = trial.module()
        self.scales = nn.ParameterList(1 + 0.1 * trial.draw(f"s{i}", s) for i, s in enumerate(trial.subject.shapes))
        self.other = nn.Parameter(trial.draw("other", trial.output_shape))

    def forward(self, *x: Tensor) -> Tensor:
        skip = self.other.sin()
        return skip + self.op(*(each * s for each, s in zip(x, self.scales, strict=True)))


def _ddp_rank(rank: int, world: int, subjects: list[Subject], device: str, store: str, results: Any) -> None:
    """Each rank compares its gradients under DDP with the mean over ranks of the plain net's."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    where = torch.device(device)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    warnings.simplefilter("ignore")
    for subject in subjects:
        try:
            outcome = _ddp_compare(subject, where, rank, world)
        except Exception as error:
            outcome = Outcome(Verdict.RAISED, _first_line(error))
        results.put((rank, subject.name, outcome))
    dist.destroy_process_group()


def _ddp_compare(subject: Subject, device: torch.device, rank: int, world: int) -> Outcome:
    def batch(trial: Trial, which: int, step: int) -> list[Tensor]:
        return [trial.draw(f"{which} {step} {i}", s) for i, s in enumerate(subject.shapes)]

    steps = range(2)
    expected: dict[str, Tensor | None] = {}
    for which in range(world):
        trial = Trial(subject, device, plain=True)
        net = _Net(trial)
        for step in steps:
            trial.loss(net(*batch(trial, which, step))).backward()
        for i, parameter in enumerate(net.parameters()):
            assert parameter.grad is not None
            share = parameter.grad / world
            before = expected.get(f"gradient {i}")
            expected[f"gradient {i}"] = share if before is None else before + share
    for as_view in (False, True):
        plain, ours = Trial(subject, device, plain=True), Trial(subject, device, plain=False)
        plain.seen = dict(expected)
        net = _Net(ours)
        wrapped = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=as_view, bucket_cap_mb=1e-4)
        for step in steps:
            ours.loss(wrapped(*batch(ours, rank, step))).backward()
        for i, parameter in enumerate(net.parameters()):
            ours.see(f"gradient {i}", parameter.grad)
        outcome = compare(plain, ours)
        if outcome.verdict is not Verdict.RIGHT:
            return outcome
    return Outcome(Verdict.RIGHT)


def run_ddp(subjects: list[Subject], device: str | torch.device = "cpu", limit_s: float = 120) -> dict[str, Outcome]:
    """Two processes over gloo, all subjects in turn: gradients must be the mean of the ranks'. By subject's name."""
    try:
        pickle.dumps(subjects)
    except Exception as error:
        return {each.name: Outcome(Verdict.SKIPPED, f"cannot be pickled: {_first_line(error)}") for each in subjects}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    said: dict[tuple[int, str], Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        args = (2, subjects, str(device), str(Path(folder) / "store"), results)
        ranks = [context.Process(target=_ddp_rank, args=(rank, *args), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        end = datetime.datetime.now() + datetime.timedelta(seconds=limit_s)
        while len(said) < 2 * len(subjects) and datetime.datetime.now() < end:
            try:
                rank, name, outcome = results.get(timeout=0.5)
            except queue.Empty:
                if not any(process.is_alive() for process in ranks):
                    break
            else:
                said[rank, name] = outcome
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    gone = Outcome(Verdict.RAISED, "the process ended without a result")
    order = [Verdict.RIGHT, Verdict.SKIPPED, Verdict.RAISED, Verdict.WRONG]
    return {
        each.name: max((said.get((r, each.name), gone) for r in range(2)), key=lambda o: order.index(o.verdict))
        for each in subjects
    }


def _judge_ddp(subject: Subject, device: torch.device, guard: Guard) -> Outcome:
    if guard is not contextlib.nullcontext:
        return Outcome(Verdict.SKIPPED, "the guard watches one process")
    return run_ddp([subject], device)[subject.name]


HAZARDS.append(Hazard("DistributedDataParallel", _judge_ddp, slow=True))


# -- from the terminal -------------------------------------------------------------------------------------------------


def load(spec: str) -> list[Subject]:
    """The subjects at `module:name`: a Subject, a list of them, or a function that returns either."""
    module, _, name = spec.partition(":")
    sys.path.insert(0, "")
    found = getattr(importlib.import_module(module), name)
    if callable(found) and not isinstance(found, Subject):
        found = found()
    return [found] if hasattr(found, "make") else list(found)


def takeback_guard() -> AbstractContextManager[Any]:
    guard: AbstractContextManager[Any] = importlib.import_module("takeback").guard(on_error="raise")
    return guard


def main(arguments: list[str] | None = None) -> int:
    """Prints a table per subject. The status is 1 if anything was WRONG."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--subject", required=True, help="module:name of a Subject, a list, or a function that returns it"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--guard", action="store_true", help="again inside takeback.guard(): does it name what is wrong?"
    )
    parser.add_argument("--quick", action="store_true", help="without compilers and processes")
    parser.add_argument("--only", default="", help="hazards whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the table here")
    asked = parser.parse_args(arguments)
    wrong, table = 0, {}
    for subject in load(asked.subject):
        print(f"\n{subject.name} on {asked.device}")
        rows = table[subject.name] = {}
        for each in HAZARDS:
            if asked.only not in each.name or (asked.quick and each.slow):
                continue
            outcome = judge(each, subject, asked.device)
            row = {"verdict": outcome.verdict.value, "detail": outcome.detail, "error": outcome.error}
            line = f"  {each.name:<62} {outcome}"
            if asked.guard:
                guarded = judge(each, subject, asked.device, takeback_guard)
                row["guard"] = guarded.detail if guarded.guard else None
                row["under guard"] = str(guarded)
                line += f"   [guard: {guarded.detail if guarded.guard else 'silent'}]"
            print(line, flush=True)
            rows[each.name] = row
            wrong += outcome.verdict is Verdict.WRONG
        counts = {v: sum(row["verdict"] == v.value for row in rows.values()) for v in Verdict}
        print("  " + ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    if asked.json:
        asked.json.write_text(json.dumps(table, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
