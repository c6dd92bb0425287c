"""The written-out updates are what torch does, op for op and number for number; else torch's own step runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from takeback.compiler.capture import update
from takeback.compiler.capture.twin import disproof
from takeback.compiler.capture.update import own_step_reason

SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    {"momentum": 0.9, "dampening": 0.1},
]
ADAM = [{}, {"weight_decay": 0.1}, {"weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6}]
SETTINGS = [(torch.optim.SGD, s) for s in SGD] + [(k, s) for k in (torch.optim.Adam, torch.optim.AdamW) for s in ADAM]


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]


@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"fused": True}], ids=["single", "foreach", "fused"])
@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_written_update_is_torchs_own(kind: Any, settings: dict[str, Any], path: dict[str, bool]) -> None:
    optimizer = kind(_parameters(), lr=1e-2, **settings, **path)
    assert own_step_reason(optimizer) is None
    assert disproof(optimizer) is None


def test_twin_finds_an_op_that_torch_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = update._adam_single

    def wrong(w: Any, group: Any, s: Any, decoupled: bool) -> None:
        honest(w, group, s, decoupled)
        w.write(torch.ops.aten.mul_.Tensor, s.parameter, 1.0)

    monkeypatch.setattr(update, "_adam_single", wrong)
    assert "where takeback wrote ('aten.mul_.Tensor'" in str(disproof(torch.optim.Adam(_parameters())))


def test_twin_finds_a_number_that_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        update, "_root_correction", lambda w, step: w.scalar("wrong", lambda g, t: 1 - g["betas"][1] ** t, step)
    )
    assert "div.Tensor" in str(disproof(torch.optim.Adam(_parameters())))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.RMSprop(p), "is not one whose update takeback writes out"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), "lr is a tensor"),
    ],
)
def test_other_optimizers_run_their_own_step_for_a_named_reason(make: Any, reason: str) -> None:
    assert reason in str(own_step_reason(make(_parameters())))
