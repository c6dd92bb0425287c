"""An op under test, and one trial of it: a graph around the op or around its plain form, and what is to be compared.

In: an `OpUnderTest`. A trial draws the same tensors for both forms, and gathers outputs, gradients and buffers, and
what must keep its bits. It keeps no reference to the op's input or output, so that an op which looks at reference
counts is free to overwrite wherever it may.
"""

from __future__ import annotations

import enum
import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
}


@dataclass(frozen=True)
class OpUnderTest:
    """An op, and the same function in plain torch with parameters of the same shapes in the same order."""

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
    missed: bool = False  #: skipped because the plain form raises: this hazard has shown nothing

    def __str__(self) -> str:
        return f"{self.verdict.value}{': ' * bool(self.detail)}{self.detail}"


class Skip(Exception):
    """The hazard does not apply to this subject or device."""


class Expected(Exception):
    """Raised by a hazard in the middle of a backward."""


class Trial:
    """One run of a hazard, around the op or its plain form: it draws the tensors and gathers what is compared."""

    def __init__(self, subject: OpUnderTest, device: torch.device, plain: bool) -> None:
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
            return tuple(build(self.subject, self.device, True, 0)(*inputs).shape)

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
            self.modules[name] = build(self.subject, self.device, self.plain, i)
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


def build(subject: OpUnderTest, device: torch.device, plain: bool, i: int) -> nn.Module:
    module = (subject.reference if plain else subject.make)().to(device, subject.dtype)
    generator = torch.Generator().manual_seed(i)
    with torch.no_grad():
        for parameter in module.parameters():
            size = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5
            sign = torch.rand(parameter.shape, generator=generator, dtype=torch.float64).sub_(0.3).sign_()
            parameter.copy_(size * sign)
    return module


def problem_of(subject: OpUnderTest, device: torch.device) -> str | None:
    """Why the two forms cannot be compared at all: one line, or None."""
    shapes = []
    for name, plain in (("make", False), ("reference", True)):
        try:
            module = build(subject, device, plain, 0)
        except Exception as error:
            return f"{name}() of {subject.name!r} raised {type(error).__name__}: {error}"
        shapes.append([tuple(parameter.shape) for parameter in module.parameters()])
    if shapes[0] != shapes[1]:
        return f"{subject.name!r}: make() has parameters of shapes {shapes[0]}, reference() of {shapes[1]}"
    return None
