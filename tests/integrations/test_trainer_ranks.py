"""TakebackTrainer under torchrun: two processes with gloo have the results of Trainer's DistributedDataParallel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import takeback

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

HERE = Path(__file__).parent


def under_torchrun(folder: Path, *cases: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(HERE), str(Path(takeback.__file__).parents[1])])
    done = subprocess.run(
        [*command, str(HERE / "trainer_ranks.py"), str(folder), *cases],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_two_processes_that_accumulate_have_the_bits_of_distributed_data_parallel(tmp_path: Path) -> None:
    found = under_torchrun(tmp_path, "items of all ranks")
    assert found == {"items of all ranks": [], "items of all ranks: steps": 8}


@pytest.mark.slow
def test_two_processes_have_the_bits_of_distributed_data_parallel(tmp_path: Path) -> None:
    """And what several processes cannot have is refused."""
    found = under_torchrun(tmp_path)
    for name in ("one microbatch", "items of all ranks", "items of each rank", "means", "bf16", "lora"):
        assert found[name] == []
        assert found[f"{name}: steps"] >= 4
    assert "fp16=True" in found["fp16"]
    assert "2 processes" in found["early"]
    assert "ddp_broadcast_buffers=False" in found["buffers"]
    assert "Looking.on_pre_optimizer_step" in found["looking"]
