"""Scenarios for two processes: a Lightning Trainer with strategy="ddp", stock and with `Takeback`."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from lightning_twins import Lit, assert_equal_fits, fit
from torch import distributed as dist

from takeback.errors import CaptureError
from takeback.integrations.lightning import Takeback


def _as_under_torchrun(rank: int) -> None:
    warnings.simplefilter("ignore")
    world = dist.get_world_size()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test")


def ddp(rank: int, group: dist.ProcessGroup) -> None:
    """Accumulation and clipping; each rank has its own part of the data, and the logs are reduced."""

    class Synced(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("synced", loss, sync_dist=True)
            return loss

    _as_under_torchrun(rank)
    for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}):
        both = [
            fit(Synced, takeback=takeback, strategy="ddp", devices=2, **settings)  # type: ignore[arg-type]
            for takeback in (None, Takeback(memory="keep"))
        ]
        assert_equal_fits(both[1], both[0])
        assert both[1].takeback is not None
        assert both[1].takeback.step is not None
        assert both[1].takeback.step._replays > 0
        assert both[1].trainer.strategy.model is both[1].module  # no DDP, and no buckets of its


def ddp_refusals(rank: int, group: dist.ProcessGroup) -> None:
    """Who must see averaged gradients before the update."""

    class Looks(Lit):
        def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    _as_under_torchrun(rank)
    with pytest.raises(CaptureError, match=r"overrides on_before_optimizer_step.*Without it DDP works"):
        fit(Looks, takeback=Takeback(memory="keep"), strategy="ddp", devices=2)
