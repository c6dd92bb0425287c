"""The written-out updates are what torch does when a GradScaler steps the optimizer, op for op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from takeback.compiler.capture import update
from takeback.compiler.capture.scaling import Scaling
from takeback.compiler.capture.twin import disproof

SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
]


def scaling_of(optimizer: torch.optim.Optimizer, *, clips: bool) -> Scaling:
    made = Scaling(torch.amp.GradScaler("cpu"), optimizer, clips=clips)
    made.prepare_()
    return made


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"fused": True}], ids=["single", "foreach", "fused"])
@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_written_update_is_what_the_scaler_runs(
    kind: Any, settings: dict[str, Any], path: dict[str, bool], clips: bool
) -> None:
    optimizer = kind(parameters(), lr=1e-2, **settings, **path)
    scaling = scaling_of(optimizer, clips=clips)
    assert scaling.in_kernel == ("fused" in path)
    assert disproof(optimizer, scaling) is None


def test_twin_finds_arguments_of_a_kernel_that_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = update._for_kernels

    def swapped(*args: Any) -> Any:
        given = honest(*args)
        return {"found_inf": given["grad_scale"], "grad_scale": given["found_inf"]}

    monkeypatch.setattr(update, "_for_kernels", swapped)
    optimizer = torch.optim.AdamW(parameters(), fused=True)
    assert "_fused_adamw_" in str(disproof(optimizer, scaling_of(optimizer, clips=False)))


def test_twin_finds_an_update_that_was_written_without_the_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "_for_kernels", lambda *_: {})
    optimizer = torch.optim.SGD(parameters(), lr=0.1, fused=True)
    assert "where takeback wrote" in str(disproof(optimizer, scaling_of(optimizer, clips=True)))


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_optimizer_with_a_scale_of_its_own_runs_its_own_step(name: str) -> None:
    optimizer = torch.optim.AdamW(parameters(), fused=True)
    scaling = scaling_of(optimizer, clips=False)
    assert scaling.own_step_reason() is None
    setattr(optimizer, name, torch.ones(()))
    assert "is set on the optimizer" in str(scaling.own_step_reason())
