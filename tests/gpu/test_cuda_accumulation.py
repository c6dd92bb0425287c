"""On a GPU gradients add up over calls with eager's bits, and the bytes alive are the reported ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_twins
import pytest
import torch
from gpu_twins import (
    Case,
    adamw,
    bf16,
    channels_last,
    convnet,
    everything,
    exact_step,
    gpt,
    labelled,
    momentum,
    tokens,
    tokens_loss,
)
from torch import Tensor, nn

from harness import assert_same, same_bits
from takeback.compiler.ownership.writes import undo_bytes

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def steady_kernels() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def short(draw: Callable[[torch.Generator], tuple[Tensor, ...]], i: int) -> Callable[[torch.Generator], Any]:
    """Every other batch is cut: another plan."""
    return lambda g: tuple(t[: len(t) - i % 2] for t in draw(g))


CASES = {
    "gpt, dropout": Case(partial(gpt, 0.1), tokens_loss, tokens),
    "gpt, bf16, fused": Case(gpt, tokens_loss, tokens, fused, around=bf16),
    "convnet, channels_last": Case(convnet, labelled, channels_last, momentum),
    "clipped": Case(gpt, tokens_loss, tokens, adamw, {"clip_norm": 0.1}),
    "memory=min": Case(gpt, tokens_loss, tokens, adamw, {"memory": "min"}),
}


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_sums_over_calls_have_eagers_bits(name: str, scales: bool) -> None:
    case, device = CASES[name], gpu_twins.DEVICE
    models = case.model(), case.model()
    optimizers = [case.optimizer(m) for m in models]
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**8) if scales else None for _ in models]
    step = exact_step(models[0], case.loss_fn, optimizers[0], scaler=scalers[0], **case.settings)
    divisors = (3, torch.tensor(7), torch.tensor(2.5, device=device), torch.tensor(96, device=device), None, 1.5)
    for n, divide in enumerate(divisors):
        for k in range(3):
            drawn = short(case.draw, k)(torch.Generator().manual_seed(10 * n + k))
            batch = tuple(t.to(device) for t in drawn)
            last = k == 2
            with case.around():
                torch.manual_seed(k)
                loss = step(*batch, update=last, divide=divide if last else None)
                torch.manual_seed(k)
                expected = case.loss_fn(models[1], *batch)
            (expected if scalers[1] is None else scalers[1].scale(expected)).backward()
            torch.clear_autocast_cache()
            assert same_bits(loss, expected.detach()), f"loss of call {k} of update {n}"
            if not last:
                ours, eagers = (everything(m, o) for m, o in zip(models, optimizers, strict=True))
                assert_same(ours, eagers, f"call {k} of update {n}")
        found = [p for p in models[1].parameters() if p.grad is not None]
        for p in found if divide is not None else ():
            p.grad /= divide
        clip = case.settings.get("clip_norm")
        if scalers[1] is not None and clip is not None:
            scalers[1].unscale_(optimizers[1])
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(found, clip)
            assert step.grad_norm is not None
            assert same_bits(step.grad_norm, norm)
        if scalers[1] is not None:
            scalers[1].step(optimizers[1])
            scalers[1].update()
        else:
            optimizers[1].step()
        optimizers[1].zero_grad()
        ours, eagers = (everything(m, o) for m, o in zip(models, optimizers, strict=True))
        assert_same(ours, eagers, f"update {n}")
    assert step._update.plans, "the update was never planned"


@pytest.mark.parametrize("memory", ["keep", "auto", "min"])
def test_bytes_of_a_microbatch_are_the_reported_ones(memory: str) -> None:
    case = Case(gpt, tokens_loss, tokens)
    model = case.model()
    step = exact_step(model, case.loss_fn, case.optimizer(model), memory=memory)
    batch = case.batch(0)
    for _ in range(4):
        for _ in range(3):
            step(*batch, update=False)
        step.update()
    step(*batch, update=False)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    step(*batch, update=False)
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    report = step.report()
    planned = report.peak_bytes - report.resident_bytes - undo_bytes(step._last.executor.program)
    assert abs(taken - planned) <= 0.02 * planned
    assert report.peak_bytes <= report.eager_peak_bytes
