"""A number that the user changes between steps, and that the step only computes with, is read anew by the plan."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")
BETA = 0.0


def train(
    loss: Callable[[Any, nn.Module, Tensor], Tensor], compiled: bool, clip_norm: float | None = None, **options: Any
) -> tuple[list[Tensor], Any]:
    """Eight steps under an annealed beta, and a gain that changes from the seventh step on."""
    torch.manual_seed(0)
    config = types.SimpleNamespace(beta=0.0, gain=1.0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return loss(config, model, x)

    options = {"memory": "keep", "clip_norm": clip_norm, **options}
    step = tb.compile_step(model, loss_fn, optimizer, **options) if compiled else None
    seen: list[Tensor] = []
    for i in range(8):
        config.beta = 0.1 * i
        if i > 5:
            config.gain = 1.0 + i
        x = torch.full((3, 4), 0.1 * i)
        if step is not None:
            seen.append(step(x))
        else:
            optimizer.zero_grad()
            out = loss_fn(model, x)
            out.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            seen.append(out.detach())
        seen += [p.detach().clone() for p in model.parameters()]
    return seen, step


def assert_bits(loss: Callable[[Any, nn.Module, Tensor], Tensor], plans: int | None = None, **options: Any) -> Any:
    eager, _ = train(loss, compiled=False, clip_norm=options.get("clip_norm"))
    ours, step = train(loss, compiled=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True))
    if plans is not None:
        assert len(step._plans) == plans
    return step


def annealed(config: Any, model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out - 1).square().mean() * config.gain + config.beta * out.square().mean()


def derived(config: Any, model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (1 - config.beta) * (out - 1).square().mean() + out.square().mean() * (config.beta / 2 + 1)


@pytest.mark.parametrize("loss", [annealed, derived])
@pytest.mark.parametrize("memory", ["keep", "min"])
def test_annealed_number_has_eagers_bits_and_one_plan(loss: Any, memory: str) -> None:
    assert_bits(loss, plans=1, memory=memory)


def test_annealed_number_has_one_plan_where_gradients_are_clipped() -> None:
    assert_bits(annealed, plans=1, clip_norm=0.05)


def test_number_that_decides_is_recorded_anew() -> None:
    def loss(config: Any, model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return out.square().mean() * config.beta if config.beta > 0.35 else (out - 1).square().mean() * config.beta

    with pytest.warns(RuntimeWarning, match=r"config.*\.beta: "):
        assert_bits(loss)


def test_number_that_a_function_of_c_looks_at_is_recorded_anew() -> None:
    def loss(config: Any, model: nn.Module, x: Tensor) -> Tensor:
        scale = 2.0 if math.copysign(1.0, config.beta - 0.35) > 0 else 1.0
        return model(x).square().mean() * config.beta * scale

    with pytest.warns(RuntimeWarning, match=r"\.beta: "):
        assert_bits(loss)


def test_number_that_is_a_power_is_recorded_anew() -> None:
    def loss(config: Any, model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).abs() + 0.1).pow(config.beta).mean()

    with pytest.warns(RuntimeWarning, match=r"\.beta: "):
        assert_bits(loss)


def test_number_that_becomes_something_else_is_recorded_anew() -> None:
    torch.manual_seed(0)
    config = types.SimpleNamespace(beta=1.0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = tb.compile_step(model, lambda m, x: m(x).square().mean() * config.beta, optimizer, memory="keep")
    x = torch.ones(3, 4)
    for beta in (1.0, 2.0, 3.0, torch.tensor(4.0), 5.0, 6):
        config.beta = beta
        assert torch.equal(step(x), model(x).square().mean().detach() * beta)


def test_global_and_list_items_are_numbers_too() -> None:
    global BETA
    weights = [1.0, 2.0]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * BETA + model(x).mean() * weights[1]

    model = nn.Linear(4, 4)
    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), memory="keep")
    for i in range(6):
        BETA, weights[1] = 0.5 * i, 2.0 - i
        x = torch.full((3, 4), float(i))
        assert torch.equal(step(x), loss_fn(model, x).detach())
    assert len(step._plans) == 1
    assert (type(BETA), type(weights[1])) == (float, float)


def test_number_in_aux_is_what_it_is_in_each_step() -> None:
    """Of the recording as of a replay, and a plain float: not the one of the step that was recorded last."""
    config = types.SimpleNamespace(beta=0.0)
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
        beta = config.beta
        return beta * model(x).square().mean(), {"beta": beta, "both": [(1 - beta, types.SimpleNamespace(x=x, b=beta))]}

    step = tb.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), memory="keep")
    for i in range(5):
        config.beta = 0.1 * i + 0.05
        aux = step(torch.ones(3, 4))[1]
        rest, held = aux["both"][0]
        assert [type(v) for v in (aux["beta"], rest, held.b)] == [float] * 3
        assert (aux["beta"], rest, held.b) == (config.beta, 1 - config.beta, config.beta)
    assert step._replays == 3
