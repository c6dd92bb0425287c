"""In mode fast the update is the one kernel that torch has for it, whatever path eager takes: the same numbers but for
rounding, and eager's path where the kernel does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takeback as tb
from harness import eager_step
from takeback.compiler.capture import twin
from takeback.compiler.capture.finish import in_one_kernel
from takeback.compiler.capture.optimizers import Optimizers
from takeback.compiler.program import Phase
from takeback.compiler.run import kernels
from takeback.compiler.run.inductor import NotCompiled

pytestmark = pytest.mark.usefixtures("one_thread", "short_search", "no_compiler")

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, lists": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam, decayed": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd, all": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
}
KERNELS = ("_fused_adamw_", "_fused_adam_", "_fused_sgd_")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what differs is the update."""

    def missing(cluster: object, device: object) -> None:
        raise NotCompiled("there is no compiler here")

    monkeypatch.setattr(kernels, "compile_cluster", missing)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def updates(step: tb.CompiledStep) -> list[str]:
    assert step._last is not None
    return [op.name for op in step._last.executor.program.ops if op.phase is Phase.UPDATE]


def near(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def trained(make: Make, steps: int = 8, **options: Any) -> tb.CompiledStep:
    """Beside eager, with a schedule."""
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, plain = make(model.parameters()), make(other.parameters())
    step = tb.compile_step(model, square, optimizer, mode="fast", **options)
    for i in range(steps):
        torch.manual_seed(i)
        x = torch.randn(5, 6)
        step(x)
        eager_step(other, square, plain, (x,), clip_norm=options.get("clip_norm"))
        for one in (optimizer, plain):
            one.param_groups[0]["lr"] *= 0.9
    near(model, other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p].keys() == plain.state[q].keys()
        if "step" in plain.state[q]:
            assert torch.equal(optimizer.state[p]["step"], plain.state[q]["step"])
    return step


@pytest.mark.parametrize("options", [{}, {"update": "early"}, {"clip_norm": 0.1}, {"memory": "min", "poison": True}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_is_one_kernel_near_eagers(name: str, options: dict[str, Any]) -> None:
    step = trained(OPTIMIZERS[name], **options)
    found = updates(step)
    assert any(kernel in found for kernel in KERNELS)
    assert not any("sqrt" in op or "lerp" in op or "addcdiv" in op for op in found)
    assert len(step._plans) == 1, "its numbers are read anew in each step"
    assert any("torch's fused kernel" in note for note in step.report().notes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_precision_is_no_further_from_double_than_eagers_path(name: str) -> None:
    """Which rounds after each op."""
    start, make = mlp(torch.bfloat16), OPTIMIZERS[name]
    model, other, true = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start).double()
    step = tb.compile_step(model, square, make(model.parameters()), mode="fast")
    optimizers = [make(m.parameters()) for m in (other, true)]
    for i in range(8):
        torch.manual_seed(i)
        x = torch.randn(5, 6).bfloat16()
        step(x)
        eager_step(other, square, optimizers[0], (x,))
        eager_step(true, square, optimizers[1], (x.double(),))
    assert any(kernel in updates(step) for kernel in KERNELS) or name.startswith("sgd"), "torch's is wrong there"

    def off(m: nn.Module) -> float:
        pairs = zip(m.parameters(), true.parameters(), strict=True)
        return sum(float((p.double() - q).detach().square().sum()) for p, q in pairs) ** 0.5

    assert off(model) <= 2 * off(other)


def test_mode_exact_takes_eagers_path() -> None:
    model = mlp()
    step = tb.compile_step(model, square, torch.optim.AdamW(model.parameters()), mode="exact")
    for _ in range(3):
        step(torch.randn(5, 6))
    assert "sqrt" in updates(step)
    assert not any("fused kernel" in note for note in step.report().notes)


def test_it_takes_less_than_eagers_path() -> None:
    """Lists of tensors take a copy of all parameters."""

    def peak(one_kernel: bool) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("takeback.compiler.run.plan_maker.in_one_kernel", lambda optimizers: one_kernel)
            model = nn.Linear(64, 64)
            step = tb.compile_step(
                model, square, torch.optim.AdamW(model.parameters(), foreach=True), mode="fast", memory="keep"
            )
            for _ in range(3):
                step(torch.randn(2, 64))
            return step.report().peak_bytes

    assert peak(True) < peak(False)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        return self.rarely(self.always(x)) if rare else self.always(x)


def test_parameters_that_are_not_always_updated_have_counts_of_their_own() -> None:
    """A kernel that is told one count for all would be wrong: then eager's path is taken."""
    torch.manual_seed(0)
    model = Sometimes()
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))

    def loss_fn(m: nn.Module, x: Tensor, rare: bool) -> Tensor:
        return m(x, rare).square().mean()

    step = tb.compile_step(model, loss_fn, optimizer, mode="fast")
    for i, rare in enumerate([True, True, True, False, True, False, False, True, True, True]):
        torch.manual_seed(i)
        x = torch.randn(5, 4)
        step(x, rare)
        eager_step(other, loss_fn, plain, (x, rare))
        near(model, other)
    counts = {float(optimizer.state[p]["step"]) for p in model.parameters()}
    assert counts == {10.0, 7.0}
    assert "sqrt" in updates(step)


def test_gradient_that_lies_otherwise_takes_eagers_path() -> None:
    class Turned(nn.Module):
        """Its parameter is not contiguous, and its gradient is."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6)[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    torch.manual_seed(0)
    model = Turned()
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    step = tb.compile_step(model, square, optimizer, mode="fast")
    for i in range(5):
        torch.manual_seed(i)
        x = torch.randn(5, 8)
        step(x)
        eager_step(other, square, plain, (x,))
    near(model, other)
    assert "sqrt" in updates(step)


def test_gradients_that_waited_are_updated_in_one_kernel() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    step = tb.compile_step(model, square, optimizer, mode="fast")
    for i in range(5):
        torch.manual_seed(i)
        x, y = torch.randn(5, 6), torch.randn(5, 6)
        step(x, update=False)
        step(y)
        plain.zero_grad()
        (square(other, x) + square(other, y)).backward()
        plain.step()
    near(model, other)
    [plan] = step._update.plans
    assert "_fused_adamw_" in [op.name for op in plan.executor.program.ops]


def test_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = twin._twin

    def faster(optimizer: torch.optim.Optimizer, on: str | None, **otherwise: Any) -> torch.optim.Optimizer:
        return honest(optimizer, on, **(otherwise | ({"lr": 0.0101} if "fused" in otherwise else {})))

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert in_one_kernel(both := Optimizers((optimizer,), (optimizer,)))
    monkeypatch.setattr(twin, "_twin", faster)
    assert "its parameter is" in str(twin.differs_in_one_kernel(optimizer))
    assert not in_one_kernel(both)


def test_optimizer_of_another_kind_beside_it_takes_its_own_step() -> None:
    model = mlp()
    other = copy.deepcopy(model)

    def made(m: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(m[0].parameters(), lr=1e-2), torch.optim.RMSprop(m[2].parameters(), lr=1e-2)]

    step, plain = tb.compile_step(model, square, made(model), mode="fast"), made(other)
    for i in range(5):
        torch.manual_seed(i)
        x = torch.randn(5, 6)
        step(x)
        other.zero_grad()
        square(other, x).backward()
        for one in plain:
            one.step()
    near(model, other)
    assert "_fused_adamw_" in updates(step)
