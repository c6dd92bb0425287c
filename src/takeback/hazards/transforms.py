"""Other ways to differentiate or to run a graph: forward mode, torch.func, torch.compile."""

from __future__ import annotations

import functools
import shutil

import torch
from torch import Tensor
from torch.autograd import forward_ad

from takeback.hazards.judging import HazardKind
from takeback.hazards.trial import Skip, Trial

kind = HazardKind("transforms and compilers")
hazard = kind.hazard


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
