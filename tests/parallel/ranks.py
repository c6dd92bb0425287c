"""Starts the ranks of a group as processes, lets each run a list of scenarios, and brings back what each said.

A scenario is `function(rank, group)` with a gloo group of its own, so that one that breaks its group harms no other.
The processes are forked from one that has imported torch and done nothing else.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import multiprocessing
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from takeback import flat

TIMEOUT_S = 15  #: of a group
FINE = ""


def run_ranks(world: int, module: str, scenarios: list[str], folder: Path, limit_s: float = 80) -> dict[str, list[str]]:
    """By scenario, what each rank said: FINE, or the traceback. A rank that ended without a word said 'gone'."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["takeback", "torch.nn.parallel", "torch._dynamo", "torch.testing", module])
    ranks = [context.Process(target=_rank, args=(r, world, module, scenarios, str(folder))) for r in range(world)]
    for process in ranks:
        process.start()
    end = time.monotonic() + limit_s
    for process in ranks:
        process.join(max(end - time.monotonic(), 0.1))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    said: dict[str, list[str]] = {}
    for name in scenarios:
        files = [folder / f"{name}.{r}" for r in range(world)]
        said[name] = [f.read_text() if f.exists() else "gone" for f in files]
    return said


def _rank(rank: int, world: int, module: str, scenarios: list[str], folder: str) -> None:
    gc.collect()
    gc.freeze()  # see tests/conftest.py
    torch.set_num_threads(1)
    flat.BUCKET_BYTES = 256  # tiny models have several buckets too
    functions = importlib.import_module(module)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    for name in scenarios:
        function = getattr(functions, name)
        seconds = getattr(function, "timeout_s", TIMEOUT_S)
        group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        said = FINE
        try:
            function(rank, group)
        except BaseException:
            said = traceback.format_exc()
        (Path(folder) / f"{name}.{rank}").write_text(said)
    dist.destroy_process_group()


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found
