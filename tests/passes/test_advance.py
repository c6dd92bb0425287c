"""advance (update="early"): gradients hardly exist at the same time, with eager's bits; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import takeback as tb
from takeback import zoo
from takeback.compiler.passes import Draft
from takeback.compiler.passes.advance import advance
from takeback.compiler.program import Phase, Program
from takeback.compiler.run.eager import eager_step
from takeback.errors import OptionError

OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "nesterov, foreach": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "sgd, fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters()),
    "adamw, foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), shared, nn.Dropout(0.3), shared, nn.LayerNorm(32), nn.Linear(32, 4)
    )


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def recorded(optimizer: str, loss: Any = loss_fn) -> Program:
    model = net()
    step = tb.compile_step(model, loss, OPTIMIZERS[optimizer](model), memory="keep", update="early")
    step(torch.randn(8, 16))
    return step._plans[0].original


@pytest.mark.parametrize("memory", ["keep", "min"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_early_update_has_eagers_bits(optimizer: str, memory: str) -> None:
    model, twin = net(), net()
    ours, eagers = OPTIMIZERS[optimizer](model), OPTIMIZERS[optimizer](twin)
    step = tb.compile_step(model, loss_fn, ours, memory=memory, update="early", poison=True)
    for i in range(5):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        torch.manual_seed(i)
        loss = step(x)
        torch.manual_seed(i)
        assert torch.equal(loss, eager_step(twin, loss_fn, eagers, (x,)))
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), f"step {i}: {name}"
            assert p.grad is None
    assert step._plans[0].proved


def test_updates_move_up_and_nothing_else_is_reordered() -> None:
    before = recorded("adamw").ops
    after = advance(Draft(recorded("adamw"))).program.ops
    rest = [op.name for op in after if op.phase is not Phase.UPDATE]
    assert rest == [op.name for op in before if op.phase is not Phase.UPDATE]
    assert sorted(op.name for op in after) == sorted(op.name for op in before)
    first = next(i for i, op in enumerate(after) if op.phase is Phase.UPDATE)
    assert any(op.phase is Phase.BACKWARD for op in after[first:]), "no update moved: this shows nothing"


def test_weight_decay_waits_for_its_gradient() -> None:
    """Alone it could come as soon as the weight is read no more, and then nothing of that weight could be rebuilt."""
    ops = advance(Draft(recorded("adamw"))).program.ops
    decays = [i for i, op in enumerate(ops) if op.phase is Phase.UPDATE and op.name.startswith("mul_")]
    assert decays
    assert all(ops[i - 1].phase is not Phase.FORWARD for i in decays)


def test_no_update_comes_before_a_value_that_is_read_into_python() -> None:
    def reading(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        class Held(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * (2.0 if grad.numel() and bool(grad.isfinite().all()) else 0.0)

        return model[1:](Held.apply(model[0](x))).square().mean()

    ops = advance(Draft(recorded("sgd", reading))).program.ops
    held = [i for i, op in enumerate(ops) if op.expected is not None]
    assert held, "nothing was read into Python: this shows nothing"
    assert min(i for i, op in enumerate(ops) if op.phase is Phase.UPDATE) > max(held)


def test_gradients_hardly_exist_at_the_same_time() -> None:
    case = zoo.case("mlp")
    peaks = {
        update: tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, memory="keep", update=update)
        for update in ("end", "early")
    }
    gradients = sum(p.numel() * 4 for p in case.model.parameters())
    end, early = (r.peak_bytes - r.resident_bytes for r in (peaks["end"], peaks["early"]))
    assert end > gradients, "the gradients are not the peak here: this shows nothing"
    assert early < gradients


@pytest.mark.parametrize("call", [tb.compile_step, lambda *a, **k: tb.predict(*a, torch.randn(8, 16), **k)])
def test_optimizer_with_a_step_of_its_own_is_refused(call: Any) -> None:
    model = net()
    with pytest.raises(OptionError, match=r"the optimizer's own step\(\) would be called: .*Adagrad"):
        call(model, loss_fn, torch.optim.Adagrad(model.parameters()), update="early")
