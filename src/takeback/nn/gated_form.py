"""Gated MLPs by whatever class, down(act(gate(x)) * up(x)): recognised by their parts and by what they compute.

In: a module. Out: a `GatedKind` with the names of its parts, or why it is none. The activation is an attribute, or one
of ours that the forward calls. It is asked with small random weights
in place of its own, on the CPU, in training and in eval; so neither its size nor its device matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from takeback import engine
from takeback.nn.activation_form import name_of
from takeback.nn.asking import asking, has_settings, in_both_modes, refusal, settings_of, takes_one_tensor
from takeback.nn.forward_graphs import is_torchs_own, touched
from takeback.nn.gated_linear import NAMED, Activate, gated, gated_linear
from takeback.nn.owner import Copies
from takeback.nn.swap import REMEMBERED, Form, argument

WIDTH, INNER, OUT = 5, 6, 7  #: of the weights it is asked with: all different
LARGE = 20.0  #: times as large are some of the inputs it is asked with: a forward may clamp what is far from 0


@dataclass
class GatedKind:
    """The parts of a gated MLP by name, and what its converted form remembers. up None: both come out of gate."""

    gate: str
    up: str | None
    down: str
    act: str | None  #: the attribute that is called; None: the forward itself calls one of ours
    activation: str | None  #: its name where it is one of ours; None: it is called as it is
    gate_first: bool = True  #: of two halves
    described: Any = None  #: what the activation is, to see when it is replaced
    settings: dict[str, Any] | None = None  #: by which a forward may choose one that is no attribute
    copies: Copies = field(default_factory=Copies)

    def __str__(self) -> str:
        act = self.activation or self.act
        if self.up is None:
            halves = ("first half", "second half") if self.gate_first else ("second half", "first half")
            return f"{self.down}({act}({halves[0]}) * {halves[1]}) of {self.gate}"
        return f"{self.down}({act}({self.gate}) * {self.up})"


class KeepsGateAndUp(Form):
    """A gated MLP of which backward makes the activation and the product again."""

    def converted(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        kind: GatedKind = vars(module)[REMEMBERED]
        x = argument(args, kwargs)
        recorded = module.training or torch.is_grad_enabled()
        if not isinstance(x, Tensor) or not recorded or torch.compiler.is_compiling() or engine.transformed():
            return self.plain(*args, **kwargs)
        act: Any = None if kind.act is None else getattr(module, kind.act)
        if (isinstance(act, nn.Module) and touched(act)) or _described(act) != kind.described:
            return self.plain(*args, **kwargs)  # somebody watches it, or put another in its place
        if kind.settings is not None and not has_settings(module, kind.settings):
            return self.plain(*args, **kwargs)
        gate = getattr(module, kind.gate)(x)
        up = None if kind.up is None else getattr(module, kind.up)(x)
        down = getattr(module, kind.down)
        activation: str | Activate = kind.activation or act
        how: dict[str, Any] = {"gate_first": kind.gate_first, "copies": kind.copies}
        if type(down) is not nn.Linear or touched(down) or type(down.weight) is not nn.Parameter:
            return down(gated(gate, up, activation, **how))
        return gated_linear(gate, up, down.weight, down.bias, activation, **how)


def _described(act: Any) -> Any:
    """What tells one activation from another."""
    if isinstance(act, Form):  # it has been converted itself since
        return act.original, act.original.extra_repr(act)
    return (type(act), act.extra_repr()) if isinstance(act, nn.Module) else act


def recognise(module: nn.Module) -> GatedKind | str | None:
    """How the module is a gated MLP; why one that has the parts of an MLP is none; None for any other module."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    weighted = [child for child in module.children() if list(child.parameters())]
    acts = list(_activations(module))
    if len(weighted) not in (2, 3) or list(module.parameters(recurse=False)):
        return None
    if not all(_is_layer(child) for child in weighted):
        return None
    if not acts:  # perhaps its forward calls one of ours: of those that have the parts, hardly any are MLPs
        return None if len(linears) != len(weighted) or is_torchs_own(module) else _asked(module, linears)
    if len(linears) != len(weighted):
        return f"its layers are {', '.join(sorted({type(each).__name__ for each in weighted}))}, not Linear"
    candidates = [kind for act in acts for kind in _candidates(linears, act, None)]
    if why := _unaskable(module):
        return why
    return _first(module, candidates) if candidates else "it is not gated: no two of its layers make what a third takes"


def _asked(module: nn.Module, linears: dict[str, nn.Linear]) -> GatedKind | str | None:
    """The same of a module without an attribute that may be its activation. None, too, if its shapes are others, or if
    it takes more than one tensor, as an attention does, whose layers have such shapes."""
    candidates = [kind for name in NAMED for kind in _candidates(linears, None, name)]
    if not candidates or not takes_one_tensor(module):
        return None
    return _unaskable(module) or _first(module, candidates)


def _unaskable(module: nn.Module) -> str | None:
    if why := touched(module):
        return f"it {why}"
    return None if takes_one_tensor(module) else "its forward takes more than one tensor"


def _first(module: nn.Module, candidates: list[GatedKind]) -> GatedKind | str:
    """The one that the module computes, or why it is none of them."""
    raised, computes = None, False
    for kind in candidates:
        try:
            answer = _agrees(module, kind)
        except Exception as error:  # whatever a forward raises: of another form, or with layers in each other's places
            raised = raised or refusal(error)
            continue
        if isinstance(answer, str):
            return answer
        if answer:
            if kind.act is None:
                return replace(kind, settings=settings_of(module))
            act = getattr(module, kind.act)
            with asking(module):
                return replace(kind, activation=name_of(act), described=_described(act))
        computes = True
    return raised if raised and not computes else f"its forward is not {_form(candidates[0])}"


def _form(kind: GatedKind) -> str:
    named = "" if kind.act is not None else f", act one of {', '.join(NAMED)}"
    return f"down(act(gate(x)) * up(x)){named}"


def _is_layer(module: nn.Module) -> bool:
    """Whether it is a matrix and perhaps a bias, whatever its class."""
    matrices = [each for each in module.parameters(recurse=False) if each.dim() == 2]
    return len(matrices) == 1 and not list(module.children()) and not isinstance(module, nn.Embedding)


def _activations(module: nn.Module) -> Iterator[str]:
    """Attributes that may be the activation: children without parameters, or functions."""
    for name, child in module.named_children():
        plain = not list(child.parameters()) and not list(child.buffers())
        if plain and not isinstance(child, (nn.Identity, nn.Dropout, nn.AlphaDropout)):
            yield name
    for name, value in vars(module).items():
        if callable(value) and not isinstance(value, (type, nn.Module)) and not name.startswith("_"):
            yield name


def _candidates(linears: dict[str, nn.Linear], act: str | None, activation: str | None) -> Iterator[GatedKind]:
    for gate, up, down in itertools.permutations(linears, 3):
        made = {linears[gate].out_features, linears[up].out_features, linears[down].in_features}
        if len(made) == 1 and linears[gate].in_features == linears[up].in_features:
            yield GatedKind(gate, up, down, act, activation)
    for both, down in itertools.permutations(linears, 2) if len(linears) == 2 else ():
        if linears[both].out_features == 2 * linears[down].in_features:
            yield from (GatedKind(both, None, down, act, activation, gate_first=first) for first in (True, False))


def _agrees(module: nn.Module, kind: GatedKind) -> bool | str:
    """Whether the module computes that, with small weights; or why it cannot be converted whatever it computes."""
    with asking(module), torch.no_grad():
        for _ in in_both_modes(module):
            for shape, size in (((3, WIDTH), 1.0), ((2, 4, WIDTH), 1.0), ((8, WIDTH), LARGE)):
                x = torch.randn(shape, dtype=torch.float64) * size
                given = x.clone()
                small = _small_weights(module, kind)
                result = torch.func.functional_call(module, small, (x,))
                if not isinstance(result, Tensor) or not torch.equal(given, x):
                    return "its forward writes onto its input, or returns something else than a tensor"
                expected = _by_formula(module, kind, x, small)
                if result.shape != expected.shape or not torch.allclose(result, expected, rtol=1e-9, atol=1e-9):
                    return False
    return True


def _small_weights(module: nn.Module, kind: GatedKind) -> dict[str, Tensor]:
    inner = INNER if kind.up is not None else 2 * INNER
    sizes = {kind.gate: (inner, WIDTH), kind.down: (OUT, INNER)} | (
        {} if kind.up is None else {kind.up: (INNER, WIDTH)}
    )
    return {
        f"{name}.{part}": torch.randn(shape if part == "weight" else shape[:1], dtype=torch.float64)
        for name, shape in sizes.items()
        for part, _ in getattr(module, name).named_parameters()
    }


def _by_formula(module: nn.Module, kind: GatedKind, x: Tensor, small: dict[str, Tensor]) -> Tensor:
    def layer(name: str, given: Tensor) -> Tensor:
        return nn.functional.linear(given, small[f"{name}.weight"], small.get(f"{name}.bias"))

    gate = layer(kind.gate, x)
    if kind.up is None:
        halves = gate.chunk(2, -1)
        gate, up = halves if kind.gate_first else halves[::-1]
    else:
        up = layer(kind.up, x)
    act: Activate = NAMED[kind.activation or ""] if kind.act is None else getattr(module, kind.act)
    return layer(kind.down, act(gate) * up)
