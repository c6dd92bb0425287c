"""On a GPU a step with `scaler=` has eager's bits: half precision that overflows, growth, and both ways to skip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from gpu_twins import (
    DEVICE,
    Case,
    adamw,
    convnet,
    everything,
    exact_step,
    gpt,
    images,
    labelled,
    mlp,
    momentum,
    rows,
    tokens,
    tokens_loss,
)
from torch import Tensor, nn
from torch.amp import GradScaler

import takeback as tb
from takeback.compiler.run.eager import eager_step

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

Scalers = Callable[[], GradScaler]


@pytest.fixture(autouse=True)
def steady_kernels() -> Iterator[None]:
    """Eager's own convolutions repeat their bits."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def fp16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(DEVICE, dtype=torch.float16)


def large_scaler() -> GradScaler:
    """So large that gradients in half precision overflow at first, and again whenever it has grown."""
    return GradScaler(DEVICE, init_scale=2.0**28, growth_interval=3)


def odd_scaler() -> GradScaler:
    """No scale of it is a power of two; it grows every third step."""
    return GradScaler(DEVICE, init_scale=30000 / 7, growth_factor=1.7, backoff_factor=0.37, growth_interval=3)


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits, with NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
    if not a.is_floating_point():
        return torch.equal(a, b)
    number = ~a.isnan()
    return torch.equal(number, ~b.isnan()) and torch.equal(a[number].view(torch.uint8), b[number].view(torch.uint8))


def assert_same(ours: Mapping[str, Tensor], eagers: Mapping[str, Tensor], when: str) -> None:
    assert ours.keys() == eagers.keys(), f"{when}: {ours.keys() ^ eagers.keys()} is on one side only"
    different = [name for name, value in eagers.items() if not same(ours[name], value)]
    assert not different, f"{when}: {different} differ from eager's"


def train_both(case: Case, scalers: Scalers, *, steps: int = 16, infs: Collection[int] = ()) -> tb.CompiledStep:
    """Raises unless compiled and eager agree in everything after every step."""
    ours, eager = case.model(), case.model()
    optimizers = case.optimizer(ours), case.optimizer(eager)
    scaler, eager_scaler = scalers(), scalers()
    settings = {"keep_grads": True, **case.settings}
    step = exact_step(ours, case.loss_fn, optimizers[0], scaler=scaler, **settings)
    recipe = {k: v for k, v in settings.items() if k in ("accumulate", "clip_norm")}
    scales: list[float] = []
    for i in range(steps):
        batch = case.batch(i)
        if i in infs:
            batch[0].view(-1)[0] = torch.inf
        with case.around():
            torch.manual_seed(i)
            loss = step(*batch)
            torch.manual_seed(i)
            expected = eager_step(eager, case.loss_fn, optimizers[1], batch, **recipe, scaler=eager_scaler)
        assert same(loss, expected), f"step {i}: loss {loss.item()!r}, eager's {expected.item()!r}"
        if not settings["keep_grads"]:
            eager.zero_grad()
        assert_same(everything(ours, optimizers[0]), everything(eager, optimizers[1]), f"step {i}")
        assert scaler.state_dict() == eager_scaler.state_dict(), f"step {i}"
        scales.append(scaler.get_scale())
    falls = [a > b for a, b in pairwise(scales)]
    assert any(falls), "no gradient overflowed: this test shows nothing"
    assert any(a < b for a, b in pairwise(scales)), "the scale never grew"
    assert len(step._plans) == 1
    return step


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 10))


MODELS = {
    "mlp, dropout": Case(mlp, labelled, rows, around=fp16),
    "convnet": Case(convnet, labelled, images, momentum, around=fp16),
    "batch norm on rows": Case(normed, labelled, rows, around=fp16),
    "gpt": Case(partial(gpt, 0.1), tokens_loss, tokens, around=fp16),
}


@pytest.mark.parametrize("memory", ["auto", "min"])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_that_overflows_has_eagers_bits(name: str, memory: str) -> None:
    case = MODELS[name]
    settings = {"memory": memory, "keep_grads": False}
    train_both(Case(case.build, case.loss_fn, case.draw, case.optimizer, settings, case.around), large_scaler, steps=24)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd loop": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "sgd fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1),
    "adam fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "adamw": adamw,
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "adamw capturable": lambda m: torch.optim.AdamW(m.parameters(), capturable=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
}
OWN_STEP = ("adamw capturable", "adagrad")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate and clip": {"accumulate": 2, "clip_norm": 0.5},
    "verified": {"verify_every": 1},
    "poisoned": {"poison": True, "memory": "min"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_has_eagers_bits_with_growth_and_infs(name: str, settings: str) -> None:
    case = Case(normed, labelled, rows, OPTIMIZERS[name], SETTINGS[settings])
    step = train_both(case, odd_scaler, infs=(4, 5, 11))
    own = any(r.decision == "plan the update" for r in step.report().refusals)
    assert own == (name in OWN_STEP)
