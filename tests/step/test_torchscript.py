"""A TorchScript function that makes tensors where nobody sees it is recorded as it was written, if that has the same
bits; one that was traced, or gives other bits, is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_twins import assert_same, snapshot
from torch import Tensor, nn

import takeback as tb
from harness import Case, sgd, train_both
from takeback.compiler.capture.uncompiled import SCRIPTED, unscripted
from takeback.errors import CaptureError

pytestmark = [pytest.mark.usefixtures("one_thread", "short_search"), pytest.mark.filterwarnings("ignore")]


def scripted(function: Callable[..., Tensor]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and in use
        return torch.jit.script(function)


@scripted
def root(x: Tensor, factor: int) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)


@scripted
def plain(x: Tensor) -> Tensor:
    return x * 2.0


@scripted
def two_faced(x: Tensor) -> Tensor:
    if torch.jit.is_scripting():
        return x * torch.tensor(2.0).sqrt()
    return x * torch.tensor(3.0).sqrt()


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out / root(out, 3).to(out.dtype)).square().mean()


def noise(i: int) -> tuple[Tensor]:
    return (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)),)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))


def test_scripted_function_is_recorded_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.jit.ScriptFunction.__call__

    def somebody_elses(function: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(function, *args, **kwargs)

    monkeypatch.setattr(torch.jit.ScriptFunction, "__call__", somebody_elses)
    step = train_both(Case(linear, scaled, noise, sgd), steps=5, plans=1)
    assert SCRIPTED in step.report().notes
    assert torch.jit.ScriptFunction.__call__ is somebody_elses


def test_scripted_function_whose_tensors_are_seen_stays_as_it_is() -> None:
    step = train_both(Case(linear, lambda m, x: plain(m(x)).mean(), noise, sgd), steps=4, plans=1)
    assert SCRIPTED not in step.report().notes


def test_function_that_torchscript_runs_otherwise_is_refused_and_nothing_is_changed() -> None:
    model = linear()
    optimizer = sgd(model)
    step = tb.compile_step(model, lambda m, x: two_faced(m(x)).square().mean(), optimizer)
    before, state = snapshot(model, optimizer), torch.get_rng_state()
    with pytest.raises(CaptureError, match="gives other bits each time it runs, or when it is recorded"):
        step(*noise(0))
    assert_same(snapshot(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_traced_is_not_run_as_it_was_written() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: x * 2 if x.sum() > 0 else x * 3, (torch.ones(2),))
    with unscripted() as ran:
        assert traced(-torch.ones(2)).sum().item() == -4
    assert not ran


def test_other_threads_run_what_torchscript_made() -> None:
    found: list[Tensor] = []
    with unscripted() as ran:
        other = threading.Thread(target=lambda: found.append(two_faced(torch.ones(1))))
        other.start()
        other.join()
        assert not ran
        written = two_faced(torch.ones(1))
        assert ran == {"two_faced"}
    assert torch.equal(written, torch.tensor([3.0]).sqrt())
    assert torch.equal(found[0], two_faced(torch.ones(1)))
    assert not torch.equal(found[0], written)
