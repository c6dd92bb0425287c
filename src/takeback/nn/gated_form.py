"""Gated MLPs by whatever class, down(act(gate(x)) * up(x)): recognised by their parts and by what they compute.

In: a module. Out: a `GatedKind` with the names of its parts, or why it is none. It is asked with small random weights
in place of its own, on the CPU, in training and in eval; so neither its size nor its device matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from takeback import engine
from takeback.nn.activation_form import name_of
from takeback.nn.asking import asking, in_both_modes, refusal, takes_one_tensor
from takeback.nn.forward_graphs import touched
from takeback.nn.gated_linear import Activate, gated, gated_linear
from takeback.nn.owner import Copies
from takeback.nn.swap import REMEMBERED, Form, argument

WIDTH, INNER, OUT = 5, 6, 7  #: of the weights it is asked with: all different


@dataclass
class GatedKind:
    """The parts of a gated MLP by name, and what its converted form remembers. up None: both come out of gate."""

    gate: str
    up: str | None
    down: str
    act: str  #: the attribute that is called
    activation: str | None  #: its name where it is one of ours; None: it is called as it is
    gate_first: bool = True  #: of two halves
    described: Any = None  #: what the activation is, to see when it is replaced
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
        act: Any = getattr(module, kind.act)
        if (isinstance(act, nn.Module) and touched(act)) or _described(act) != kind.described:
            return self.plain(*args, **kwargs)  # somebody watches it, or put another in its place
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
    if not acts or len(weighted) not in (2, 3) or list(module.parameters(recurse=False)):
        return None
    if not all(_is_layer(child) for child in weighted):
        return None
    if len(linears) != len(weighted):
        return f"its layers are {', '.join(sorted({type(each).__name__ for each in weighted}))}, not Linear"
    if why := touched(module):
        return f"it {why}"
    if not takes_one_tensor(module):
        return "its forward takes more than one tensor"
    candidates = [kind for act in acts for kind in _candidates(linears, act)]
    if not candidates:
        return "it is not gated: no two of its layers make what a third takes"
    answer: bool | str = False
    for kind in candidates:
        answer = _agrees(module, kind)
        if answer is True:
            act = getattr(module, kind.act)
            with asking(module):
                kind.activation, kind.described = name_of(act), _described(act)
            return kind
        if isinstance(answer, str):
            return answer
    return "its forward is not down(act(gate(x)) * up(x))"


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


def _candidates(linears: dict[str, nn.Linear], act: str) -> Iterator[GatedKind]:
    for gate, up, down in itertools.permutations(linears, 3):
        made = {linears[gate].out_features, linears[up].out_features, linears[down].in_features}
        if len(made) == 1 and linears[gate].in_features == linears[up].in_features:
            yield GatedKind(gate, up, down, act, None)
    for both, down in itertools.permutations(linears, 2) if len(linears) == 2 else ():
        if linears[both].out_features == 2 * linears[down].in_features:
            yield from (GatedKind(both, None, down, act, None, gate_first=first) for first in (True, False))


def _agrees(module: nn.Module, kind: GatedKind) -> bool | str:
    """Whether the module computes that, with small weights; or why it cannot be asked."""
    try:
        with asking(module), torch.no_grad():
            for _ in in_both_modes(module):
                for shape in ((3, WIDTH), (2, 4, WIDTH)):
                    x = torch.randn(shape, dtype=torch.float64)
                    given = x.clone()
                    small = _small_weights(module, kind)
                    result = torch.func.functional_call(module, small, (x,))
                    if not isinstance(result, Tensor) or not torch.equal(given, x):
                        return "its forward writes onto its input, or returns something else than a tensor"
                    expected = _by_formula(module, kind, x, small)
                    if result.shape != expected.shape or not torch.allclose(result, expected, rtol=1e-9, atol=1e-9):
                        return False
    except Exception as error:  # whatever a forward raises that is no such MLP
        return refusal(error)
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
    return layer(kind.down, getattr(module, kind.act)(gate) * up)
