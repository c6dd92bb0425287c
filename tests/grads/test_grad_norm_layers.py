"""Norm layers under a GradBuffer: right in every mode, and the running statistics are updated once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from grad_twins import assert_same, backward_both, twins
from torch import nn

import takeback

Make = tuple[Callable[[], nn.Module], tuple[int, ...]]

CASES: dict[str, Make] = {
    "layer": (lambda: nn.LayerNorm(8), (5, 8)),
    "layer, 3-D": (lambda: nn.LayerNorm(8), (2, 3, 8)),
    "layer, two dimensions": (lambda: nn.LayerNorm((3, 8)), (2, 3, 8)),
    "layer, no bias": (lambda: nn.LayerNorm(8, bias=False), (2, 3, 8)),
    "layer, empty batch": (lambda: nn.LayerNorm(8), (0, 8)),
    "layer, one row": (lambda: nn.LayerNorm(8), (8,)),
    "layer, float64": (lambda: nn.LayerNorm(8, dtype=torch.float64), (5, 8)),
    "rms": (lambda: nn.RMSNorm(8), (5, 8)),
    "rms, two dimensions": (lambda: nn.RMSNorm((3, 8), eps=1e-3), (2, 3, 8)),
    "batch 1d": (lambda: nn.BatchNorm1d(8), (5, 8)),
    "batch 1d, 3-D": (lambda: nn.BatchNorm1d(8), (5, 8, 4)),
    "batch 2d": (lambda: nn.BatchNorm2d(8), (3, 8, 4, 5)),
    "batch 3d": (lambda: nn.BatchNorm3d(8), (2, 8, 3, 2, 2)),
    "batch, no statistics": (lambda: nn.BatchNorm2d(8, track_running_stats=False), (3, 8, 4, 5)),
    "batch, average": (lambda: nn.BatchNorm2d(8, momentum=None), (3, 8, 4, 5)),
    "batch, eval": (lambda: _started(nn.BatchNorm2d(8)).eval(), (3, 8, 4, 5)),
    "batch, frozen statistics": (lambda: nn.BatchNorm2d(8, momentum=0.0), (3, 8, 4, 5)),
    "group": (lambda: nn.GroupNorm(4, 8), (3, 8, 4, 5)),
    "group, 2-D": (lambda: nn.GroupNorm(2, 8), (3, 8)),
    "group, empty batch": (lambda: nn.GroupNorm(2, 8), (0, 8, 3)),
    "instance": (lambda: nn.InstanceNorm2d(8, affine=True), (3, 8, 4, 5)),
    "no parameters": (lambda: nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8)), (3, 8)),
}


def _started(layer: nn.BatchNorm2d) -> nn.BatchNorm2d:
    layer.running_mean.copy_(torch.linspace(-1, 1, 8))
    layer.running_var.copy_(torch.linspace(0.1, 2, 8))
    return layer


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    layer = make()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p))
    dtype = next(layer.parameters()).dtype
    return layer, torch.randn(shape, dtype=dtype)


def weighted(x: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda m: (m(x) * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum()


@pytest.mark.parametrize("name", CASES)
def test_norms_are_eagers_and_add_up(name: str) -> None:
    layer, x = made(name)
    model, buf, eager = twins(layer)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for turn in range(4):
        weighted(ours)(model).backward()
        weighted(theirs)(eager).backward()
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        if turn == 1:
            model.zero_grad()
            eager.zero_grad()
    for (key, mine), its in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, its, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_output_of_norms_has_eagers_bits_and_may_be_overwritten(name: str) -> None:
    layer, x = made(name)
    model, buf, eager = twins(nn.Sequential(layer, nn.ReLU(inplace=True)))
    assert torch.equal(model(x), eager(x))
    backward_both(model, eager, weighted(x))
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_double_backward_through_norms_is_right(name: str) -> None:
    layer, x = made(name)
    model, buf, eager = twins(layer.double())
    x = x.double()
    for m in (model, eager):
        given = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(m(given).pow(3).sum(), given, create_graph=True)
        dx.square().sum().backward()
    assert_same(model, buf, eager, rtol=1e-7, atol=1e-7)


def twice(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One layer in series with itself: the weight is in the history of its own layer's input."""
    return (m(m(x).tanh()) * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_norm_used_twice_in_series_with_create_graph_is_right(name: str) -> None:
    layer, x = made(name)
    model, _, eager = twins(layer.double())
    x = x.double()
    first, second = [], []
    for m in (model, eager):
        twice(m, x).backward(create_graph=True)
        grads = [p.grad for p in m.parameters()]
        assert all(g is not None and g.requires_grad for g in grads)
        first.append([g.detach().clone() for g in grads])
        second.append(torch.autograd.grad(sum(g.square().sum() for g in grads), list(m.parameters())))
        for p in m.parameters():
            p.grad = None  # a gradient with a history refers to its parameter and back
    for ours, theirs in ((first[0], first[1]), (second[0], second[1])):
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_r1_penalty_through_a_norm_used_twice_is_right(name: str) -> None:
    layer, x = made(name)
    model, buf, eager = twins(layer.double())
    for m in (model, eager):
        given = x.double().requires_grad_()
        out = twice(m, given)
        (dx,) = torch.autograd.grad(out, given, create_graph=True)
        (out + 5 * dx.square().sum()).backward()
    assert_same(model, buf, eager, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["layer", "batch 2d", "group"])
@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize("how", ["hook", "frozen", "outside", "inputs"])
def test_weight_and_bias_may_differ_in_how_they_are_treated(name: str, which: str, how: str) -> None:
    layer, x = made(name)
    model, buf, eager = twins(layer)
    inputs: dict[str, list[torch.Tensor]] = {}
    for _ in range(2):
        for m in (model, eager):
            p = getattr(m, which)
            if how == "hook":
                p.register_hook(lambda g: g * 2)
            elif how == "frozen":
                p.requires_grad_(False)
            elif how == "outside":
                p.grad = torch.ones_like(p)
            else:
                inputs = {"inputs": [p]}
            weighted(x)(m).backward(**inputs)
        buf.gather_()
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    if how == "hook":
        other = "bias" if which == "weight" else "weight"
        assert "torch.compile" not in buf.reasons.get(other, "")


def test_a_norm_whose_weight_is_its_bias_is_right() -> None:
    layer, x = made("layer")
    layer.bias = layer.weight
    model, buf, eager = twins(layer)
    for _ in range(2):
        backward_both(model, eager, weighted(x))
        assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_norms_take_their_input_by_name_and_under_autocast(name: str) -> None:
    layer, x = made(name)
    model, buf, eager = twins(layer)
    if not isinstance(layer, nn.Sequential):
        given = {"x" if isinstance(layer, nn.RMSNorm) else "input": x}
        assert torch.equal(model(**given), eager(**given))
    if x.dtype is torch.float64:
        return
    for m in (model, eager):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    assert_same(model, buf, eager, rtol=2e-2, atol=5e-2)


def test_a_batch_norm_refuses_what_torch_refuses() -> None:
    model, _, eager = twins(nn.BatchNorm2d(4))
    for x in (torch.randn(3, 4), torch.randn(1, 4, 1, 1)):
        for m in (model, eager):
            with pytest.raises(ValueError, match=r"expected 4D input|more than 1 value"):
                m(x)
    assert int(model.num_batches_tracked) == int(eager.num_batches_tracked)


def test_statistics_may_go_on_between_forward_and_backward_as_in_eager() -> None:
    """Two forwards in training, then one backward through both."""
    layer, x = made("batch 2d")
    model, buf, eager = twins(layer)
    backward_both(model, eager, lambda m: weighted(x)(m) + weighted(x * 2 + 1)(m))
    assert_same(model, buf, eager, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.running_var, eager.running_var)


def test_transposed_channels_last_and_strided_inputs_are_right() -> None:
    for name, change in (
        ("layer, 3-D", lambda x: x.transpose(0, 1)),
        ("batch 2d", lambda x: x.contiguous(memory_format=torch.channels_last)),
        ("group", lambda x: x.transpose(2, 3)),  # not channels_last: torch 2.13 itself crashes in its backward
        ("rms", lambda x: x.repeat(2, 1)[::2]),
        ("batch 1d, 3-D", lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)),
    ):
        layer, x = made(name)
        x = change(x)
        model, buf, eager = twins(layer)
        for _ in range(2):
            backward_both(model, eager, lambda m, x=x: m(x).pow(3).sum())
            assert_same(model, buf, eager, rtol=1e-3, atol=1e-3)
        assert isinstance(buf, takeback.GradBuffer)
