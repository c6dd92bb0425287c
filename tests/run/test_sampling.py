"""Replays are compared with eager's forward from time to time: a stale plan is found, named and dropped."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from takeback.compiler.run.executor import Executor
from takeback.compiler.run.proof import Thinning


def test_samples_become_rarer() -> None:
    found = [n for n in range(1, 3001) if Thinning().samples(n)]
    assert found == [3, 10, 100, 1000, 2000, 3000]


class Hidden:
    """A number where nobody can watch it: behind a C function."""

    def __init__(self, value: float) -> None:
        self._cell = (ctypes.c_double * 1)(value)
        address = ctypes.addressof(self._cell)
        self.read = ctypes.CFUNCTYPE(ctypes.c_double)(lambda: ctypes.c_double.from_address(address).value)

    def set_(self, value: float) -> None:
        self._cell[0] = value


def made(loss_fn: Any, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = model or nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, tb.compile_step(model, loss_fn, optimizer, memory="keep", **options)


def test_forward_that_took_more_than_the_plan_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is foreseen of it does not know what the user's own variables hold."""
    monkeypatch.setattr(Executor, "count_aside", lambda self: lambda: 1 << 40)
    hidden = Hidden(1.0)
    scale = hidden.read
    _, step = made(lambda model, x: model(x).square().mean() * scale())
    x = torch.randn(8, 4)
    for _ in range(6):
        step(x)
    hidden.set_(3.0)
    for _ in range(6):  # the tenth replay would find it
        step(x)
    [note] = [n for n in step.report().notes if "eager's forward needs" in n]
    assert "1,048,576.0 MiB" in note


def test_stale_plan_is_found_named_taken_back_and_recorded_anew() -> None:
    hidden = Hidden(1.0)
    scale = hidden.read

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * scale()

    model, step = made(loss_fn)
    x = torch.randn(8, 4)
    for _ in range(6):  # recorded, then replayed five times; the third replay was compared
        step(x)
    hidden.set_(3.0)
    for _ in range(4):  # stale, until the tenth replay
        step(x)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(tb.StalePlanError, match=r"mul.*is given 3\.0 where it was 1\.0.*last found right 7 steps ago"):
        step(x)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    loss = step(x)
    assert torch.equal(loss, loss_fn_value(model, before, x, 3.0))


def loss_fn_value(model: nn.Module, weights: dict[str, Tensor], x: Tensor, scale: float) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(model, weights, (x,)).square().mean() * scale


def test_a_step_that_stands_still_is_never_stopped_and_keeps_eagers_numbers() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.dropout(model(x), 0.5).square().mean()

    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled, step = made(loss_fn, net)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain.load_state_dict({k: v.clone() for k, v in compiled.state_dict().items()})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    x = torch.randn(8, 4)
    torch.manual_seed(1)
    for _ in range(12):
        step(x)
    torch.manual_seed(1)
    for _ in range(12):
        optimizer.zero_grad()
        loss_fn(plain, x).backward()
        optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(compiled.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    assert not [note for note in step.report().notes if "compared" in note]


def test_a_forward_that_needs_gradients_is_not_sampled_and_the_report_says_so() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum() + model(x).square().mean()

    _, step = made(loss_fn, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for _ in range(4):
        step(torch.ones(8, 4))
    assert [note for note in step.report().notes if "cannot be run without gradients" in note]


def test_a_forward_with_other_bits_without_gradients_is_compared_whole_once() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (1.0 if torch.is_grad_enabled() else 2.0)

    _, step = made(loss_fn)
    for _ in range(12):
        step(torch.ones(8, 4))
    assert [note for note in step.report().notes if "other bits where no gradients are wanted" in note]


@pytest.mark.parametrize("options", [{"update": "early"}, {"accumulate": 2}, {"clip_norm": 1.0}], ids=str)
def test_stale_plan_is_found_with(options: dict[str, Any]) -> None:
    hidden = Hidden(1.0)
    scale = hidden.read

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * scale()

    _, step = made(loss_fn, **options)
    x = torch.randn(8, 4)
    for _ in range(6):
        step(x)
    hidden.set_(3.0)
    for _ in range(4):
        step(x)
    with pytest.raises(tb.StalePlanError, match="last found right"):
        step(x)
    step(x)


def test_an_update_that_begins_before_the_loss_is_known_is_not_sampled() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = tb.compile_step(model, lambda model, x: model(x).square().mean(), optimizer, memory="keep", update="early")
    for _ in range(12):
        step(torch.ones(8, 4))
    assert [note for note in step.report().notes if "before its loss is known" in note]


def test_zero_asks_for_no_comparison() -> None:
    hidden = Hidden(1.0)
    scale = hidden.read
    _, step = made(lambda model, x: model(x).square().mean() * scale(), verify_every=0)
    for i in range(12):
        step(torch.ones(8, 4))
        if i == 5:
            hidden.set_(3.0)
