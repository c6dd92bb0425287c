"""Scenarios for two processes: Accelerate's DDP, and a compiled step in its place. Under torchrun it is a script."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.append(str(Path(__file__).parents[1]))  # where pytest looks, and torchrun does not

from accelerate_twins import train_both


def _compare() -> None:
    for settings in ({}, {"gradient_accumulation_steps": 2}):
        step = train_both(rows=80, **settings)
        assert "rank" in " ".join(step.report().notes)


def ddp(rank: int, group: dist.ProcessGroup) -> None:
    warnings.simplefilter("ignore")
    world = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511")
    _compare()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _compare()
    print("the same", flush=True)
    dist.destroy_process_group()
