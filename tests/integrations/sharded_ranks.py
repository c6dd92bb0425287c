"""Scenarios for two processes whose model is sharded over them: every door refuses it, and it trains on in eager."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from trainer_twins import Texts, arguments, llama

import takeback as tb
from takeback.errors import CaptureError, OptionError
from takeback.integrations.accelerate import compile_step
from takeback.integrations.transformers import TakebackTrainer


def _fsdp1(model: nn.Module) -> Any:
    return fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _fsdp2(model: nn.Module) -> Any:
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _under_torchrun(rank: int) -> None:
    warnings.simplefilter("ignore")
    world = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29513")


def _trains(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def plain(rank: int, group: dist.ProcessGroup) -> None:
    """A refusal has touched nothing: the model trains as its copy does that was never shown to takeback."""
    _under_torchrun(rank)
    wraps: tuple[Callable[[nn.Module], Any], ...] = (_fsdp1, _fsdp2)
    for wrap in wraps:
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        shown, hidden = wrap(copy.deepcopy(bare)), wrap(copy.deepcopy(bare))
        with pytest.raises(CaptureError, match=r"the model is sharded \(.*as group="):
            tb.compile_step(shown, lambda m, x, y: F.cross_entropy(m(x), y), torch.optim.SGD(shown.parameters(), 0.1))
        assert _trains(shown) == _trains(hidden)


def trainer(rank: int, group: dist.ProcessGroup) -> None:
    _under_torchrun(rank)
    for wrap in (_fsdp1, _fsdp2):
        with tempfile.TemporaryDirectory() as folder, pytest.raises(CaptureError, match="the model is sharded"):
            TakebackTrainer(model=wrap(llama()), args=arguments(Path(folder)), train_dataset=Texts())
    with tempfile.TemporaryDirectory() as folder, pytest.raises(OptionError, match=r"cannot honour fsdp="):
        TakebackTrainer(model=llama(), args=arguments(Path(folder), fsdp=True), train_dataset=Texts())


def accelerated(rank: int, group: dist.ProcessGroup) -> None:
    """On a CPU an Accelerator knows no FSDP of its own; a model may be sharded all the same."""
    _under_torchrun(rank)
    accelerator = accelerate.Accelerator(cpu=True)
    for wrap in (_fsdp1, _fsdp2):
        model = wrap(nn.Linear(6, 4))
        with pytest.raises(CaptureError, match="the model is sharded"):
            compile_step(accelerator, model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), 0.1))
