"""A collective that fails by itself, at any bucket of a recording, of a plan's first replay and of a later one: an
error that says which bucket, nothing is changed, and later steps are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import takeback as tb
from harness import adamw, assert_same, state_of
from takeback import flat
from takeback.errors import ReduceError
from takeback.parallel import Reducer

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of this process alone, with small buckets."""
    monkeypatch.setattr(flat, "BUCKET_BYTES", 600)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("bucket", [0, 2])
@pytest.mark.parametrize("good_steps", [0, 1, 4], ids=["recording", "first replay", "later replay"])
def test_collective_that_fails_changes_nothing_and_is_told(
    good_steps: int, bucket: int, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8), nn.Linear(8, 8))
    optimizer = adamw(model)
    step = tb.compile_step(model, loss_fn, optimizer, group=group)
    for i in range(good_steps):
        torch.manual_seed(i)
        step(torch.randn(6, 8))
    before = {name: t.detach().clone() for name, t in state_of(model, optimizer).items()}
    torch.manual_seed(99)
    x, random = torch.randn(6, 8), torch.get_rng_state()
    real = Reducer._send

    def send(self: Reducer, tensors: Sequence[Tensor]) -> distributed.Work:
        if len(self._works) == bucket:
            raise RuntimeError("the link is down")
        return real(self, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Reducer, "_send", send)
        with pytest.raises(ReduceError, match=rf"bucket {bucket + 1} of \d+ could not be averaged .*the link is down"):
            step(x)
    assert_same(state_of(model, optimizer), before)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ReduceError, match="has failed in an earlier step"):
        step(x)
    assert_same(state_of(model, optimizer), before)
