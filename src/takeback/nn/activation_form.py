"""Activations written out in several operators, each of which keeps its own: run as one that keeps its input alone.

In: a module without parameters. Out: an `ActivationKind` if it is a function of single elements that keeps more than
its input; its name where torch has it as one operator. Any other such function is computed again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from takeback import engine
from takeback.nn import ops
from takeback.nn.asking import asking, in_both_modes, takes_one_tensor
from takeback.nn.forward_graphs import is_torchs_own, touched
from takeback.nn.gated import gelu_counted
from takeback.nn.gated_linear import NAMED, Activate
from takeback.nn.owner import Copies
from takeback.nn.swap import REMEMBERED, Form, argument

POINTS = 257  #: at which functions are compared


@dataclass
class ActivationKind:
    """What a written-out activation is, and what its converted form remembers."""

    activation: str | None  #: its name where it is one of ours
    copies: Copies = field(default_factory=Copies)

    def __str__(self) -> str:
        return self.activation or "computed again in backward"


class KeepsInput(Form):
    """An activation that keeps its input alone."""

    def converted(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        kind: ActivationKind = vars(module)[REMEMBERED]
        x = argument(args, kwargs)
        known = isinstance(x, Tensor) and x.dtype in ops.DTYPES
        recorded = module.training or torch.is_grad_enabled()
        if not known or not recorded or torch.compiler.is_compiling() or engine.transformed():
            return self.plain(*args, **kwargs)
        if kind.activation in ("gelu", "gelu_tanh"):
            return gelu_counted(x, "tanh" if kind.activation == "gelu_tanh" else "none", kind.copies)
        return MadeAgain.apply(x, self.plain if kind.activation is None else NAMED[kind.activation])


class MadeAgain(torch.autograd.Function):
    """A function of single elements, computed once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Activate) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            (dx,) = torch.autograd.grad(ctx.function(leaf), leaf, dy)
        return dx, None


def recognise(module: nn.Module) -> ActivationKind | None:
    """What the module is, if it is an activation that keeps more than its input."""
    if list(module.parameters()) or list(module.buffers()) or list(module.children()) or is_torchs_own(module):
        return None
    if touched(module) or not hasattr(type(module), "forward") or not takes_one_tensor(module):
        return None
    try:
        with asking(module), torch.enable_grad():
            for _ in in_both_modes(module):
                if not _is_elementwise(module) or _kept_bytes(module) <= POINTS * 8:
                    return None
            return ActivationKind(name_of(module))
    except Exception:  # whatever a forward raises that is no function of one tensor
        return None


def _is_elementwise(act: Activate) -> bool:
    """Whether each result depends on one element alone, and on nothing else."""
    x = torch.randn(POINTS, dtype=torch.float64) * 3
    order = torch.randperm(POINTS)
    given = x.clone()
    made = act(x)
    alike = isinstance(made, Tensor) and made.shape == x.shape and made.dtype == x.dtype
    return (
        alike
        and torch.equal(made[order], act(x[order]))
        and torch.equal(x, given)
        and torch.equal(made[:1], act(x[:1]))
    )


def _kept_bytes(act: Activate) -> int:
    """What autograd keeps for one call at `POINTS` float64 numbers."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(POINTS, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = act(x)
    del result
    return sum(kept.values())


def name_of(act: Activate) -> str | None:
    """Which of our activations a function is, by its values; None: another one."""
    with torch.no_grad():
        x = torch.linspace(-12, 12, POINTS, dtype=torch.float64)
        made = act(x)
        return next((name for name, ours in NAMED.items() if torch.allclose(made, ours(x), rtol=1e-6, atol=1e-9)), None)
