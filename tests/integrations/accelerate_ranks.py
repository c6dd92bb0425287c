"""Scenarios for two processes: Accelerate's DDP, and a compiled step in its place. Under torchrun it is a script."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import accelerate
import pytest
import torch
from torch import distributed as dist

sys.path.append(str(Path(__file__).parents[1]))  # where pytest looks, and torchrun does not

from accelerate_twins import build, forget, loss_fn, train_both

from takeback.errors import CaptureError
from takeback.integrations.accelerate import compile_step


def _compare() -> None:
    for settings in ({}, {"gradient_accumulation_steps": 2}):
        step = train_both(rows=80, **settings)
        assert "rank" in " ".join(step.report().notes)


def _hold_back() -> None:
    """In one process no_sync() does nothing, and nobody can see it; with DDP it is seen."""
    accelerator = accelerate.Accelerator(cpu=True)
    bare = build()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    step = compile_step(accelerator, model, loss_fn, optimizer, memory="keep")
    batch = torch.randn(8, 6), torch.randint(4, (8,))
    before = [p.clone() for p in bare.parameters()]
    with accelerator.no_sync(model):
        with pytest.raises(CaptureError, match=r"inside of no_sync.*update=False"):
            step(*batch)
        step(*batch, update=False)
    assert all(map(torch.equal, before, bare.parameters()))
    step(*batch)
    assert not torch.equal(before[0], bare[0].weight)
    forget()


def ddp(rank: int, group: dist.ProcessGroup) -> None:
    warnings.simplefilter("ignore")
    world = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511")
    _compare()
    _hold_back()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _compare()
    print("the same", flush=True)
    dist.destroy_process_group()
