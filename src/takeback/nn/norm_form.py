"""Norms of rows by whatever class: recognised by what they compute, and run by a Function that keeps its output alone.

In: a module. Out: a `RowNormKind` if it is torch's LayerNorm, or if its forward is x * rsqrt(mean(x²) + eps) times its
weight (of x less its mean, for some), in one of the ways in which that is written; or why not. It is asked on random
inputs and random weights, in float32 and bfloat16, in training and in eval; its own weights and device are not touched.
There may be no weight, and an epsilon that is written into the forward is found by asking, too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from takeback import engine
from takeback.nn import ops
from takeback.nn.asking import asking, has_settings, in_both_modes, refusal, settings_of, takes_one_tensor
from takeback.nn.forward_graphs import is_torchs_own, touched
from takeback.nn.invert import Weights
from takeback.nn.kernels.width import wide
from takeback.nn.owner import Copies
from takeback.nn.rows import as_autocast_has_it, row_norm
from takeback.nn.swap import REMEMBERED, Form, argument

LARGEST_EPS = 0.1
SMALLEST_EPS = 1e-16
WIDTH = 13  #: at which a norm without weight is asked, if it takes any; no model has it


@dataclass
class RowNormKind:
    """How a module is a norm of rows, and what its converted form remembers."""

    weight: str | None  #: the name of its weight
    eps: str | float | None  #: the name of its epsilon, or the epsilon itself; None: that of the arithmetic
    plus_one: bool = False  #: it multiplies by 1 + weight
    centred: bool = False  #: it takes the mean away first
    as_weight: bool = False  #: it rounds to the input's dtype before it multiplies: the result is as wide as the weight
    bias: str | None = None  #: the name of its bias
    from_input: str | None = None  #: why it keeps its input instead
    width: int | None = None  #: of its rows, where no weight says it and it takes no other
    settings: dict[str, Any] | None = None  #: for which the epsilon was found by asking
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
        if kind.width is not None and x.shape[-1:] != (kind.width,):
            return self.plain(*args, **kwargs)  # for its own forward to refuse
        if kind.settings is not None and not has_settings(module, kind.settings):
            return self.plain(*args, **kwargs)  # its epsilon may be another one
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
    value = getattr(module, kind.eps) if isinstance(kind.eps, str) else kind.eps
    return float(torch.finfo(wide(x)).eps if value is None else value)


def recognise(module: nn.Module) -> RowNormKind | str | None:
    """How the module is a norm; why a module that has the parts of one is not one; None for any other module."""
    if type(module) is nn.LayerNorm:
        return _torchs_own(module)
    parameters = dict(module.named_parameters(recurse=False))
    if list(module.children()) or list(module.buffers(recurse=False)) or len(parameters) > 1:
        return None
    name, weight = next(iter(parameters.items()), (None, None))
    if weight is None and is_torchs_own(module) and type(module) is not nn.RMSNorm:
        return None
    if weight is not None and (weight.dim() != 1 or not weight.is_floating_point()):
        return None
    epsilons = _epsilons(module)
    if why := touched(module):  # and is not asked: without a weight, only its name speaks for a norm
        return f"it {why}" if epsilons and (weight is not None or "norm" in type(module).__name__.lower()) else None
    if not takes_one_tensor(module):
        return "its forward takes more than one tensor" if epsilons and weight is not None else None
    answers = []
    for width in _widths(module) if weight is None else [weight.shape[0]]:
        answers.append(_asked(module, name, epsilons, width))
        if isinstance(answers[-1], RowNormKind):
            return answers[-1]
    return next((each for each in answers if each is not None), None)


def _asked(module: nn.Module, weight: str | None, epsilons: list[str], width: int) -> RowNormKind | str | None:
    """The same, at one width. None where too little speaks for a norm: it has no weight with an epsilon beside it, and
    is not scale-free."""
    told = weight is not None and bool(epsilons)
    for plus_one, centred in itertools.product((False,) if weight is None else (False, True), (False, True)):
        kind = RowNormKind(weight, None, plus_one, centred)
        try:
            found = [] if told and epsilons else _found_epsilons(module, kind, width)
            told |= found is not None
            for eps in (*epsilons, *(found or ())) if told else ():
                settings = None if isinstance(eps, str) else settings_of(module)
                answer = _agrees(module, replace(kind, eps=eps, settings=settings), width)
                if answer is not None:
                    return answer
        except Exception as error:  # whatever a forward raises that is no such norm
            return refusal(error) if told else None
    return f"it is not x / rms(x){'' if weight is None else ' * weight'}" if told else None


def _widths(module: nn.Module) -> list[int]:
    """Any first, then those that its attributes may say."""
    said = [
        each for value in settings_of(module).values() for each in (value if isinstance(value, tuple) else (value,))
    ]
    return list(dict.fromkeys([WIDTH, *(each for each in said if type(each) is int and 1 < each < 2**20)]))


def _found_epsilons(module: nn.Module, kind: RowNormKind, width: int) -> list[float | None] | None:
    """The epsilon that is written into its forward. None if it is not scale-free but for one: f(4x) = f(x) = -f(-x)."""
    with asking(module), torch.no_grad():
        weight = (
            {} if kind.weight is None else {kind.weight: torch.zeros(width) if kind.plus_one else torch.ones(width)}
        )

        def made(x: Tensor) -> Any:
            return torch.func.functional_call(module, weight, (x,))

        x = torch.randn(4, width)
        large, larger, negative, tiny = (made(x * scale) for scale in (10.0, 40.0, -10.0, 1e-12))
        alike = all(isinstance(each, Tensor) and each.shape == x.shape for each in (large, larger, negative, tiny))
        if (
            not alike
            or not large.any()
            or not all(torch.allclose(large, each, rtol=2e-3, atol=1e-4) for each in (larger, -negative))
        ):
            return None
        rows = (x * 1e-12).double()
        if kind.centred:
            rows = rows - rows.mean(-1, keepdim=True)
        eps = float((rows / tiny.double()).square().median())  # beside it these rows are nothing
    own = torch.finfo(torch.float32).eps
    return [None if abs(eps / own - 1) < 1e-4 else float(f"{eps:.2e}")] if SMALLEST_EPS < eps <= LARGEST_EPS else []


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
    """The kind, if the module computes that, on the CPU with other weights; or why it cannot be converted at all."""

    def made(x: Tensor, weight: Tensor) -> Any:
        return torch.func.functional_call(module, {} if kind.weight is None else {kind.weight: weight}, (x,))

    wider = False
    with asking(module), torch.no_grad():
        for _ in in_both_modes(module):
            for dtype in (torch.float32, torch.bfloat16):
                weight = (torch.rand(width) * 2 - 0.5).to(dtype)
                for x in _inputs(width, _eps(module, kind, torch.empty(0, dtype=dtype))):
                    x = x.to(dtype)
                    given = x.clone()
                    result = made(x, weight)
                    if not isinstance(result, Tensor) or not torch.equal(given, x):
                        return "its forward writes onto its input, or returns something else than a tensor"
                    if not _near(result, _by_formula(module, kind, x, weight), kind) or result.dtype != dtype:
                        return None
            # In bfloat16 with a float32 weight, it shows which of the two the result is as wide as.
            wider |= made(torch.randn(2, width).bfloat16(), torch.rand(width)).dtype == torch.float32
        if kind.weight is None and width != WIDTH:
            kind = replace(kind, width=width)  # it was not taken at another one
    return replace(kind, as_weight=wider)


def _inputs(width: int, eps: float) -> list[Tensor]:
    """Of several shapes and sizes: with the epsilon as large as the squares, and with a row of zeros."""
    small = torch.randn(3, width) * (eps**0.5 if eps > 0 else 1.0)
    small[1] = 0
    return [torch.randn(2, 3, width), torch.randn(1, 1, 2, width) * 40 + 3, small]


def _by_formula(module: nn.Module, kind: RowNormKind, x: Tensor, weight: Tensor) -> Tensor:
    rows, scale = x.double(), 1.0 if kind.weight is None else weight.double() + (1.0 if kind.plus_one else 0.0)
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
