"""Norms of rows by whatever class: recognised by what they compute, and run by a Function that keeps its output alone.

In: a module. Out: a `RowNormKind` if it is torch's LayerNorm, or if its forward is x * rsqrt(mean(x²) + eps) times its
weight (of x less its mean, for some), in one of the ways in which that is written; or why not. It is asked on random
inputs and random weights, in float32 and bfloat16, in training and in eval; its own weights and device are not touched.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from takeback import engine
from takeback.nn import ops
from takeback.nn.asking import asking, in_both_modes, refusal, takes_one_tensor
from takeback.nn.forward_graphs import touched
from takeback.nn.invert import Weights
from takeback.nn.kernels.width import wide
from takeback.nn.owner import Copies
from takeback.nn.rows import as_autocast_has_it, row_norm
from takeback.nn.swap import REMEMBERED, Form, argument

LARGEST_EPS = 0.1


@dataclass
class RowNormKind:
    """How a module is a norm of rows, and what its converted form remembers."""

    weight: str | None  #: the name of its weight
    eps: str  #: the name of its epsilon
    plus_one: bool = False  #: it multiplies by 1 + weight
    centred: bool = False  #: it takes the mean away first
    as_weight: bool = False  #: it rounds to the input's dtype before it multiplies: the result is as wide as the weight
    bias: str | None = None  #: the name of its bias
    from_input: str | None = None  #: why it keeps its input instead
    copies: Copies = field(default_factory=Copies)
    weights: Weights | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "weights": None}  # it watches through events of this process

    def __str__(self) -> str:
        scale = "" if self.weight is None else f" * (1 + {self.weight})" if self.plus_one else f" * {self.weight}"
        shift = "" if self.bias is None else f" + {self.bias}"
        return f"{'(x - mean(x)) / std(x)' if self.centred else 'x / rms(x)'}{scale}{shift}"


class KeepsOutput(Form):
    """A norm of rows whose backward starts from its output, which the next layer keeps anyway."""

    def converted(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        kind: RowNormKind = vars(module)[REMEMBERED]
        x = argument(args, kwargs)
        if not isinstance(x, Tensor) or torch.compiler.is_compiling() or engine.transformed() or torch.jit.is_tracing():
            return self.plain(*args, **kwargs)
        if not (module.training or torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)  # nothing is kept
        x = as_autocast_has_it(x, module)
        weight, bias = (None if name is None else getattr(module, name) for name in (kind.weight, kind.bias))
        shape = x.shape[-1:]
        strict = kind.as_weight or kind.centred  # torch's layer_norm takes one dtype
        unlike = [each.dtype for each in (weight, bias) if each is not None and strict and each.dtype != x.dtype]
        if unlike or x.dtype not in ops.DTYPES or (weight is not None and weight.shape != shape):
            kind.copies.note(f"the input is {x.dtype}, the weight another dtype or shape", "runs as before")
            return self.plain(*args, **kwargs)
        if weight is not None and kind.plus_one:
            weight = 1.0 + weight.to(wide(x))
        if kind.weights is None:
            kind.weights = Weights()
        how = (_eps(module, kind, x), kind.centred, kind.weights, kind.copies, kind.from_input)
        return row_norm(x, shape, weight, bias, *how)


def _eps(module: nn.Module, kind: RowNormKind, x: Tensor) -> float:
    value = getattr(module, kind.eps)
    return float(torch.finfo(wide(x)).eps if value is None else value)


def recognise(module: nn.Module) -> RowNormKind | str | None:
    """How the module is a norm; why a module that has the parts of one is not one; None for any other module."""
    if type(module) is nn.LayerNorm:
        return _torchs_own(module)
    parameters = dict(module.named_parameters(recurse=False))
    if list(module.children()) or list(module.buffers(recurse=False)) or len(parameters) != 1:
        return None
    (name, weight), *_ = parameters.items()
    epsilons = _epsilons(module)
    if weight.dim() != 1 or not weight.is_floating_point() or not epsilons:
        return None
    if why := touched(module):
        return f"it {why}"
    if not takes_one_tensor(module):
        return "its forward takes more than one tensor"
    for eps, plus_one, centred in itertools.product(epsilons, (False, True), (False, True)):
        kind = RowNormKind(name, eps, plus_one, centred)
        answer = _agrees(module, kind, weight.shape[0])
        if isinstance(answer, RowNormKind | str):
            return answer
    return "it is not x / rms(x) * weight"


def _torchs_own(norm: nn.LayerNorm) -> RowNormKind | str:
    if why := touched(norm):
        return f"it {why}"
    if len(norm.normalized_shape) != 1:
        return f"it is over {len(norm.normalized_shape)} dimensions"
    weight, bias = (name if getattr(norm, name) is not None else None for name in ("weight", "bias"))
    return RowNormKind(weight, "eps", centred=True, bias=bias)


def _epsilons(module: nn.Module) -> list[str]:
    """Attributes that may be the epsilon: small numbers, or None where torch has its own."""
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and 0 <= value <= LARGEST_EPS and not name.startswith("_")
    ]
    return own or (["eps"] if type(module) is nn.RMSNorm else [])


def _agrees(module: nn.Module, kind: RowNormKind, width: int) -> RowNormKind | str | None:
    """The kind, if the module computes that, on the CPU with other weights; or why it cannot be asked."""
    assert kind.weight is not None
    wider = False
    try:
        with asking(module), torch.no_grad():
            for _ in in_both_modes(module):
                for dtype in (torch.float32, torch.bfloat16):
                    weight = (torch.rand(width) * 2 - 0.5).to(dtype)
                    for x in _inputs(width, _eps(module, kind, torch.empty(0, dtype=dtype))):
                        x = x.to(dtype)
                        given = x.clone()
                        result = torch.func.functional_call(module, {kind.weight: weight}, (x,))
                        if not isinstance(result, Tensor) or not torch.equal(given, x):
                            return "its forward writes onto its input, or returns something else than a tensor"
                        if not _near(result, _by_formula(module, kind, x, weight), kind):
                            return None
                # In bfloat16 with a float32 weight, it shows which of the two the result is as wide as.
                x, weight = torch.randn(2, width).bfloat16(), torch.rand(width)
                wider |= torch.func.functional_call(module, {kind.weight: weight}, (x,)).dtype == torch.float32
    except Exception as error:  # whatever a forward raises that is no such norm
        return refusal(error)
    return replace(kind, as_weight=wider)


def _inputs(width: int, eps: float) -> list[Tensor]:
    """Of several shapes and sizes: with the epsilon as large as the squares, and with a row of zeros."""
    small = torch.randn(3, width) * (eps**0.5 if eps > 0 else 1.0)
    small[1] = 0
    return [torch.randn(2, 3, width), torch.randn(1, 1, 2, width) * 40 + 3, small]


def _by_formula(module: nn.Module, kind: RowNormKind, x: Tensor, weight: Tensor) -> Tensor:
    rows, scale = x.double(), weight.double() + (1.0 if kind.plus_one else 0.0)
    if kind.centred:
        rows = rows - rows.mean(-1, keepdim=True)
    result: Tensor = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + _eps(module, kind, x)) * scale
    return result


def _near(result: Tensor, expected: Tensor, kind: RowNormKind) -> bool:
    """Within the rounding of a few operations, element by element; of a centred one beside the row's largest."""
    if result.shape != expected.shape or not result.dtype.is_floating_point:
        return False
    size = expected.abs()
    if kind.centred:
        size = size.amax(-1, keepdim=True)
    return bool(((result.double() - expected).abs() <= 4 * torch.finfo(result.dtype).eps * size + 1e-30).all())
