"""The random trail reads generator states while the traps for the user's code are set, under any function mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import takeback as tb
from takeback.compiler.run.eager import eager_step


@pytest.fixture
def default_device() -> Iterator[None]:
    """Puts a mode on that sees every torch function."""
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_dropout_is_recorded_under_a_default_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        step(torch.ones(2, 4))
    assert len(step._plans) == 1


class _Checkpointed(nn.Module):
    """Two blocks with dropout, run again in the backward: the last one to run leaves an earlier random state behind,
    and checkpoint puts the later one back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda t, f=layer: nn.functional.dropout(f(t), 0.5), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_random_state_is_put_back_before_the_update_begins(clip_norm: float | None) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    torch.manual_seed(0)
    ours, theirs = _Checkpointed(), _Checkpointed()
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = tb.compile_step(ours, loss_fn, torch.optim.SGD(ours.parameters(), lr=0.1), clip_norm=clip_norm)
    for i in range(4):
        x = torch.full((2, 4), float(i + 1))
        torch.manual_seed(i)
        loss = step(x)
        after = torch.get_rng_state()
        torch.manual_seed(i)
        assert torch.equal(loss, eager_step(theirs, loss_fn, optimizer, (x,), clip_norm=clip_norm))
        assert torch.equal(after, torch.get_rng_state())
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert len(step._plans) == 1
