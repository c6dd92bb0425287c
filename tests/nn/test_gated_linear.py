"""act(gate) * up and the layer after it: torch's gradients; gate and up are kept, and overwritten if nobody reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from takeback.nn import gated, gated_linear
from takeback.nn.gated_linear import NAMED
from takeback.nn.owner import HELD, KEPT, Copies

ACTIVATIONS: dict[str, Any] = {**{name: name for name in NAMED}, "squared relu": lambda x: F.relu(x).square()}


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 6, 8), (2, 6, 8), (5, 8), (5,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def run(how: str, activation: Any, given: list[Tensor], copies: Copies | None = None) -> list[Tensor]:
    """The result and all gradients; gate and up are intermediates."""
    gate, up, weight, bias = given
    function = NAMED[activation] if isinstance(activation, str) else activation
    g, u = gate * 1, up * 1
    both = torch.cat((g, u), -1)
    if how == "torch":
        result = F.linear(function(g) * u, weight, bias)
    elif how == "product":
        result = F.linear(gated(g, u, activation, copies=copies), weight, bias)
    elif how == "halves":
        result = gated_linear(both, None, weight, bias, activation, copies=copies)
    elif how == "halves, up first":
        swapped = torch.cat((u, g), -1)
        result = gated_linear(swapped, None, weight, bias, activation, gate_first=False, copies=copies)
        del swapped
    else:
        result = gated_linear(g, u, weight, bias, activation, copies=copies)
    del g, u, both
    result.backward(torch.linspace(-1, 1, result.numel()).view_as(result).to(result))
    return [result.detach(), *(each.grad for each in given if each.grad is not None)]


@pytest.mark.parametrize("how", ["linear", "product", "halves", "halves, up first"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_gradients_are_torchs_and_nothing_is_copied(activation: str, how: str) -> None:
    copies = Copies()
    torchs, ours = run("torch", ACTIVATIONS[activation], leaves()), run(how, ACTIVATIONS[activation], leaves(), copies)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert str(copies) == "none"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_in_bfloat16_it_is_no_further_from_float64_than_twice_torchs_distance(activation: str) -> None:
    start = leaves(torch.bfloat16)
    exact = run("torch", activation, [each.detach().double().requires_grad_() for each in start])
    torchs, ours = (run(how, activation, leaves(torch.bfloat16)) for how in ("torch", "linear"))
    for e, t, o in zip(exact, torchs, ours, strict=True):
        assert o.dtype == torch.bfloat16
        assert float((o.double() - e).norm()) <= 2 * float((t.double() - e).norm())


@pytest.mark.parametrize("how", ["linear", "halves"])
def test_gate_up_and_the_weight_are_all_that_is_kept(how: str) -> None:
    gate, up, weight, _ = leaves()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    pair = (torch.cat((gate, up), -1), None) if how == "halves" else (gate, up)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gated_linear(pair[0], pair[1], weight)
    assert sum(kept.values()) == 4 * (gate.numel() + up.numel() + weight.numel())


@pytest.mark.parametrize(("reason", "why"), [("held", HELD), ("kept", KEPT)])
def test_what_others_can_read_is_not_overwritten(reason: str, why: str) -> None:
    gate, up, weight, _ = leaves()
    copies = Copies()
    g, u = gate * 1, up * 1
    before = g.detach().clone(), u.detach().clone()
    result = gated_linear(g, u, weight, copies=copies)
    if reason == "held":
        result.sum().backward()
        assert torch.equal(g, before[0])
        assert torch.equal(u, before[1])
    else:
        del g, u
        result.sum().backward(retain_graph=True)
        first = gate.grad
        gate.grad = None
        result.sum().backward()
        assert torch.equal(first, gate.grad)
    assert why in str(copies)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (2,), (2, 3), (0, 1, 3)])
def test_what_is_frozen_gets_nothing_and_the_others_the_same(frozen: tuple[int, ...]) -> None:
    given = [each.detach().requires_grad_(i not in frozen) for i, each in enumerate(leaves())]
    ours = run("linear", "gelu", given)
    torchs = run("torch", "gelu", [each.detach().requires_grad_(each.requires_grad) for each in given])
    assert len(ours) == 5 - len(frozen)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast_the_layer_is_computed_as_autocast_has_it() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        torchs, ours = (run(how, "silu", leaves()) for how in ("torch", "linear"))
    for one, other in zip(ours, torchs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown activation 'swish'; there are silu"):
        gated(torch.ones(2), torch.ones(2), "swish")
    with pytest.raises(ValueError, match="even last dimension"):
        gated(torch.ones(3))
